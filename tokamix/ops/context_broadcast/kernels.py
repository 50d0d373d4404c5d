"""Context broadcasting in Triton: x is read twice (the second time from the cache) and written once.

One launch if a program can sum all tokens of its channels; with many tokens, or few programs, two launches, of which
the first computes partial sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    out = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    blocks, sizes = triton.cdiv(channels, BLOCK_C), (tokens, channels, *x.stride())
    weight, has_scale = (x, False) if scale is None else (scale.contiguous(), True)
    if not out.numel():
        return out
    if tokens <= (SOME_TOKENS if batch * blocks < FEW_PROGRAMS else MANY_TOKENS):
        _broadcast_kernel[batch, blocks](x, weight, out, *sizes, has_scale, BLOCK_N, BLOCK_C)
    else:
        sums = torch.empty(batch, PARTS, channels, device=x.device, dtype=torch.float32)
        _partial_sum_kernel[batch, blocks, PARTS](x, sums, *sizes, PARTS, BLOCK_N, BLOCK_C)
        grid = (batch, blocks, triton.cdiv(tokens, BLOCK_N))
        _add_mean_kernel[grid](x, sums, weight, out, *sizes, has_scale, PARTS, BLOCK_N, BLOCK_C)
    return out
