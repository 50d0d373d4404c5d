"""Branch fusion in Triton: each pass reads every branch once.

A program of the summary and of the backward pass handles all tokens of some channels of an image, so that sums over
tokens need no second launch and no atomics.
"""

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamix.ops.launch import CACHE_SIZE, Launch, empty_like

BLOCK_N = 64
FEW_PROGRAMS = 264  # two for each multiprocessor of an H200


@triton.jit
def _weights(p_logits, i_b, o_c, C):
    """The weights (BLOCK_C,) of the three branches."""
    p_logits += i_b * C * 3 + o_c * 3
    b_0 = tl.load(p_logits, mask=o_c < C, other=0.0).to(tl.float32)
    b_1 = tl.load(p_logits + 1, mask=o_c < C, other=0.0).to(tl.float32)
    b_2 = tl.load(p_logits + 2, mask=o_c < C, other=0.0).to(tl.float32)
    b_max = tl.maximum(tl.maximum(b_0, b_1), b_2)
    b_0, b_1, b_2 = tl.exp(b_0 - b_max), tl.exp(b_1 - b_max), tl.exp(b_2 - b_max)
    b_sum = b_0 + b_1 + b_2
    return b_0 / b_sum, b_1 / b_sum, b_2 / b_sum


@triton.jit
def _summary_kernel(
    p_0,  # (B, N, C), contiguous, as the other branches
    p_1,
    p_2,
    p_out,  # (B, C)
    N,
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_b, o_c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    b_sum = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for start in range(0, N, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        o_x = (i_b * N + o_n[:, None]) * C + o_c[None, :]
        mask = (o_n < N)[:, None] & (o_c < C)[None, :]
        b_sum += tl.load(p_0 + o_x, mask=mask, other=0.0).to(tl.float32)
        b_sum += tl.load(p_1 + o_x, mask=mask, other=0.0).to(tl.float32)
        b_sum += tl.load(p_2 + o_x, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_out + i_b * C + o_c, (tl.sum(b_sum, axis=0) / N).to(p_out.dtype.element_ty), mask=o_c < C)


@triton.jit
def _fuse_kernel(
    p_0,  # (B, N, C), contiguous, as the other branches
    p_1,
    p_2,
    p_logits,  # (B, C, 3), contiguous
    p_out,  # (B, N, C), contiguous
    N,
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_b, o_c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    w_0, w_1, w_2 = _weights(p_logits, i_b, o_c, C)
    o_n = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    o_x = (i_b * N + o_n[:, None]) * C + o_c[None, :]
    mask = (o_n < N)[:, None] & (o_c < C)[None, :]
    b_out = w_0[None, :] * tl.load(p_0 + o_x, mask=mask, other=0.0).to(tl.float32)
    b_out += w_1[None, :] * tl.load(p_1 + o_x, mask=mask, other=0.0).to(tl.float32)
    b_out += w_2[None, :] * tl.load(p_2 + o_x, mask=mask, other=0.0).to(tl.float32)
    tl.store(p_out + o_x, b_out.to(p_out.dtype.element_ty), mask=mask)


@triton.jit
def _fuse_backward_kernel(
    p_grad,  # (B, N, C), contiguous, as the branches and their gradients
    p_0,
    p_1,
    p_2,
    p_logits,  # (B, C, 3), contiguous
    p_grad_0,
    p_grad_1,
    p_grad_2,
    p_grad_logits,  # (B, C, 3), contiguous
    N,
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_b, o_c = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    w_0, w_1, w_2 = _weights(p_logits, i_b, o_c, C)
    dtype = p_grad_0.dtype.element_ty
    b_0 = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    b_1 = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    b_2 = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for start in range(0, N, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        o_x = (i_b * N + o_n[:, None]) * C + o_c[None, :]
        mask = (o_n < N)[:, None] & (o_c < C)[None, :]
        b_grad = tl.load(p_grad + o_x, mask=mask, other=0.0).to(tl.float32)
        b_0 += b_grad * tl.load(p_0 + o_x, mask=mask, other=0.0).to(tl.float32)
        b_1 += b_grad * tl.load(p_1 + o_x, mask=mask, other=0.0).to(tl.float32)
        b_2 += b_grad * tl.load(p_2 + o_x, mask=mask, other=0.0).to(tl.float32)
        tl.store(p_grad_0 + o_x, (b_grad * w_0[None, :]).to(dtype), mask=mask)
        tl.store(p_grad_1 + o_x, (b_grad * w_1[None, :]).to(dtype), mask=mask)
        tl.store(p_grad_2 + o_x, (b_grad * w_2[None, :]).to(dtype), mask=mask)
    s_0, s_1, s_2 = tl.sum(b_0, axis=0), tl.sum(b_1, axis=0), tl.sum(b_2, axis=0)  # slopes of the weights
    s_mean = w_0 * s_0 + w_1 * s_1 + w_2 * s_2
    p_grad_logits += i_b * C * 3 + o_c * 3
    dtype_logits = p_grad_logits.dtype.element_ty
    tl.store(p_grad_logits, (w_0 * (s_0 - s_mean)).to(dtype_logits), mask=o_c < C)
    tl.store(p_grad_logits + 1, (w_1 * (s_1 - s_mean)).to(dtype_logits), mask=o_c < C)
    tl.store(p_grad_logits + 2, (w_2 * (s_2 - s_mean)).to(dtype_logits), mask=o_c < C)


def branch_summary(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """The sum of three branches (B, N, C), averaged over tokens -> (B, C)."""
    out = torch.empty((first.shape[0], first.shape[2]), device=first.device, dtype=first.dtype)
    if out.numel():
        _launches(first.shape)[0](first.contiguous(), second.contiguous(), third.contiguous(), out)
    return out


def fuse_branches(first: Tensor, second: Tensor, third: Tensor, logits: Tensor) -> Tensor:
    """The weighted sum of three branches (B, N, C), logits (B, C * 3)."""
    out = empty_like(first)
    if out.numel():
        branches = first.contiguous(), second.contiguous(), third.contiguous()
        _launches(first.shape)[1](*branches, logits.contiguous(), out)
    return out


def fuse_branches_backward(
    grad: Tensor, first: Tensor, second: Tensor, third: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the branches and of the logits."""
    grads = [empty_like(grad) for _ in range(3)]
    grad_logits = empty_like(logits)
    if grad.numel():
        branches = first.contiguous(), second.contiguous(), third.contiguous()
        _launches(grad.shape)[2](grad.contiguous(), *branches, logits.contiguous(), *grads, grad_logits)
    return grads[0], grads[1], grads[2], grad_logits


@lru_cache(CACHE_SIZE)
def _launches(shape: tuple[int, ...]) -> tuple[Launch, Launch, Launch]:
    """The launches of the summary, of the fusion and of its backward pass."""
    batch, tokens, channels = shape
    block_c = 64 if batch * triton.cdiv(channels, 64) >= FEW_PROGRAMS else 32
    blocks, options = triton.cdiv(channels, block_c), {"BLOCK_N": BLOCK_N, "BLOCK_C": block_c}
    summary = Launch(_summary_kernel, (batch, blocks), tokens, channels, **options)
    fuse = Launch(_fuse_kernel, (batch, blocks, triton.cdiv(tokens, BLOCK_N)), tokens, channels, **options)
    backward = Launch(_fuse_backward_kernel, (batch, blocks), tokens, channels, num_warps=8, **options)
    return summary, fuse, backward
