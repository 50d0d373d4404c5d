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
    """Mix a batch with itself as the recipe says; returns images and soft labels (B, classes), smoothed.

    With `mixup_mode: batch` there is one λ, and for CutMix one box, per batch; with `elem` each image has its own
    choice of method, λ and box, drawn for its index in the batch of its process. Image i is mixed with image i + B/2,
    not with the reversed batch as in timm: so the pairs are the same if the batch is split over several processes, each
    of which has an even number of images and the same `seed`, such as (recipe.seed, epoch, step). Nothing waits for the
    device.
    """
    draw = np.random.default_rng(key("mix", *seed))
    smooth = recipe.label_smoothing
    targets = torch.full((len(labels), num_classes), smooth / num_classes, device=labels.device)
    targets.scatter_(1, labels[:, None], 1 - smooth + smooth / num_classes)
    alphas = {"mixup": recipe.mixup, "cutmix": recipe.cutmix}
    kinds = [kind for kind, alpha in alphas.items() if alpha > 0]
    if recipe.mixup_mode == "elem" and kinds:
        return _mix_each(images, targets, recipe, draw)
    mixed, switch = draw.random(2)
    if not kinds or mixed >= recipe.mixup_prob:
        return images, targets
    kind = kinds[0] if len(kinds) == 1 else "cutmix" if switch < recipe.mixup_switch_prob else "mixup"
    share = float(draw.beta(alphas[kind], alphas[kind]))
    half = len(images) // 2
    if kind == "mixup":
        images = torch.lerp(images.roll(half, 0), images, share)
    else:
        top, bottom, left, right = _box(images.shape[-2], images.shape[-1], share, draw)
        share = 1 - (bottom - top) * (right - left) / (images.shape[-2] * images.shape[-1])  # what was really kept
        images = images.clone()
        images[..., top:bottom, left:right] = images[..., top:bottom, left:right].roll(half, 0)
    return images, torch.lerp(targets.roll(half, 0), targets, share)


def _mix_each(images: Tensor, targets: Tensor, recipe: "Recipe", draw: np.random.Generator) -> tuple[Tensor, Tensor]:
    """Mix each image with its own choice of method, λ and box, drawn on the CPU and copied as one small table."""
    n, (height, width) = len(images), images.shape[-2:]
    half = n // 2
    mixed = draw.random(n) < recipe.mixup_prob
    both = recipe.mixup > 0 and recipe.cutmix > 0
    cut = draw.random(n) < recipe.mixup_switch_prob if both else np.full(n, recipe.cutmix > 0)
    mixup_share, cutmix_share = (
        draw.beta(alpha, alpha, n) if alpha > 0 else np.ones(n) for alpha in (recipe.mixup, recipe.cutmix)
    )
    side = np.sqrt(1 - cutmix_share)
    tall, wide = (height * side).astype(int), (width * side).astype(int)
    top, left = draw.integers(height, size=n) - tall // 2, draw.integers(width, size=n) - wide // 2
    bottom, right = np.minimum(top + tall, height), np.minimum(left + wide, width)
    top, left = np.maximum(top, 0), np.maximum(left, 0)
    covered = (bottom - top) * (right - left) / (height * width)
    share = np.where(mixed, np.where(cut, 1 - covered, mixup_share), 1.0)  # of the image itself in its label
    boxes = np.stack([top, bottom, left, right]) * (mixed & cut)  # empty without CutMix
    table = torch.from_numpy(np.concatenate([np.where(cut, 1.0, share)[None], share[None], boxes])).float()
    if images.is_cuda:
        table = table.pin_memory()  # otherwise the copy would wait for the device
    outside_weight, label_weight, *edges = table.to(images.device, non_blocking=True)[:, :, None, None, None]
    y = torch.arange(height, device=images.device)[:, None]
    x = torch.arange(width, device=images.device)
    inside = (y >= edges[0]) & (y < edges[1]) & (x >= edges[2]) & (x < edges[3])  # (B, 1, H, W)
    weight = torch.where(inside, 0.0, outside_weight)  # of the image itself in each pixel
    images = torch.lerp(images.roll(half, 0), images, weight)
    return images, torch.lerp(targets.roll(half, 0), targets, label_weight[:, 0, 0])


def _box(height: int, width: int, share: float, draw: np.random.Generator) -> tuple[int, int, int, int]:
    """A box around a random point that covers 1 - share of the image, cut at its edges."""
    side = math.sqrt(1 - share)
    tall, wide = int(height * side), int(width * side)
    y, x = int(draw.integers(height)), int(draw.integers(width))
    top, left = y - tall // 2, x - wide // 2
    return max(top, 0), min(top + tall, height), max(left, 0), min(left + wide, width)
