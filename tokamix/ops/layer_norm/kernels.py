"""LayerNorm in Triton: read once and written once in the dtype that follows, its backward pass likewise.

Nothing but the input is kept for the backward pass: a program holds whole rows, so their means and variances cost no
further reads. The gradients of the parameters are summed in a fixed order, in two launches.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamix.ops.launch import CACHE_SIZE, Launch

TILE, TILE_BACKWARD = 4096, 2048  # numbers of a tile, if a row is no longer
PROGRAMS = 528  # of the backward pass: four for each multiprocessor of an H200
BLOCK_P, BLOCK_C = 32, 64  # of the sum over programs


@triton.jit
def _normalise(p_x, o_x, mask, o_c, C, EPS: tl.constexpr):
    """Rows with mean 0 and variance 1, and the factors (rows,) that made them so; zeros beyond the mask."""
    b_x = tl.load(p_x + o_x, mask=mask, other=0.0).to(tl.float32)
    b_x = tl.where((o_c < C)[None, :], b_x - (tl.sum(b_x, axis=1) / C)[:, None], 0.0)
    b_scale = 1.0 / tl.sqrt(tl.sum(b_x * b_x, axis=1) / C + EPS)
    return tl.where(mask, b_x * b_scale[:, None], 0.0), b_scale  # the scale of no row is infinite with an EPS of 0


@triton.jit
def _forward_kernel(
    p_x,  # (R, C), contiguous
    p_weight,  # (C,)
    p_bias,  # (C,)
    p_out,  # (R, C), contiguous
    R,
    C,
    EPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    o_r, o_c = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_C)
    o_x, mask = o_r[:, None] * C + o_c[None, :], (o_r < R)[:, None] & (o_c < C)[None, :]
    b_normal, _ = _normalise(p_x, o_x, mask, o_c, C, EPS)
    b_weight = tl.load(p_weight + o_c, mask=o_c < C, other=0.0).to(tl.float32)
    b_bias = tl.load(p_bias + o_c, mask=o_c < C, other=0.0).to(tl.float32)
    b_out = b_normal * b_weight[None, :] + b_bias[None, :]
    tl.store(p_out + o_x, b_out.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def _backward_kernel(
    p_grad,  # (R, C), contiguous
    p_x,  # (R, C), contiguous
    p_weight,  # (C,)
    p_grad_x,  # (R, C), contiguous
    p_sums,  # (P, 2, C), float32: each program's share of the gradients of weight and bias
    R,
    C,
    P,
    EPS: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_p, o_c = tl.program_id(0), tl.arange(0, BLOCK_C)
    b_weight = tl.load(p_weight + o_c, mask=o_c < C, other=0.0).to(tl.float32)
    b_grad_weight = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    b_grad_bias = tl.zeros((BLOCK_R, BLOCK_C), tl.float32)
    for start in range(i_p * BLOCK_R, R, P * BLOCK_R):
        o_r = start + tl.arange(0, BLOCK_R).to(tl.int64)
        o_x, mask = o_r[:, None] * C + o_c[None, :], (o_r < R)[:, None] & (o_c < C)[None, :]
        b_normal, b_scale = _normalise(p_x, o_x, mask, o_c, C, EPS)
        b_grad = tl.load(p_grad + o_x, mask=mask, other=0.0).to(tl.float32)
        b_grad_weight += b_grad * b_normal
        b_grad_bias += b_grad
        b_grad *= b_weight[None, :]
        b_mean, b_along = tl.sum(b_grad, axis=1) / C, tl.sum(b_grad * b_normal, axis=1) / C
        b_grad_x = (b_grad - b_mean[:, None] - b_normal * b_along[:, None]) * b_scale[:, None]
        tl.store(p_grad_x + o_x, b_grad_x.to(p_grad_x.dtype.element_ty), mask=mask)
    p_sums += i_p.to(tl.int64) * 2 * C
    tl.store(p_sums + o_c, tl.sum(b_grad_weight, axis=0), mask=o_c < C)
    tl.store(p_sums + C + o_c, tl.sum(b_grad_bias, axis=0), mask=o_c < C)


@triton.jit
def _sum_kernel(
    p_sums,  # (P, 2, C), float32
    p_grad_weight,  # (C,)
    p_grad_bias,  # (C,)
    P,
    C,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    o_c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    b_weight = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    b_bias = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, P, BLOCK_P):
        o_p = start + tl.arange(0, BLOCK_P)
        p_part = p_sums + o_p[:, None] * 2 * C + o_c[None, :]
        mask = (o_p < P)[:, None] & (o_c < C)[None, :]
        b_weight += tl.load(p_part, mask=mask, other=0.0)
        b_bias += tl.load(p_part + C, mask=mask, other=0.0)
    dtype = p_grad_weight.dtype.element_ty
    tl.store(p_grad_weight + o_c, tl.sum(b_weight, axis=0).to(dtype), mask=o_c < C)
    tl.store(p_grad_bias + o_c, tl.sum(b_bias, axis=0).to(dtype), mask=o_c < C)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """The LayerNorm of x (..., C) in dtype."""
    out = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    if out.numel():
        forward, _, _ = _launches(x.numel(), x.shape[-1], eps)
        forward(x.contiguous(), weight.contiguous(), bias.contiguous(), out)
    return out


def layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of the weight and of the bias."""
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    channels = x.shape[-1]
    if not x.numel():
        return grad_x, weight.new_zeros(channels), weight.new_zeros(channels)
    _, backward, add_up = _launches(x.numel(), channels, eps)
    sums = torch.empty((backward.grid[0], 2, channels), device=x.device, dtype=torch.float32)
    grad_weight, grad_bias = weight.new_empty(channels), weight.new_empty(channels)
    backward(grad.contiguous(), x.contiguous(), weight.contiguous(), grad_x, sums)
    add_up(sums, grad_weight, grad_bias)
    return grad_x, grad_weight, grad_bias


@lru_cache(CACHE_SIZE)
def _launches(numbers: int, channels: int, eps: float) -> tuple[Launch, Launch, Launch]:
    """The launches of the forward pass, of the backward pass and of its sum over programs."""
    rows, block_c = numbers // channels, triton.next_power_of_2(channels)
    block_r, block_r_backward = (max(1, tile // block_c) for tile in (TILE, TILE_BACKWARD))
    options = {"EPS": eps, "BLOCK_C": block_c, "num_warps": 8 if block_c > TILE else 4}
    programs = min(PROGRAMS, triton.cdiv(rows, block_r_backward))
    forward = Launch(_forward_kernel, (triton.cdiv(rows, block_r),), rows, channels, BLOCK_R=block_r, **options)
    backward = Launch(_backward_kernel, (programs,), rows, channels, programs, BLOCK_R=block_r_backward, **options)
    blocks = (triton.cdiv(channels, BLOCK_C),)
    return forward, backward, Launch(_sum_kernel, blocks, programs, channels, BLOCK_P=BLOCK_P, BLOCK_C=BLOCK_C)
