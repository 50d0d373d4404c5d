"""RoIAlign over the levels of a pyramid in Triton: one launch, whatever level each region is on."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_P, BLOCK_C = 64, 64


@triton.jit
def _of_level(i_level, zero, one, two, three):
    return tl.where(i_level == 0, zero, tl.where(i_level == 1, one, tl.where(i_level == 2, two, three)))


@triton.jit
def _corners(place, size):
    """The two cells next to each place (BLOCK_P,) on a line, how far to go to the second, and whether it is on it."""
    inside = (place >= -1.0) & (place <= size)
    place = tl.maximum(place, 0.0)
    low = tl.minimum(place.to(tl.int32), size - 1)
    high = tl.minimum(low + 1, size - 1)
    return low, high, tl.where(low < high, place - low, 0.0), inside


@triton.jit
def _align_kernel(
    p_0,  # (B, H_0, W_0, C), contiguous, as are the next three
    p_1,
    p_2,
    p_3,
    p_boxes,  # (N, 4), float32
    p_image,  # (N,)
    p_level,  # (N,)
    p_out,  # (N, SIDE * SIDE, C)
    C,
    height_0,
    height_1,
    height_2,
    height_3,
    width_0,
    width_1,
    width_2,
    width_3,
    stride_0,
    stride_1,
    stride_2,
    stride_3,
    SIDE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    o_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)  # cells of the region
    o_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    i_level = tl.load(p_level + i_n)
    p_map = p_0
    if i_level == 1:
        p_map = p_1
    if i_level == 2:
        p_map = p_2
    if i_level == 3:
        p_map = p_3
    height = _of_level(i_level, height_0, height_1, height_2, height_3)
    width = _of_level(i_level, width_0, width_1, width_2, width_3)
    stride = _of_level(i_level, stride_0, stride_1, stride_2, stride_3).to(tl.float32)
    left, top = tl.load(p_boxes + i_n * 4) / stride, tl.load(p_boxes + i_n * 4 + 1) / stride
    right, bottom = tl.load(p_boxes + i_n * 4 + 2) / stride, tl.load(p_boxes + i_n * 4 + 3) / stride
    cell_y, cell_x = (bottom - top) / SIDE, (right - left) / SIDE
    samples_y, samples_x = tl.ceil(cell_y).to(tl.int32), tl.ceil(cell_x).to(tl.int32)
    first_y = top - 0.5 + (o_p // SIDE) * cell_y
    first_x = left - 0.5 + (o_p % SIDE) * cell_x
    p_map += tl.load(p_image + i_n) * height * width * C
    b_sum = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    m_c = (o_c < C)[None, :]
    for i_y in range(samples_y):
        y0, y1, f_y, in_y = _corners(first_y + (i_y + 0.5) * cell_y / samples_y, height)
        for i_x in range(samples_x):
            x0, x1, f_x, in_x = _corners(first_x + (i_x + 0.5) * cell_x / samples_x, width)
            mask = (in_y & in_x & (o_p < SIDE * SIDE))[:, None] & m_c
            b_00 = tl.load(p_map + (y0 * width + x0)[:, None] * C + o_c[None, :], mask, 0.0).to(tl.float32)
            b_01 = tl.load(p_map + (y0 * width + x1)[:, None] * C + o_c[None, :], mask, 0.0).to(tl.float32)
            b_10 = tl.load(p_map + (y1 * width + x0)[:, None] * C + o_c[None, :], mask, 0.0).to(tl.float32)
            b_11 = tl.load(p_map + (y1 * width + x1)[:, None] * C + o_c[None, :], mask, 0.0).to(tl.float32)
            b_top, b_bottom = b_00 + f_x[:, None] * (b_01 - b_00), b_10 + f_x[:, None] * (b_11 - b_10)
            b_sum += b_top + f_y[:, None] * (b_bottom - b_top)
    b_mean = b_sum / tl.maximum(samples_y * samples_x, 1).to(tl.float32)
    p_cells = p_out + (i_n * SIDE * SIDE + o_p[:, None]) * C + o_c[None, :]
    tl.store(p_cells, b_mean.to(p_out.dtype.element_ty), (o_p < SIDE * SIDE)[:, None] & m_c)


def align_regions(
    maps: Sequence[Tensor], boxes: Tensor, image: Tensor, level: Tensor, side: int, strides: Sequence[int]
) -> Tensor:
    """One to four maps (B, C, H_i, W_i), boxes (N, 4) -> (N, C, side, side), channels last in memory."""
    channels, count = maps[0].shape[1], len(boxes)
    out = torch.empty(count, side, side, channels, device=boxes.device, dtype=maps[0].dtype)
    if out.numel():
        last = [x.permute(0, 2, 3, 1).contiguous() for x in maps]
        four = [min(i, len(maps) - 1) for i in range(4)]  # levels that are not there are never chosen
        grid = (count, triton.cdiv(side * side, BLOCK_P), triton.cdiv(channels, BLOCK_C))
        _align_kernel[grid](
            *(last[i] for i in four),
            *(boxes.contiguous(), image.contiguous(), level.contiguous(), out, channels),
            *(last[i].shape[1] for i in four),
            *(last[i].shape[2] for i in four),
            *(strides[i] for i in four),
            *(side, BLOCK_P, BLOCK_C),
        )
    return out.permute(0, 3, 1, 2)
