"""Batched NMS in Triton: one program per list, which decides one block of boxes after the other."""

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK, WARPS = 64, 8


@triton.jit
def _load_boxes(p_boxes, o, mask):
    left, top = tl.load(p_boxes + o * 4, mask, 0.0), tl.load(p_boxes + o * 4 + 1, mask, 0.0)
    right, bottom = tl.load(p_boxes + o * 4 + 2, mask, 0.0), tl.load(p_boxes + o * 4 + 3, mask, 0.0)
    return left, top, right, bottom


@triton.jit
def _iou_above(left, top, right, bottom, left_c, top_c, right_c, bottom_c, iou_threshold):
    """Whether the IoU of row boxes (R,) and column boxes (C,) is above the threshold, (R, C).

    It does not divide: rounding a quotient can flip the comparison where the IoU equals the threshold.
    """
    width = tl.minimum(right[:, None], right_c[None, :]) - tl.maximum(left[:, None], left_c[None, :])
    height = tl.minimum(bottom[:, None], bottom_c[None, :]) - tl.maximum(top[:, None], top_c[None, :])
    intersection = tl.maximum(width, 0.0) * tl.maximum(height, 0.0)
    areas = ((right - left) * (bottom - top))[:, None] + ((right_c - left_c) * (bottom_c - top_c))[None, :]
    return intersection > iou_threshold * (areas - intersection)


@triton.jit
def _nms_kernel(
    p_boxes,  # (S, N, 4), contiguous
    p_valid,  # (S, N), contiguous
    p_keep,  # (S, N), contiguous
    N,
    iou_threshold,
    BLOCK: tl.constexpr,
):
    i_s = tl.program_id(0).to(tl.int64)
    p_boxes, p_valid, p_keep = p_boxes + i_s * N * 4, p_valid + i_s * N, p_keep + i_s * N
    for first in range(0, N, BLOCK):
        o_n = first + tl.arange(0, BLOCK)
        free = tl.load(p_valid + o_n, o_n < N, 0).to(tl.int32)  # not suppressed by a box of an earlier block
        keep = free
        if tl.max(free) > 0:
            left, top, right, bottom = _load_boxes(p_boxes, o_n, o_n < N)
            for before in range(0, first, BLOCK):
                o_c = before + tl.arange(0, BLOCK)
                kept = tl.load(p_keep + o_c, volatile=True).to(tl.int32)
                if tl.max(kept) > 0:
                    left_c, top_c, right_c, bottom_c = _load_boxes(p_boxes, o_c, o_c < N)
                    above = _iou_above(left, top, right, bottom, left_c, top_c, right_c, bottom_c, iou_threshold)
                    suppressed = tl.max(tl.where(above & (kept != 0)[None, :], 1, 0), axis=1)
                    free = tl.where(suppressed > 0, 0, free)
            above = _iou_above(left, top, right, bottom, left, top, right, bottom, iou_threshold)
            above = above & (o_n[None, :] < o_n[:, None])
            # Only boxes that are kept suppress others, so iterate to the fixed point: after k iterations chains of k
            # boxes are decided, and most chains are short.
            keep = free
            changed = 1
            while changed > 0:
                suppressed = tl.max(tl.where(above & (keep != 0)[None, :], 1, 0), axis=1)
                settled = tl.where(suppressed > 0, 0, free)
                changed = tl.max(tl.where(settled != keep, 1, 0))
                keep = settled
        tl.store(p_keep + o_n, keep.to(tl.int8), o_n < N)
        tl.debug_barrier()  # the next block reads p_keep


def batched_nms(boxes: Tensor, valid: Tensor, iou_threshold: float) -> Tensor:
    """Boxes (S, N, 4), sorted by descending score -> which of them are kept (S, N)."""
    lists, count = valid.shape
    keep = torch.empty(lists, count, dtype=torch.bool, device=boxes.device)
    if keep.numel():
        flags, kept = valid.contiguous().view(torch.int8), keep.view(torch.int8)
        block = min(max(triton.next_power_of_2(count), 16), MAX_BLOCK)
        _nms_kernel[lists,](boxes.contiguous(), flags, kept, count, iou_threshold, block, num_warps=WARPS)
    return keep
