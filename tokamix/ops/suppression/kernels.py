"""Non-maximum suppression in Triton: one program for each list, which steps from one box that is kept to the next."""

import torch
import triton
import triton.language as tl
from torch import Tensor


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
    o_n = tl.arange(0, BLOCK)
    mask = o_n < N
    p_own = p_boxes + i_s * N * 4
    left, top = tl.load(p_own + o_n * 4, mask, 0.0), tl.load(p_own + o_n * 4 + 1, mask, 0.0)
    right, bottom = tl.load(p_own + o_n * 4 + 2, mask, 0.0), tl.load(p_own + o_n * 4 + 3, mask, 0.0)
    area = (right - left) * (bottom - top)
    candidates = tl.load(p_valid + i_s * N + o_n, mask, 0).to(tl.int32)
    keep = tl.zeros((BLOCK,), tl.int32)
    best = tl.min(tl.where(candidates != 0, o_n, BLOCK))
    while best < BLOCK:
        keep = tl.where(o_n == best, 1, keep)
        x0, y0 = tl.load(p_own + best * 4), tl.load(p_own + best * 4 + 1)
        x1, y1 = tl.load(p_own + best * 4 + 2), tl.load(p_own + best * 4 + 3)
        width = tl.maximum(tl.minimum(right, x1) - tl.maximum(left, x0), 0.0)
        height = tl.maximum(tl.minimum(bottom, y1) - tl.maximum(top, y0), 0.0)
        common = width * height
        hidden = common > overlap * ((x1 - x0) * (y1 - y0) + area - common)
        candidates = tl.where(hidden | (o_n <= best), 0, candidates)
        best = tl.min(tl.where(candidates != 0, o_n, BLOCK))
    tl.store(p_keep + i_s * N + o_n, keep.to(tl.int8), mask)


def suppress(boxes: Tensor, valid: Tensor, overlap: float) -> Tensor:
    """Which of the boxes (S, N, 4), best first, no better one hides (S, N)."""
    lists, count = valid.shape
    keep = torch.empty(lists, count, dtype=torch.bool, device=boxes.device)
    if keep.numel():
        block = triton.next_power_of_2(count)
        warps = min(max(block // 128, 1), 16)
        flags, kept = valid.contiguous().view(torch.int8), keep.view(torch.int8)
        _suppress_kernel[lists,](boxes.contiguous(), flags, kept, count, overlap, block, num_warps=warps)
    return keep
