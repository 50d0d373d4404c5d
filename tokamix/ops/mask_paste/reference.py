"""Masks put into the image, in plain PyTorch."""

import torch
from torch import Tensor

AT_ONCE = 2**27  # values of masks


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int]) -> Tensor:
    """Masks (n, s, s) inside boxes (n, 4) -> (n, H, W) bool; see `tokamix.ops.mask_paste.op`.

    Bilinear interpolation is separable, so that all masks are pasted by two products with thin matrices of weights.
    """
    height, width = size
    out = torch.zeros(len(masks), height, width, dtype=torch.bool, device=masks.device)
    step = max(1, AT_ONCE // (height * width))
    with torch.autocast(masks.device.type, enabled=False):  # a product in bfloat16 would move the masks' edges
        for i in range(0, len(masks), step):
            some, box = masks[i : i + step].float(), boxes[i : i + step].float()
            rows = _weights(box[:, 1], box[:, 3], height, some.shape[1])
            columns = _weights(box[:, 0], box[:, 2], width, some.shape[2])
            out[i : i + step] = rows @ some @ columns.mT >= 0.5
    return out


def _weights(low: Tensor, high: Tensor, pixels: int, cells: int) -> Tensor:
    """How much each pixel of a line takes of each cell between `low` and `high` (n,): (n, pixels, cells)."""
    pixel = torch.arange(pixels, device=low.device) + 0.5
    place = (pixel - low[:, None]) / (high - low).clamp(min=1e-6)[:, None] * cells - 0.5
    return (1 - (place[..., None] - torch.arange(cells, device=low.device)).abs()).clamp(min=0)
