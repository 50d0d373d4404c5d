"""Mask pasting in Triton: each pixel of the output is written once, and no intermediate tensor."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_Y, BLOCK_X = 16, 128


@triton.jit
def _positions(o, low, high, cells):
    """Positions of pixels o between `low` and `high`: the cell before each, and the weight of the next one."""
    position = (o + 0.5 - low) / tl.maximum(high - low, 1e-6) * cells - 0.5
    position = tl.minimum(tl.maximum(position, -2.0), cells + 1.0)  # zero beyond; also avoids integer overflow
    before = tl.floor(position)
    return before.to(tl.int32), position - before


@triton.jit
def _cells(p_mask, y, x, SIDE):
    """Values of the mask at cells y, x; zero outside."""
    inside = ((y >= 0) & (y < SIDE))[:, None] & ((x >= 0) & (x < SIDE))[None, :]
    return tl.load(p_mask + y[:, None] * SIDE + x[None, :], inside, 0.0).to(tl.float32)


@triton.jit
def _paste_kernel(
    p_masks,  # (n, SIDE, SIDE), contiguous
    p_boxes,  # (n, 4), float32
    p_out,  # (n, H, W), bytes
    H,
    W,
    SIDE,
    BLOCK_Y: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    o_y = tl.program_id(1) * BLOCK_Y + tl.arange(0, BLOCK_Y)
    o_x = tl.program_id(2) * BLOCK_X + tl.arange(0, BLOCK_X)
    left, top = tl.load(p_boxes + i_n * 4), tl.load(p_boxes + i_n * 4 + 1)
    right, bottom = tl.load(p_boxes + i_n * 4 + 2), tl.load(p_boxes + i_n * 4 + 3)
    y, f_y = _positions(o_y, top, bottom, SIDE)
    x, f_x = _positions(o_x, left, right, SIDE)
    p_mask = p_masks + i_n * SIDE * SIDE
    f_y, f_x = f_y[:, None], f_x[None, :]
    b_above = (1 - f_x) * _cells(p_mask, y, x, SIDE) + f_x * _cells(p_mask, y, x + 1, SIDE)
    b_below = (1 - f_x) * _cells(p_mask, y + 1, x, SIDE) + f_x * _cells(p_mask, y + 1, x + 1, SIDE)
    b_in = (1 - f_y) * b_above + f_y * b_below >= 0.5
    p_pixels = p_out + i_n * H * W + o_y[:, None] * W + o_x[None, :]
    tl.store(p_pixels, b_in.to(tl.int8), (o_y < H)[:, None] & (o_x < W)[None, :])


def paste_masks(masks: Tensor, boxes: Tensor, size: list[int]) -> Tensor:
    """Masks (n, s, s) inside boxes (n, 4) -> (n, H, W) bool."""
    height, width = size
    out = torch.empty(len(masks), height, width, dtype=torch.bool, device=masks.device)
    if out.numel():
        grid = (len(masks), triton.cdiv(height, BLOCK_Y), triton.cdiv(width, BLOCK_X))
        inputs = masks.contiguous(), boxes.contiguous(), out.view(torch.int8)
        _paste_kernel[grid](*inputs, height, width, masks.shape[1], BLOCK_Y, BLOCK_X)
    return out
