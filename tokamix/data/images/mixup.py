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

    λ and CutMix's box are the same for the whole batch, as in timm's batch mode. Image i is mixed with image i + B/2
    instead of the batch in reverse: the pairs stay the same if the batch is split over several processes that have an
    even number of images each and call this with the same `seed`, such as (recipe.seed, epoch, step). There is no
    synchronisation with the device.
    """
    rng = np.random.default_rng(key("mix", *seed))
    smooth = recipe.label_smoothing
    targets = torch.full((len(labels), num_classes), smooth / num_classes, device=labels.device)
    targets.scatter_(1, labels[:, None], 1 - smooth + smooth / num_classes)
    alphas = {"mixup": recipe.mixup, "cutmix": recipe.cutmix}
    kinds = [kind for kind, alpha in alphas.items() if alpha > 0]
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


def _box(height: int, width: int, lam: float, rng: np.random.Generator) -> tuple[int, int, int, int]:
    """A box around a random point with an area of 1 - λ of the image, clipped at its edges."""
    side = math.sqrt(1 - lam)
    tall, wide = int(height * side), int(width * side)
    y, x = int(rng.integers(height)), int(rng.integers(width))
    top, left = y - tall // 2, x - wide // 2
    return max(top, 0), min(top + tall, height), max(left, 0), min(left + wide, width)
