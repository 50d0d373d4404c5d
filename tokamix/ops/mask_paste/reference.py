"""Mask pasting in plain PyTorch."""

import torch
from torch import Tensor

MAX_PIXELS = 2**27  # of the masks pasted at once


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks (n, s, s) inside boxes (n, 4) -> (n, H, W) bool; see `tokamix.ops.mask_paste.op`.

    Bilinear interpolation is separable, so masks are pasted by two matrix products with interpolation weights.
    """
    height, width = size
    out = torch.zeros(len(masks), height, width, dtype=torch.bool, device=masks.device)
    step = max(1, MAX_PIXELS // (height * width))
    with torch.autocast(masks.device.type, enabled=False):  # a product in bfloat16 would shift the edges of the masks
        for i in range(0, len(masks), step):
            mask, box = masks[i : i + step].float(), boxes[i : i + step].float()
            rows = _weights(box[:, 1], box[:, 3], height, mask.shape[1])
            columns = _weights(box[:, 0], box[:, 2], width, mask.shape[2])
            out[i : i + step] = rows @ mask @ columns.mT >= 0.5
    return out


def _weights(low: Tensor, high: Tensor, pixels: int, cells: int) -> Tensor:
    """Interpolation weights (n, pixels, cells) of the cells between `low` and `high` (n,) for each pixel of a line."""
    pixel = torch.arange(pixels, device=low.device) + 0.5
    position = (pixel - low[:, None]) / (high - low).clamp(min=1e-6)[:, None] * cells - 0.5
    return (1 - (position[..., None] - torch.arange(cells, device=low.device)).abs()).clamp(min=0)
