"""Non-maximum suppression in Triton: one program for each list, which decides a block of boxes at a time."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_BLOCK, WARPS = 64, 8


@triton.jit
def _load_boxes(p_boxes, o, mask):
    left, top = tl.load(p_boxes + o * 4, mask, 0.0), tl.load(p_boxes + o * 4 + 1, mask, 0.0)
    right, bottom = tl.load(p_boxes + o * 4 + 2, mask, 0.0), tl.load(p_boxes + o * 4 + 3, mask, 0.0)
    return left, top, right, bottom


@triton.jit
def _overlapping(left, top, right, bottom, left_c, top_c, right_c, bottom_c, overlap):
    """Whether the IoU of boxes in rows (R,) and columns (C,) is above `overlap`, (R, C).

    Without a division, which may decide otherwise where the IoU is `overlap` to the last bit.
    """
    width = tl.minimum(right[:, None], right_c[None, :]) - tl.maximum(left[:, None], left_c[None, :])
    height = tl.minimum(bottom[:, None], bottom_c[None, :]) - tl.maximum(top[:, None], top_c[None, :])
    common = tl.maximum(width, 0.0) * tl.maximum(height, 0.0)
    areas = ((right - left) * (bottom - top))[:, None] + ((right_c - left_c) * (bottom_c - top_c))[None, :]
    return common > overlap * (areas - common)


@triton.jit
def _suppress_kernel(
    p_boxes,  # (S, N, 4), contiguous
    p_valid,  # (S, N), contiguous
    p_keep,  # (S, N), contiguous
    N,
    overlap,
    BLOCK: tl.constexpr,
):
    i_s = tl.program_id(0).to(tl.int64)
    p_boxes, p_valid, p_keep = p_boxes + i_s * N * 4, p_valid + i_s * N, p_keep + i_s * N
    for first in range(0, N, BLOCK):
        o_n = first + tl.arange(0, BLOCK)
        free = tl.load(p_valid + o_n, o_n < N, 0).to(tl.int32)  # no box of an earlier block hides it
        keep = free
        if tl.max(free) > 0:
            left, top, right, bottom = _load_boxes(p_boxes, o_n, o_n < N)
            for before in range(0, first, BLOCK):
                o_c = before + tl.arange(0, BLOCK)
                kept = tl.load(p_keep + o_c, volatile=True).to(tl.int32)
                if tl.max(kept) > 0:
                    left_c, top_c, right_c, bottom_c = _load_boxes(p_boxes, o_c, o_c < N)
                    hides = _overlapping(left, top, right, bottom, left_c, top_c, right_c, bottom_c, overlap)
                    hidden = tl.max(tl.where(hides & (kept != 0)[None, :], 1, 0), axis=1)
                    free = tl.where(hidden > 0, 0, free)
            hides = _overlapping(left, top, right, bottom, left, top, right, bottom, overlap)
            hides = hides & (o_n[None, :] < o_n[:, None])
            # who hides whom depends on who is hidden: after k rounds chains of k boxes are settled, and most are short
            keep = free
            changed = 1
            while changed > 0:
                hidden = tl.max(tl.where(hides & (keep != 0)[None, :], 1, 0), axis=1)
                settled = tl.where(hidden > 0, 0, free)
                changed = tl.max(tl.where(settled != keep, 1, 0))
                keep = settled
        tl.store(p_keep + o_n, keep.to(tl.int8), o_n < N)
        tl.debug_barrier()  # the next block reads it


def suppress(boxes: Tensor, valid: Tensor, overlap: float) -> Tensor:
    """Which of the boxes (S, N, 4), best first, no better one hides (S, N)."""
    lists, count = valid.shape
    keep = torch.empty(lists, count, dtype=torch.bool, device=boxes.device)
    if keep.numel():
        flags, kept = valid.contiguous().view(torch.int8), keep.view(torch.int8)
        block = min(max(triton.next_power_of_2(count), 16), MOST_BLOCK)
        _suppress_kernel[lists,](boxes.contiguous(), flags, kept, count, overlap, block, num_warps=WARPS)
    return keep
