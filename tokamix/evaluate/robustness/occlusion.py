"""Hidden parts of an image: a square in the centre, or random patches.

Pixels are (B, C, H, W), from 0 to 1. Hidden ones get the colour that becomes 0 after normalisation, the model's mean.
"""

import math

import torch
from torch import Tensor

from tokamix.data.rng import generator

PATCHES = 14  # patches of a side, as in a ViT with patches of 16 px at 224 px


def occlude_centre(images: Tensor, percent: float, fill: Tensor) -> Tensor:
    """Hide a centred rectangle with this percentage of the image's area.

    The centre occlusion of CutMix (arXiv 1905.04899) and of CB's Table S2; neither states one size, hence a curve.

    Args:
        images: (B, C, H, W).
        percent: of the area, from 0 to 100.
        fill: colour (C, 1, 1).
    """
    height, width = images.shape[-2:]
    ratio = math.sqrt(percent / 100)
    hidden = round(height * ratio), round(width * ratio)
    top, left = (height - hidden[0]) // 2, (width - hidden[1]) // 2
    occluded = images.clone()
    occluded[..., top : top + hidden[0], left : left + hidden[1]] = fill
    return occluded


def drop_patches(images: Tensor, percent: float, fill: Tensor, indices: list[int]) -> Tensor:
    """Hide this percentage of the patches of a regular grid, drawn anew for each image.

    The random patch drop of "Intriguing Properties of Vision Transformers" (arXiv 2105.10497): 14 x 14 patches at 224
    px. The patches hidden at a lower percentage are a subset of those at a higher one.

    Args:
        images: (B, C, H, W).
        percent: of the patches, from 0 to 100.
        fill: colour (C, 1, 1).
        indices: number of each image in the data set, the seed of its patches.
    """
    height, width = images.shape[-2:]
    side = max(1, min(height, width) // PATCHES)
    rows, columns = math.ceil(height / side), math.ceil(width / side)
    hidden = images.new_zeros(len(images), rows * columns)
    count = round(rows * columns * percent / 100)
    for i, index in enumerate(indices):
        order = torch.randperm(rows * columns, generator=generator("patch drop", index))
        hidden[i, order[:count].to(images.device)] = 1
    mask = hidden.view(-1, 1, rows, columns).repeat_interleave(side, 2).repeat_interleave(side, 3)
    return images.where(mask[..., :height, :width] == 0, fill)
