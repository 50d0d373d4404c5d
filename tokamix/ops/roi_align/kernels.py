"""Multi-scale RoIAlign in Triton: one launch for the RoIs of all levels."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_P, BLOCK_C = 64, 64


@triton.jit
def _select(i_level, zero, one, two, three):
    return tl.where(i_level == 0, zero, tl.where(i_level == 1, one, tl.where(i_level == 2, two, three)))


@triton.jit
def _corners(position, size):
    """The pixels on both sides of each position (BLOCK_P,) on a line, the weight of the second, and a validity mask."""
    inside = (position >= -1.0) & (position <= size)
    position = tl.maximum(position, 0.0)
    low = tl.minimum(position.to(tl.int32), size - 1)
    high = tl.minimum(low + 1, size - 1)
    return low, high, tl.where(low < high, position - low, 0.0), inside


@triton.jit
def _roi_align_kernel(
    p_0,  # (B, H_0, W_0, C), contiguous, as are the next three
    p_1,
    p_2,
    p_3,
    p_boxes,  # (N, 4), float32
    p_image_index,  # (N,)
    p_level,  # (N,)
    p_out,  # (N, OUTPUT_SIZE * OUTPUT_SIZE, C)
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
    OUTPUT_SIZE: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_n = tl.program_id(0).to(tl.int64)
    o_p = tl.program_id(1) * BLOCK_P + tl.arange(0, BLOCK_P)  # output cells of the RoI
    o_c = tl.program_id(2) * BLOCK_C + tl.arange(0, BLOCK_C)
    i_level = tl.load(p_level + i_n)
    p_map = p_0
    if i_level == 1:
        p_map = p_1
    if i_level == 2:
        p_map = p_2
    if i_level == 3:
        p_map = p_3
    height = _select(i_level, height_0, height_1, height_2, height_3)
    width = _select(i_level, width_0, width_1, width_2, width_3)
    stride = _select(i_level, stride_0, stride_1, stride_2, stride_3).to(tl.float32)
    left, top = tl.load(p_boxes + i_n * 4) / stride, tl.load(p_boxes + i_n * 4 + 1) / stride
    right, bottom = tl.load(p_boxes + i_n * 4 + 2) / stride, tl.load(p_boxes + i_n * 4 + 3) / stride
    cell_y, cell_x = (bottom - top) / OUTPUT_SIZE, (right - left) / OUTPUT_SIZE
    samples_y, samples_x = tl.ceil(cell_y).to(tl.int32), tl.ceil(cell_x).to(tl.int32)
    first_y = top - 0.5 + (o_p // OUTPUT_SIZE) * cell_y
    first_x = left - 0.5 + (o_p % OUTPUT_SIZE) * cell_x
    p_map += tl.load(p_image_index + i_n) * height * width * C
    b_sum = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    m_c = (o_c < C)[None, :]
    for i_y in range(samples_y):
        y0, y1, f_y, in_y = _corners(first_y + (i_y + 0.5) * cell_y / samples_y, height)
        for i_x in range(samples_x):
            x0, x1, f_x, in_x = _corners(first_x + (i_x + 0.5) * cell_x / samples_x, width)
            mask = (in_y & in_x & (o_p < OUTPUT_SIZE * OUTPUT_SIZE))[:, None] & m_c
            b_00 = tl.load(p_map + (y0 * width + x0)[:, None] * C + o_c[None, :], mask, 0.0).to(tl.float32)
            b_01 = tl.load(p_map + (y0 * width + x1)[:, None] * C + o_c[None, :], mask, 0.0).to(tl.float32)
            b_10 = tl.load(p_map + (y1 * width + x0)[:, None] * C + o_c[None, :], mask, 0.0).to(tl.float32)
            b_11 = tl.load(p_map + (y1 * width + x1)[:, None] * C + o_c[None, :], mask, 0.0).to(tl.float32)
            b_top, b_bottom = b_00 + f_x[:, None] * (b_01 - b_00), b_10 + f_x[:, None] * (b_11 - b_10)
            b_sum += b_top + f_y[:, None] * (b_bottom - b_top)
    b_mean = b_sum / tl.maximum(samples_y * samples_x, 1).to(tl.float32)
    p_cells = p_out + (i_n * OUTPUT_SIZE * OUTPUT_SIZE + o_p[:, None]) * C + o_c[None, :]
    tl.store(p_cells, b_mean.to(p_out.dtype.element_ty), (o_p < OUTPUT_SIZE * OUTPUT_SIZE)[:, None] & m_c)


def multiscale_roi_align(
    features: Sequence[Tensor],
    boxes: Tensor,
    image_index: Tensor,
    level: Tensor,
    output_size: int,
    strides: Sequence[int],
) -> Tensor:
    """One to four maps (B, C, H_i, W_i), boxes (N, 4) -> (N, C, output_size, output_size), channels last in memory."""
    channels, count = features[0].shape[1], len(boxes)
    out = torch.empty(count, output_size, output_size, channels, device=boxes.device, dtype=features[0].dtype)
    if out.numel():
        last = [x.permute(0, 2, 3, 1).contiguous() for x in features]
        four = [min(i, len(features) - 1) for i in range(4)]  # missing levels are never selected
        grid = (count, triton.cdiv(output_size * output_size, BLOCK_P), triton.cdiv(channels, BLOCK_C))
        _roi_align_kernel[grid](
            *(last[i] for i in four),
            *(boxes.contiguous(), image_index.contiguous(), level.contiguous(), out, channels),
            *(last[i].shape[1] for i in four),
            *(last[i].shape[2] for i in four),
            *(strides[i] for i in four),
            *(output_size, BLOCK_P, BLOCK_C),
        )
    return out.permute(0, 3, 1, 2)
