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

    One λ, and for CutMix one box, for the batch, as timm's batch mode. Image i is mixed with image i + B/2 instead of
    the batch in reverse: so the pairs are the same when the batch is dealt out to several processes, each of which
    has an even share and calls this with the same `seed`, such as (recipe.seed, epoch, step). Nothing waits for the
    device.
    """
    draw = np.random.default_rng(key("mix", *seed))
    smooth = recipe.label_smoothing
    targets = torch.full((len(labels), num_classes), smooth / num_classes, device=labels.device)
    targets.scatter_(1, labels[:, None], 1 - smooth + smooth / num_classes)
    alphas = {"mixup": recipe.mixup, "cutmix": recipe.cutmix}
    kinds = [kind for kind, alpha in alphas.items() if alpha > 0]
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


def _box(height: int, width: int, share: float, draw: np.random.Generator) -> tuple[int, int, int, int]:
    """A box around a random point that covers 1 - share of the image, cut at its edges."""
    side = math.sqrt(1 - share)
    tall, wide = int(height * side), int(width * side)
    y, x = int(draw.integers(height)), int(draw.integers(width))
    top, left = y - tall // 2, x - wide // 2
    return max(top, 0), min(top + tall, height), max(left, 0), min(left + wide, width)
