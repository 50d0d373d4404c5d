"""Mixup (arXiv 1710.09412) and CutMix (arXiv 1905.04899) of a batch, on its device."""

import math
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from tokamix.data.rng import key

if TYPE_CHECKING:
    from tokamix.recipes import Recipe


def mix(
    images: Tensor, labels: Tensor, recipe: "Recipe", num_classes: int, seed: tuple[int, ...]
) -> tuple[Tensor, Tensor]:
    """Apply the recipe's mixup or CutMix to a batch; return images and smoothed soft labels (B, classes).

    With `mixup_mode: batch` λ and CutMix's box are the same for the whole batch, as in timm; with `elem` each image has
    its own choice of method, λ and box, drawn for its index in the batch of its process. Image i is mixed with image
    i + B/2 instead of the batch in reverse: the pairs stay the same if the batch is split over several processes that
    have an even number of images each and call this with the same `seed`, such as (recipe.seed, epoch, step). There is
    no synchronisation with the device.
    """
    rng = np.random.default_rng(key("mix", *seed))
    smooth = recipe.label_smoothing
    targets = torch.full((len(labels), num_classes), smooth / num_classes, device=labels.device)
    targets.scatter_(1, labels[:, None], 1 - smooth + smooth / num_classes)
    alphas = {"mixup": recipe.mixup, "cutmix": recipe.cutmix}
    kinds = [kind for kind, alpha in alphas.items() if alpha > 0]
    if recipe.mixup_mode == "elem" and kinds:
        return _mix_each(images, targets, recipe, rng)
    mixed, switch = rng.random(2)
    if not kinds or mixed >= recipe.mixup_prob:
        return images, targets
    kind = kinds[0] if len(kinds) == 1 else "cutmix" if switch < recipe.mixup_switch_prob else "mixup"
    lam = float(rng.beta(alphas[kind], alphas[kind]))
    half = len(images) // 2
    if kind == "mixup":
        images = torch.lerp(images.roll(half, 0), images, lam)
    else:
        top, bottom, left, right = _box(images.shape[-2], images.shape[-1], lam, rng)
        lam = 1 - (bottom - top) * (right - left) / (images.shape[-2] * images.shape[-1])  # after clipping at the edges
        images = images.clone()
        images[..., top:bottom, left:right] = images[..., top:bottom, left:right].roll(half, 0)
    return images, torch.lerp(targets.roll(half, 0), targets, lam)


def _mix_each(images: Tensor, targets: Tensor, recipe: "Recipe", rng: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Mix each image with its own choice of method, λ and box, drawn on the CPU and copied as one small table."""
    n, (height, width) = len(images), images.shape[-2:]
    half = n // 2
    mixed = rng.random(n) < recipe.mixup_prob
    both = recipe.mixup > 0 and recipe.cutmix > 0
    cut = rng.random(n) < recipe.mixup_switch_prob if both else np.full(n, recipe.cutmix > 0)
    mixup_lam, cutmix_lam = (
        rng.beta(alpha, alpha, n) if alpha > 0 else np.ones(n) for alpha in (recipe.mixup, recipe.cutmix)
    )
    side = np.sqrt(1 - cutmix_lam)
    tall, wide = (height * side).astype(int), (width * side).astype(int)
    top, left = rng.integers(height, size=n) - tall // 2, rng.integers(width, size=n) - wide // 2
    bottom, right = np.minimum(top + tall, height), np.minimum(left + wide, width)
    top, left = np.maximum(top, 0), np.maximum(left, 0)
    covered = (bottom - top) * (right - left) / (height * width)
    lam = np.where(mixed, np.where(cut, 1 - covered, mixup_lam), 1.0)  # of the image itself in its label
    boxes = np.stack([top, bottom, left, right]) * (mixed & cut)  # empty without CutMix
    table = torch.from_numpy(np.concatenate([np.where(cut, 1.0, lam)[None], lam[None], boxes])).float()
    if images.is_cuda:
        table = table.pin_memory()  # otherwise the copy would wait for the device
    outside_weight, label_weight, *edges = table.to(images.device, non_blocking=True)[:, :, None, None, None]
    y = torch.arange(height, device=images.device)[:, None]
    x = torch.arange(width, device=images.device)
    inside = (y >= edges[0]) & (y < edges[1]) & (x >= edges[2]) & (x < edges[3])  # (B, 1, H, W)
    weight = torch.where(inside, 0.0, outside_weight)  # of the image itself in each pixel
    images = torch.lerp(images.roll(half, 0), images, weight)
    return images, torch.lerp(targets.roll(half, 0), targets, label_weight[:, 0, 0])


def _box(height: int, width: int, lam: float, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """A box around a random point with an area of 1 - λ of the image, clipped at its edges."""
    side = math.sqrt(1 - lam)
    tall, wide = int(height * side), int(width * side)
    y, x = int(rng.integers(height)), int(rng.integers(width))
    top, left = y - tall // 2, x - wide // 2
    return max(top, 0), min(top + tall, height), max(left, 0), min(left + wide, width)
