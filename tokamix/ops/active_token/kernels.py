"""The active token gather in Triton, forward and backward, in any strides and without atomics.

A sample and its target lie on one line of the map, a row or a column. A program handles whole lines of a few channels,
or a part of a long line, and a tile is (samples, channels that share an offset): lines, their tokens and the groups of
channels are one axis, so that neighbouring threads hold neighbouring groups. The forward pass gathers samples from the
cache. The backward pass does not scatter: a token's gradient is a sum over the distances r between tokens of its line
and their samples, and the line's offsets give the range of r. All results are deterministic.

Bytes of the forward pass: x and offsets in, two maps out. Backward: for each direction x, offsets and a gradient in,
the gradients of x and of the offsets out; the second direction reads the first one's gradient of x and adds to it.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from tokamix.ops.launch import CACHE_SIZE, Launch, empty_like

TILE = 4096  # elements per program
PART = 64  # tokens per program on longer lines: a whole long line would leave room for few channels only


@triton.jit
def _place(G, BLOCK_G: tl.constexpr, LONG: tl.constexpr):
    """The lines and groups of the program."""
    i_line, i_g = tl.program_id(0), tl.program_id(1)
    if LONG:  # neighbouring programs take neighbouring channels: a large image does not stay in the cache
        i_line, i_g = i_line // tl.cdiv(G, BLOCK_G), i_line % tl.cdiv(G, BLOCK_G)
    return i_line, i_g


@triton.jit
def _part(i_line, n, BLOCK_N: tl.constexpr, LONG: tl.constexpr):
    """The line of part i_line, and its first token."""
    start = 0
    if LONG:
        i_line, start = i_line // tl.cdiv(n, BLOCK_N), i_line % tl.cdiv(n, BLOCK_N) * BLOCK_N
    return i_line, start


@triton.jit
def _tile(
    i_line,
    start,
    i_g,
    n,
    lines,
    G,
    SHARE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EVEN: tl.constexpr,
):
    """Position on the line, line, group and channels of a program's samples, and masks of groups and channels."""
    o_sample = tl.arange(0, BLOCK_N * LINES * BLOCK_G)[:, None]
    o_g = i_g * BLOCK_G + o_sample % BLOCK_G
    o_n = start + o_sample // BLOCK_G % BLOCK_N
    o_line = i_line * LINES + o_sample // (BLOCK_G * BLOCK_N)
    o_s = tl.arange(0, BLOCK_S)[None, :]
    m_group = (o_n < n) & (o_line < lines)
    m_tile = m_group
    if not EVEN:
        m_group = m_group & (o_g < G)
        m_tile = m_group & (o_s < SHARE)
    return o_n, o_line, o_g, o_g * SHARE + o_s, m_group, m_tile


@triton.jit
def _look(b_offset, o_n, n):
    """The token to the left of the sampled position, and the fraction beyond it."""
    b_at = o_n.to(tl.float32) + b_offset
    b_at = tl.maximum(b_at, -2.0, propagate_nan=tl.PropagateNan.ALL)
    b_at = tl.minimum(b_at, n * 1.0, propagate_nan=tl.PropagateNan.ALL)
    b_left = tl.floor(b_at)
    return b_left.to(tl.int32), b_at - b_left


@triton.jit
def _sample(p_x, o_line, o_c, b_pick, m_tile, n, stride_l, stride_n, stride_c):
    """The tokens b_pick (samples, 1) of the lines and their right neighbours; zero outside the map."""
    o_x = o_line * stride_l + b_pick * stride_n + o_c * stride_c
    b_left = tl.load(p_x + o_x, mask=m_tile & (b_pick >= 0) & (b_pick < n), other=0.0)
    b_right = tl.load(p_x + stride_n + o_x, mask=m_tile & (b_pick >= -1) & (b_pick < n - 1), other=0.0)
    return b_left.to(tl.float32), b_right.to(tl.float32)


@triton.jit
def _repeat(b, TIMES: tl.constexpr):
    """Repeat each entry of b (rows, G) TIMES times, a power of two -> (rows, G * TIMES); without moving data."""
    G: tl.constexpr = b.shape[1]
    for i in tl.static_range(6):  # up to MAX_SHARE
        if 2**i < TIMES:
            b = tl.reshape(tl.join(b, b), (b.shape[0], G * 2 ** (i + 1)))
    return b


# The strides of groups are passed plus 1, so that no compiler knows that they are 1: offsets would be read as vectors,
# in a layout different from that of their channels, and would have to be exchanged between threads. (Inductor, which
# launches the kernels in compiled graphs, ignores `do_not_specialize`.)


@triton.jit
def _forward_kernel(
    p_x,  # (B, H, W, C)
    p_offset,  # (B, H, W, directions * G)
    p_width,  # (B, H, W, C), contiguous
    p_height,  # (B, H, W, C), contiguous
    H,
    W,
    C,
    G,
    stride_xb,
    stride_xh,
    stride_xw,
    stride_xc,
    stride_ob,
    stride_oh,
    stride_ow,
    stride_og_plus_1,
    WIDTH: tl.constexpr,
    HEIGHT: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EVEN: tl.constexpr,
    LONG: tl.constexpr,
):
    stride_og = stride_og_plus_1 - 1
    # the columns of an image follow its rows, so that they find it in the cache
    i_line, i_g = _place(G, BLOCK_G, LONG)
    rows = tl.cdiv(H, LINES) if WIDTH else 0
    columns = tl.cdiv(W, LINES) if HEIGHT else 0
    if LONG:
        rows, columns = rows * tl.cdiv(W, BLOCK_N), columns * tl.cdiv(H, BLOCK_N)
    i_b = (i_line // (rows + columns)).to(tl.int64)
    i_line %= rows + columns
    if i_line < rows:
        n, lines = W, H
        stride_xn, stride_xl = stride_xw, stride_xh
        stride_on, stride_ol = stride_ow, stride_oh
        stride_n, stride_l = C, W * C
        p_out = p_width
    else:
        i_line -= rows
        n, lines = H, W
        stride_xn, stride_xl = stride_xh, stride_xw
        stride_on, stride_ol = stride_oh, stride_ow
        stride_n, stride_l = W * C, C
        p_out = p_height
        if WIDTH:
            p_offset += G * stride_og
    i_line, start = _part(i_line, n, BLOCK_N, LONG)
    o_n, o_line, o_g, o_c, m_group, m_tile = _tile(
        i_line, start, i_g, n, lines, G, SHARE, BLOCK_N, LINES, BLOCK_G, BLOCK_S, EVEN
    )
    o_offset = o_line * stride_ol + o_n * stride_on + o_g * stride_og
    b_offset = tl.load(p_offset + i_b * stride_ob + o_offset, mask=m_group, other=0.0).to(tl.float32)
    b_pick, b_fraction = _look(b_offset, o_n, n)
    b_left, b_right = _sample(p_x + i_b * stride_xb, o_line, o_c, b_pick, m_tile, n, stride_xl, stride_xn, stride_xc)
    b_out = b_left + (b_right - b_left) * b_fraction
    o_out = o_line * stride_l + o_n * stride_n + o_c
    tl.store(p_out + i_b * H * W * C + o_out, b_out.to(p_out.dtype.element_ty), mask=m_tile)


@triton.jit
def _backward_kernel(
    p_grad,  # (B, H, W, C)
    p_x,  # (B, H, W, C)
    p_offset,  # (B, H, W, directions * G)
    p_grad_x,  # (B, H, W, C), contiguous
    p_grad_offset,  # (B, H, W, directions * G), contiguous
    n,
    lines,
    G,
    stride_db,
    stride_dl,
    stride_dn,
    stride_dc,
    stride_xb,
    stride_xl,
    stride_xn,
    stride_xc,
    stride_ob,
    stride_ol,
    stride_on,
    stride_oc,  # of groups, and again plus 1
    stride_og_plus_1,
    stride_b,
    stride_l,
    stride_n,
    stride_gb,
    stride_gl,
    stride_gn,
    stride_gg_plus_1,
    FIRST: tl.constexpr,  # group of the direction
    ADD: tl.constexpr,
    SHARE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
    EVEN: tl.constexpr,
    LONG: tl.constexpr,
):
    stride_og, stride_gg = stride_og_plus_1 - 1, stride_gg_plus_1 - 1
    i_line, i_g = _place(G, BLOCK_G, LONG)
    i_line, start = _part(i_line, n, BLOCK_N, LONG)
    blocks = tl.cdiv(lines, LINES)
    i_b = (i_line // blocks).to(tl.int64)
    i_line %= blocks
    p_offset += i_b * stride_ob + FIRST * stride_oc
    p_grad += i_b * stride_db

    o_n, o_line, o_g, o_c, m_group, m_tile = _tile(
        i_line, start, i_g, n, lines, G, SHARE, BLOCK_N, LINES, BLOCK_G, BLOCK_S, EVEN
    )
    o_offset = o_line * stride_ol + o_n * stride_on + o_g * stride_og
    b_offset = tl.load(p_offset + o_offset, mask=m_group, other=0.0).to(tl.float32)
    b_pick, _ = _look(b_offset, o_n, n)
    b_left, b_right = _sample(p_x + i_b * stride_xb, o_line, o_c, b_pick, m_tile, n, stride_xl, stride_xn, stride_xc)
    b_grad = tl.load(p_grad + o_line * stride_dl + o_n * stride_dn + o_c * stride_dc, mask=m_tile, other=0.0)
    b_slope = tl.sum(b_grad.to(tl.float32) * (b_right - b_left), axis=1, keep_dims=True)
    p_grad_offset += FIRST + i_b * stride_gb + o_line * stride_gl + o_n * stride_gn + o_g * stride_gg
    tl.store(p_grad_offset, b_slope.to(p_grad_offset.dtype.element_ty), mask=m_group)

    # the token r to the left samples this one if its offset is within one of r
    if LONG:
        b_first, b_last = tl.full(b_pick.shape, 1 << 30, tl.int32), tl.full(b_pick.shape, -(1 << 30), tl.int32)
        for other in range(0, n, BLOCK_N):
            o_other = o_n - start + other
            o_offset = o_line * stride_ol + o_other * stride_on + o_g * stride_og
            m_other = (o_other < n) & (o_line < lines) & (o_g < G)
            b_offset = tl.load(p_offset + o_offset, mask=m_other, other=0.0).to(tl.float32)
            b_pick, _ = _look(b_offset, o_other, n)
            m_seen = m_other & (b_pick >= start - 1) & (b_pick < tl.minimum(start + BLOCK_N, n))
            b_first = tl.minimum(b_first, tl.where(m_seen, b_pick - o_other, 1 << 30))
            b_last = tl.maximum(b_last, tl.where(m_seen, b_pick - o_other, -(1 << 30)))
    else:
        m_seen = m_group & (b_pick >= -1) & (b_pick < n)
        b_first = tl.where(m_seen, b_pick - o_n, 1 << 30)
        b_last = tl.where(m_seen, b_pick - o_n, -(1 << 30))
    first, last = tl.min(b_first), tl.max(b_last) + 1

    # from here a tile is (tokens, channels): a thread holds 16 bytes of channels and the offsets that they share
    VECTOR: tl.constexpr = 128 // p_grad.dtype.element_ty.primitive_bitwidth
    TOGETHER: tl.constexpr = VECTOR // BLOCK_S if BLOCK_S < VECTOR else 1
    o_row = tl.arange(0, BLOCK_N * LINES)
    o_at = start + o_row % BLOCK_N
    o_line = i_line * LINES + o_row // BLOCK_N
    o_n = tl.where(o_line < lines, o_at, 1 << 30)
    o_g = tl.max_contiguous(i_g * BLOCK_G + tl.arange(0, BLOCK_G), TOGETHER)
    o_c = tl.arange(0, BLOCK_G * BLOCK_S)
    m_c = o_c % BLOCK_S < SHARE
    if BLOCK_S == SHARE:
        o_c += i_g * BLOCK_G * SHARE
    else:
        o_c = (i_g * BLOCK_G + o_c // BLOCK_S) * SHARE + o_c % BLOCK_S
    m_c = m_c & (o_c < G * SHARE)
    o_offset = (o_line * stride_ol + o_at * stride_on)[:, None] + (o_g * stride_oc)[None, :]
    o_grad = (o_line * stride_dl + o_at * stride_dn)[:, None] + (o_c * stride_dc)[None, :]
    b_sum = tl.zeros((BLOCK_N * LINES, BLOCK_G * BLOCK_S), tl.float32)
    for r in range(first, last + 1):
        m_from = ((o_n - r >= 0) & (o_n - r < n))[:, None]
        m_offset = m_from if EVEN else m_from & (o_g < G)[None, :]
        m_grad = m_from if EVEN else m_from & m_c[None, :]
        b_far = tl.load(p_offset - r * stride_on + o_offset, mask=m_offset, other=0.0)
        b_from = tl.load(p_grad - r * stride_dn + o_grad, mask=m_grad, other=0.0)
        b_weight = tl.maximum(1.0 - tl.abs(b_far.to(tl.float32) - r), 0.0)
        b_sum += _repeat(b_weight, BLOCK_S) * b_from.to(tl.float32)
    m_x = (o_n < n)[:, None] if EVEN else (o_n < n)[:, None] & m_c[None, :]
    p_grad_x += i_b * stride_b + (o_line * stride_l + o_at * stride_n)[:, None] + o_c[None, :]
    if ADD:
        b_sum += tl.load(p_grad_x, mask=m_x, other=0.0).to(tl.float32)
    tl.store(p_grad_x, b_sum.to(p_grad_x.dtype.element_ty), mask=m_x)


Strides = tuple[int, ...]


def forward(x: Tensor, offset: Tensor, dims: Sequence[int]) -> list[Tensor]:
    """Sample x (B, H, W, C) along each of `dims` -> one map each; offset (B, H, W, len(dims) * G)."""
    (_, height, width, channels), groups = x.shape, offset.shape[3] // len(dims)
    outputs = [empty_like(x) for _ in dims]
    if x.numel() == 0:
        return outputs
    blocks = choose_blocks(max(height, width), groups, channels // groups)
    launch = _forward_launch(x.shape, x.stride(), offset.stride(), tuple(dims), groups, blocks)
    launch(x, offset, outputs[dims.index(2) if 2 in dims else 0], outputs[dims.index(1) if 1 in dims else 0])
    return outputs


def backward(grads: Sequence[Tensor], x: Tensor, offset: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The gradients of x and offset."""
    (_, height, width, channels), groups = x.shape, offset.shape[3] // len(dims)
    grad_x = empty_like(x)
    grad_offset = empty_like(offset)
    if x.numel() == 0:
        return grad_x, grad_offset
    for i, (grad, dim) in enumerate(zip(grads, dims, strict=True)):
        blocks = choose_blocks(width if dim == 2 else height, groups, channels // groups)
        strides = (grad.stride(), x.stride(), offset.stride(), grad_x.stride(), grad_offset.stride())
        _backward_launch(x.shape, strides, dim, groups, blocks, i)(grad, x, offset, grad_x, grad_offset)
    return grad_x, grad_offset


class Blocks(NamedTuple):
    """Block sizes and warps of a launch."""

    share: int
    tokens: int
    lines: int
    groups: int
    channels: int  # of a group
    even: bool  # blocks of channels and groups are full
    long: bool  # lines are split
    warps: int

    def options(self) -> dict[str, int]:
        """Launch options shared by all kernels."""
        return {
            "SHARE": self.share,
            "BLOCK_N": self.tokens,
            "LINES": self.lines,
            "BLOCK_G": self.groups,
            "BLOCK_S": self.channels,
            "EVEN": self.even,
            "LONG": self.long,
            "num_warps": self.warps,
        }


def choose_blocks(n: int, groups: int, share: int, tile: int = TILE, warps: int = 8) -> Blocks:
    """Block sizes and warps for lines of n tokens: about `tile` elements, in whole lines or in PART tokens of a longer
    one, and up to 64 channels."""
    return _blocks(n, groups, share, tile, warps, PART)


@lru_cache(CACHE_SIZE)
def _blocks(n: int, groups: int, share: int, tile: int, warps: int, part: int) -> Blocks:
    block_n, block_s = triton.next_power_of_2(min(n, part)), triton.next_power_of_2(share)
    block_g = min(triton.next_power_of_2(groups), max(64 // block_s, 1))
    while block_g * block_s > 16 and block_n * block_g * block_s > tile:
        block_g //= 2
    lines = max(tile // (block_n * block_g * block_s), 1)
    even = groups % block_g == 0 and share == block_s
    return Blocks(share, block_n, lines, block_g, block_s, even, n > part, warps)


@lru_cache(CACHE_SIZE)
def _forward_launch(
    shape: tuple[int, ...],
    strides: Strides,
    offset_strides: Strides,
    dims: tuple[int, ...],
    groups: int,
    blocks: Blocks,
) -> Launch:
    parts = sum(_parts(shape, dim, blocks) for dim in dims)
    sizes = (*shape[1:], groups, *strides, *offset_strides[:3], offset_strides[3] + 1)
    return Launch(
        _forward_kernel, _grid(parts, groups, blocks), *sizes, WIDTH=2 in dims, HEIGHT=1 in dims, **blocks.options()
    )


@lru_cache(CACHE_SIZE)
def _backward_launch(
    shape: tuple[int, ...], strides: tuple[Strides, ...], dim: int, groups: int, blocks: Blocks, i: int
) -> Launch:
    """The launch for the i-th direction; `strides` are of grad, x, offset and of the gradients of x and offset."""
    # batch, lines, tokens of a line, channels
    ordered = [(b, h, w, c) if dim == 2 else (b, w, h, c) for b, h, w, c in strides]
    grad, x, offset, grad_x, grad_offset = ordered
    sizes = (
        shape[dim],
        shape[3 - dim],
        groups,
        *grad,
        *x,
        *offset,
        offset[3] + 1,
        *grad_x[:3],
        *grad_offset[:3],
        grad_offset[3] + 1,
    )
    grid = _grid(_parts(shape, dim, blocks), groups, blocks)
    return Launch(_backward_kernel, grid, *sizes, FIRST=i * groups, ADD=i > 0, **blocks.options())


def _parts(shape: tuple[int, ...], dim: int, blocks: Blocks) -> int:
    """The number of parts of all lines along `dim` in all images."""
    return shape[0] * triton.cdiv(shape[3 - dim], blocks.lines) * triton.cdiv(shape[dim], blocks.tokens)


def _grid(parts: int, groups: int, blocks: Blocks) -> tuple[int, ...]:
    """The launch grid: a program for each part and block of groups, in the order of `_place`."""
    by_channel = triton.cdiv(groups, blocks.groups)
    return (parts * by_channel,) if blocks.long else (parts, by_channel)
