"""Context broadcasting in Triton: x is read twice (the second time from the cache) and written once.

One launch if a program can sum all tokens of its channels; with many tokens, or few programs, two launches, of which
the first computes partial sums.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamix.ops.launch import CACHE_SIZE, Launch, empty_like

BLOCK_N, BLOCK_C = 128, 64
MANY_TOKENS, SOME_TOKENS = 4096, 512
FEW_PROGRAMS = 128  # about as many as a GPU has multiprocessors
PARTS = 64  # programs that share the sum over many tokens


@triton.jit
def _sum_tokens(p_x, o_c, first, step, N, C, stride_n, stride_c, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr):
    """The sums (BLOCK_C,) over every block of tokens that starts at first, first + step, ..."""
    b_sum = tl.zeros((BLOCK_C,), tl.float32)
    for start in range(first, N, step):
        o_n = start + tl.arange(0, BLOCK_N)
        mask = (o_n < N)[:, None] & (o_c < C)[None, :]
        p = p_x + o_n[:, None].to(tl.int64) * stride_n + o_c[None, :] * stride_c
        b_sum += tl.sum(tl.load(p, mask=mask, other=0.0).to(tl.float32), axis=0)
    return b_sum


@triton.jit
def _scaled_mean(b_sum, p_scale, o_c, N, C, HAS_SCALE: tl.constexpr):
    """The term added to every token, (BLOCK_C,)."""
    b_mean = b_sum / N
    if HAS_SCALE:
        b_mean *= tl.load(p_scale + o_c, mask=o_c < C, other=0.0).to(tl.float32)
    return b_mean


@triton.jit
def _add_mean(p_x, p_out, b_mean, start, o_c, N, C, stride_n, stride_c, BLOCK_N: tl.constexpr):
    """Broadcast to one block of tokens: (x + term) / 2."""
    o_n = start + tl.arange(0, BLOCK_N)
    mask = (o_n < N)[:, None] & (o_c < C)[None, :]
    p = p_x + o_n[:, None].to(tl.int64) * stride_n + o_c[None, :] * stride_c
    b_out = (tl.load(p, mask=mask, other=0.0).to(tl.float32) + b_mean[None, :]) * 0.5
    tl.store(p_out + o_n[:, None].to(tl.int64) * C + o_c[None, :], b_out.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def _broadcast_kernel(
    p_x,  # (B, N, C), any strides
    p_scale,  # (C,)
    p_out,  # (B, N, C), contiguous
    N,
    C,
    stride_b,
    stride_n,
    stride_c,
    HAS_SCALE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_b, o_c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    p_x, p_out = p_x + i_b * stride_b, p_out + i_b * N * C
    b_sum = _sum_tokens(p_x, o_c, 0, BLOCK_N, N, C, stride_n, stride_c, BLOCK_N, BLOCK_C)
    b_mean = _scaled_mean(b_sum, p_scale, o_c, N, C, HAS_SCALE)
    for start in range(0, N, BLOCK_N):
        _add_mean(p_x, p_out, b_mean, start, o_c, N, C, stride_n, stride_c, BLOCK_N)


@triton.jit
def _partial_sum_kernel(
    p_x,  # (B, N, C), any strides
    p_sums,  # (B, PARTS, C), float32
    N,
    C,
    stride_b,
    stride_n,
    stride_c,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_b, i_part = tl.program_id(0).to(tl.int64), tl.program_id(2)
    o_c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    first, step = i_part * BLOCK_N, PARTS * BLOCK_N
    b_sum = _sum_tokens(p_x + i_b * stride_b, o_c, first, step, N, C, stride_n, stride_c, BLOCK_N, BLOCK_C)
    tl.store(p_sums + (i_b * PARTS + i_part) * C + o_c, b_sum, mask=o_c < C)


@triton.jit
def _add_mean_kernel(
    p_x,  # (B, N, C), any strides
    p_sums,  # (B, PARTS, C), float32
    p_scale,  # (C,)
    p_out,  # (B, N, C), contiguous
    N,
    C,
    stride_b,
    stride_n,
    stride_c,
    HAS_SCALE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_b, o_c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    p_parts = p_sums + (i_b * PARTS + tl.arange(0, PARTS)[:, None]) * C + o_c[None, :]
    b_sum = tl.sum(tl.load(p_parts, mask=(o_c < C)[None, :], other=0.0), axis=0)
    b_mean = _scaled_mean(b_sum, p_scale, o_c, N, C, HAS_SCALE)
    start = tl.program_id(2) * BLOCK_N
    _add_mean(p_x + i_b * stride_b, p_out + i_b * N * C, b_mean, start, o_c, N, C, stride_n, stride_c, BLOCK_N)


def broadcast_context(x: Tensor, scale: Tensor | None) -> Tensor:
    """(x + scale * mean) / 2 for tokens x (B, N, C) of any strides."""
    batch, tokens, channels = x.shape
    out = empty_like(x)
    if not out.numel():
        return out
    weight, blocks = x if scale is None else scale.contiguous(), triton.cdiv(channels, BLOCK_C)
    arguments = (x.shape, x.stride(), scale is not None)
    if tokens <= (SOME_TOKENS if batch * blocks < FEW_PROGRAMS else MANY_TOKENS):
        _launch(*arguments)(x, weight, out)
    else:
        sums = torch.empty(batch, PARTS, channels, device=x.device, dtype=torch.float32)
        add_up, add_mean = _split_launches(*arguments, PARTS)
        add_up(x, sums)
        add_mean(x, sums, weight, out)
    return out


@lru_cache(CACHE_SIZE)
def _launch(shape: tuple[int, ...], strides: tuple[int, ...], has_scale: bool) -> Launch:
    batch, *sizes = shape
    grid = (batch, triton.cdiv(shape[2], BLOCK_C))
    return Launch(_broadcast_kernel, grid, *sizes, *strides, has_scale, BLOCK_N, BLOCK_C)


@lru_cache(CACHE_SIZE)
def _split_launches(
    shape: tuple[int, ...], strides: tuple[int, ...], has_scale: bool, parts: int
) -> tuple[Launch, Launch]:
    batch, *sizes = shape
    blocks, steps = triton.cdiv(shape[2], BLOCK_C), triton.cdiv(shape[1], BLOCK_N)
    add_up = Launch(_partial_sum_kernel, (batch, blocks, parts), *sizes, *strides, parts, BLOCK_N, BLOCK_C)
    add_mean = Launch(_add_mean_kernel, (batch, blocks, steps), *sizes, *strides, has_scale, parts, BLOCK_N, BLOCK_C)
    return add_up, add_mean
