"""SimA attention in Triton.

With w = 1 / (|q| |k|) per channel, M = w ⊙ (kᵀ v) and P = w ⊙ (qᵀ do), all D x D per head:

    o = q M        dv = k P        dq = do Mᵀ - t ∂log|q|        dk = v Pᵀ - t ∂log|k|        t = Σ M ⊙ P / w

so each pass reduces over the tokens once (products and norms) and applies small matrices to the tokens once. If there
are enough heads to fill the GPU, one program does both for its head and reads the tokens from the cache the second
time; with many tokens and few heads, the tokens are split: compute partial sums, combine them, apply. There are no
atomics, so results are deterministic.

Bytes: forward reads q, k, v and writes o; backward reads q, k, v, do and writes dq, dk, dv. If split,
the second read (q; q, k, v, do) is added.
"""

from functools import cache, lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamix.ops.launch import CACHE_SIZE, Launch, empty_like

POWERS = {None: 0, "l1": 1, "l2": 2}


@triton.jit
def _load(p_x, o_n, left, x_n, o_d, D):
    """A block of tokens (BLOCK_N, BLOCK_D), zero beyond the `left` remaining tokens and D channels."""
    mask = (o_n < left)[:, None] & (o_d < D)[None, :]
    return tl.load(p_x + o_n[:, None] * x_n + o_d[None, :], mask=mask, other=0.0)


@triton.jit
def _store(p_x, b_x, o_n, left, x_n, o_d, D):
    mask = (o_n < left)[:, None] & (o_d < D)[None, :]
    tl.store(p_x + o_n[:, None] * x_n + o_d[None, :], b_x.to(p_x.dtype.element_ty), mask=mask)


@triton.jit
def _product(b_x, b_y, b_sum):
    """sum + xᵀ y over a block of tokens."""
    return tl.dot(tl.trans(b_x), b_y, b_sum, input_precision="tf32x3")


@triton.jit
def _power_sums(b_x, POWER: tl.constexpr, FOLD: tl.constexpr):
    """The contribution of a block of tokens to each channel's norm, before the root, as FOLD sums (FOLD, BLOCK_D).

    Every FOLD-th token is in the same thread, so that a loop over blocks adds without exchange between threads.
    """
    b_x = b_x.to(tl.float32)
    if POWER == 2:
        b_x = b_x * b_x
    return tl.sum(tl.reshape(tl.abs(b_x), (b_x.shape[0] // FOLD, FOLD, b_x.shape[1])), axis=0)


@triton.jit
def _norm(b_sum, eps, POWER: tl.constexpr):
    if POWER == 0:
        b_sum = tl.full(b_sum.shape, 1.0, tl.float32)
    if POWER == 2:
        b_sum = tl.sqrt(b_sum)
    return tl.maximum(b_sum, eps)


@triton.jit
def _round(b_matrix, dtype: tl.constexpr):
    """A small float32 matrix rounded for products with tokens of `dtype`: to bfloat16 or, for float16, to tf32.

    The range of float16 is too small; tf32 has enough range and as many bits. Tensor cores truncate the other bits.
    """
    if dtype == tl.bfloat16:
        b_matrix = b_matrix.to(tl.bfloat16).to(tl.float32)
    if dtype == tl.float16:
        b_bits = (b_matrix.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
        b_matrix = tl.where(b_matrix == b_matrix, b_bits.to(tl.float32, bitcast=True), b_matrix)
    return b_matrix


@triton.jit
def _operand(b_matrix, dtype: tl.constexpr):
    """A rounded matrix in the dtype of the product."""
    if dtype == tl.bfloat16:
        b_matrix = b_matrix.to(tl.bfloat16)
    return b_matrix


@triton.jit
def _apply(b_x, b_matrix):
    """Tokens x times a small matrix."""
    if b_x.dtype == tl.float16:
        b_out = tl.dot(b_x.to(tl.float32), b_matrix, input_precision="tf32")
    else:
        b_out = tl.dot(b_x, b_matrix, input_precision="tf32x3")
    return b_out


@triton.jit
def _gather(
    p_q, p_k, p_v, p_do, q_n, k_n, do_n, NQ, NK, D, count,
    POWER: tl.constexpr, BACKWARD: tl.constexpr, FOLD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums over `count` tokens: kᵀ v, qᵀ do and the powers of q and k."""
    o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    b_kv = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    b_qdo = tl.zeros((BLOCK_D, BLOCK_D), tl.float32)
    b_q_sums = tl.zeros((FOLD, BLOCK_D), tl.float32)
    b_k_sums = tl.zeros((FOLD, BLOCK_D), tl.float32)
    for n in tl.range(0, count, BLOCK_N, num_stages=STAGES):
        b_k = _load(p_k, o_n, NK - n, k_n, o_d, D)
        b_v = _load(p_v, o_n, NK - n, k_n, o_d, D)
        b_q = _load(p_q, o_n, NQ - n, q_n, o_d, D)
        b_kv = _product(b_k, b_v, b_kv)
        b_k_sums += _power_sums(b_k, POWER, FOLD)
        b_q_sums += _power_sums(b_q, POWER, FOLD)
        if BACKWARD:
            b_do = _load(p_do, o_n, NQ - n, do_n, o_d, D)
            b_qdo = _product(b_q, b_do, b_qdo)
            p_do += BLOCK_N * do_n
        p_q += BLOCK_N * q_n
        p_k += BLOCK_N * k_n
        p_v += BLOCK_N * k_n
        # D > 0 always holds, but the compiler cannot know and waits for the products. Otherwise Triton loads the next
        # tokens over those that tensor cores still read, if a load feeds a product and something else.
        b_kv, b_qdo = tl.where(D > 0, b_kv, 0.0), tl.where(D > 0, b_qdo, 0.0)
    return b_kv, b_qdo, tl.sum(b_q_sums, axis=0), tl.sum(b_k_sums, axis=0)


@triton.jit
def _weigh(b_kv, b_qdo, b_q_sum, b_k_sum, eps, POWER: tl.constexpr, dtype: tl.constexpr):
    """Sums -> M, P, and the factors of sign(q), sign(k) (for l2: q, k) in the gradients."""
    eps = tl.cast(eps, tl.float32)  # compiled graphs pass numbers in float64
    b_q_norm, b_k_norm = _norm(b_q_sum, eps, POWER), _norm(b_k_sum, eps, POWER)
    b_m = b_kv / b_q_norm[:, None] / b_k_norm[:, None]
    b_p = b_qdo / b_q_norm[:, None] / b_k_norm[:, None]
    b_m_rounded, b_p_rounded = _round(b_m, dtype), _round(b_p, dtype)
    # the term subtracted for the norm's gradient is rounded like the term it is subtracted from
    b_q_slope = tl.sum(b_m_rounded * b_p, axis=1) * b_k_norm
    b_k_slope = tl.sum(b_m * b_p_rounded, axis=1) * b_q_norm
    if POWER == 2:
        b_q_slope, b_k_slope = b_q_slope / b_q_norm, b_k_slope / b_k_norm
    # a norm clamped at eps has no gradient
    b_q_slope = tl.where(b_q_norm > eps, b_q_slope, 0.0)
    b_k_slope = tl.where(b_k_norm > eps, b_k_slope, 0.0)
    return b_m_rounded, b_p_rounded, b_q_slope, b_k_slope


@triton.jit
def _minus_slope(b_dx, b_x, b_slope, POWER: tl.constexpr):
    b_x = b_x.to(tl.float32)
    if POWER == 1:
        b_x = tl.where(b_x > 0, 1.0, tl.where(b_x < 0, -1.0, 0.0))
    if POWER != 0:
        b_dx -= b_x * b_slope[None, :]
    return b_dx


@triton.jit
def _write_output(
    p_q, p_out, q_n, out_n, NQ, D, count, b_m, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr
):
    """The output of `count` tokens."""
    o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    b_m = _operand(b_m, p_q.dtype.element_ty)
    for n in tl.range(0, count, BLOCK_N, num_stages=STAGES):
        b_q = _load(p_q, o_n, NQ - n, q_n, o_d, D)
        _store(p_out, _apply(b_q, b_m), o_n, NQ - n, out_n, o_d, D)
        p_q += BLOCK_N * q_n
        p_out += BLOCK_N * out_n


@triton.jit
def _write_gradients(
    p_do, p_q, p_k, p_v, p_dq, p_dk, p_dv, do_n, q_n, k_n, dq_n, dk_n, NQ, NK, D, count,
    b_m, b_p, b_q_slope, b_k_slope,
    POWER: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The gradients of `count` tokens."""
    o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    b_m_t = _operand(tl.trans(b_m), p_q.dtype.element_ty)
    b_p_t = _operand(tl.trans(b_p), p_q.dtype.element_ty)
    b_p = _operand(b_p, p_q.dtype.element_ty)
    for n in tl.range(0, count, BLOCK_N, num_stages=STAGES):
        b_do = _load(p_do, o_n, NQ - n, do_n, o_d, D)
        b_q = _load(p_q, o_n, NQ - n, q_n, o_d, D)
        b_v = _load(p_v, o_n, NK - n, k_n, o_d, D)
        b_k = _load(p_k, o_n, NK - n, k_n, o_d, D)
        _store(p_dq, _minus_slope(_apply(b_do, b_m_t), b_q, b_q_slope, POWER), o_n, NQ - n, dq_n, o_d, D)
        _store(p_dk, _minus_slope(_apply(b_v, b_p_t), b_k, b_k_slope, POWER), o_n, NK - n, dk_n, o_d, D)
        _store(p_dv, _apply(b_k, b_p), o_n, NK - n, dk_n, o_d, D)
        p_do += BLOCK_N * do_n
        p_q += BLOCK_N * q_n
        p_k += BLOCK_N * k_n
        p_v += BLOCK_N * k_n
        p_dq += BLOCK_N * dq_n
        p_dk += BLOCK_N * dk_n
        p_dv += BLOCK_N * dk_n


# In the kernels, x_b, x_n, x_h are the strides of x (B, N, H, D), whose last stride is 1; v is laid out as k, dv as dk,
# and out and do are contiguous. A program is head b * H + h, or one chunk of its tokens. If JOINT, the gradients are
# parts of one tensor (B, N, 3, H, D), p_dq, that begin `part` numbers after each other: torch.compile would copy
# outputs that are views of each other.


@triton.jit
def _forward_kernel(
    p_q, p_k, p_v, p_out,  # (B, NQ, H, D), (B, NK, H, D) twice, (B, NQ, H, D)
    q_b, q_n, q_h, k_b, k_n, k_h,
    H, NQ, NK, D, eps,
    POWER: tl.constexpr, ONE_BLOCK: tl.constexpr, FOLD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    i_b, i_h = (i // H).to(tl.int64), (i % H).to(tl.int64)
    p_q += i_b * q_b + i_h * q_h
    p_k += i_b * k_b + i_h * k_h
    p_v += i_b * k_b + i_h * k_h
    p_out += (i_b * NQ * H + i_h) * D
    if ONE_BLOCK:  # q stays in registers between its norm and its product
        o_n, o_d = tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
        b_k = _load(p_k, o_n, NK, k_n, o_d, D)
        b_v = _load(p_v, o_n, NK, k_n, o_d, D)
        b_q = _load(p_q, o_n, NQ, q_n, o_d, D)
        b_kv = _product(b_k, b_v, tl.zeros((BLOCK_D, BLOCK_D), tl.float32))
        b_q_sum = tl.sum(_power_sums(b_q, POWER, FOLD), axis=0)
        b_k_sum = tl.sum(_power_sums(b_k, POWER, FOLD), axis=0)
        b_m, _, _, _ = _weigh(b_kv, b_kv, b_q_sum, b_k_sum, eps, POWER, b_q.dtype)
        _store(p_out, _apply(b_q, _operand(b_m, b_q.dtype)), o_n, NQ, H * D, o_d, D)
    else:
        b_kv, b_qdo, b_q_sum, b_k_sum = _gather(
            p_q, p_k, p_v, p_q, q_n, k_n, q_n, NQ, NK, D, tl.maximum(NQ, NK),
            POWER, False, FOLD, BLOCK_N, BLOCK_D, STAGES,
        )  # fmt: skip
        b_m, _, _, _ = _weigh(b_kv, b_qdo, b_q_sum, b_k_sum, eps, POWER, p_q.dtype.element_ty)
        _write_output(p_q, p_out, q_n, H * D, NQ, D, NQ, b_m, BLOCK_N, BLOCK_D, STAGES)


@triton.jit
def _backward_kernel(
    p_do, p_q, p_k, p_v, p_dq, p_dk, p_dv,
    q_b, q_n, q_h, k_b, k_n, k_h, dq_b, dq_n, dq_h, dk_b, dk_n, dk_h, part,
    H, NQ, NK, D, eps,
    JOINT: tl.constexpr, POWER: tl.constexpr, FOLD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    if JOINT:
        p_dk, p_dv = p_dq + part, p_dq + 2 * part
    i = tl.program_id(0)
    i_b, i_h = (i // H).to(tl.int64), (i % H).to(tl.int64)
    p_do += (i_b * NQ * H + i_h) * D
    p_q += i_b * q_b + i_h * q_h
    p_k += i_b * k_b + i_h * k_h
    p_v += i_b * k_b + i_h * k_h
    count = tl.maximum(NQ, NK)
    b_kv, b_qdo, b_q_sum, b_k_sum = _gather(
        p_q, p_k, p_v, p_do, q_n, k_n, H * D, NQ, NK, D, count, POWER, True, FOLD, BLOCK_N, BLOCK_D, STAGES
    )
    b_m, b_p, b_q_slope, b_k_slope = _weigh(b_kv, b_qdo, b_q_sum, b_k_sum, eps, POWER, p_q.dtype.element_ty)
    _write_gradients(
        p_do, p_q, p_k, p_v,
        p_dq + i_b * dq_b + i_h * dq_h,
        p_dk + i_b * dk_b + i_h * dk_h,
        p_dv + i_b * dk_b + i_h * dk_h,
        H * D, q_n, k_n, dq_n, dk_n, NQ, NK, D, count, b_m, b_p, b_q_slope, b_k_slope, POWER, BLOCK_N, BLOCK_D, STAGES,
    )  # fmt: skip


@triton.jit
def _gather_kernel(
    p_do, p_q, p_k, p_v,
    p_sums,  # (B * H, chunks, ROWS, BLOCK_D) float32; ROWS: kᵀ v, |q|, |k|, and for BACKWARD qᵀ do
    q_b, q_n, q_h, k_b, k_n, k_h,
    H, NQ, NK, D, chunks, chunk_size,
    POWER: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr, FOLD: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(0)
    i_head, start = i // chunks, i % chunks * chunk_size
    i_b, i_h, at = (i_head // H).to(tl.int64), (i_head % H).to(tl.int64), start.to(tl.int64)
    count = tl.minimum(chunk_size, tl.maximum(NQ, NK) - start)
    b_kv, b_qdo, b_q_sum, b_k_sum = _gather(
        p_q + i_b * q_b + i_h * q_h + at * q_n,
        p_k + i_b * k_b + i_h * k_h + at * k_n,
        p_v + i_b * k_b + i_h * k_h + at * k_n,
        p_do + ((i_b * NQ + at) * H + i_h) * D,
        q_n, k_n, H * D, NQ - start, NK - start, D, count, POWER, BACKWARD, FOLD, BLOCK_N, BLOCK_D, STAGES,
    )  # fmt: skip
    o_d = tl.arange(0, BLOCK_D)
    p_sums += i.to(tl.int64) * ROWS * BLOCK_D
    square = o_d[:, None] * BLOCK_D + o_d[None, :]
    tl.store(p_sums + square, b_kv)
    tl.store(p_sums + BLOCK_D * BLOCK_D + o_d, b_q_sum)
    tl.store(p_sums + (BLOCK_D + 1) * BLOCK_D + o_d, b_k_sum)
    if BACKWARD:
        tl.store(p_sums + (BLOCK_D + 2) * BLOCK_D + square, b_qdo)


@triton.jit
def _combine_kernel(
    p_tokens,  # only their dtype is used
    p_sums,  # as above
    p_small,  # (B * H, ROWS, BLOCK_D) float32: M, and for BACKWARD the slopes of q and k, and P
    chunks, eps,
    POWER: tl.constexpr, BACKWARD: tl.constexpr, ROWS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    i_head, o_d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK_D)
    o_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    some = o_r[:, None] * BLOCK_D + o_d[None, :]
    p_sums += i_head * chunks * ROWS * BLOCK_D
    b_kv = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    b_qdo = tl.zeros((BLOCK_R, BLOCK_D), tl.float32)
    b_q_sum = tl.zeros((BLOCK_R,), tl.float32)
    b_k_sum = tl.zeros((BLOCK_R,), tl.float32)
    for _ in tl.range(0, chunks, num_stages=4):
        b_kv += tl.load(p_sums + some)
        b_q_sum += tl.load(p_sums + BLOCK_D * BLOCK_D + o_r)
        b_k_sum += tl.load(p_sums + (BLOCK_D + 1) * BLOCK_D + o_r)
        if BACKWARD:
            b_qdo += tl.load(p_sums + (BLOCK_D + 2) * BLOCK_D + some)
        p_sums += ROWS * BLOCK_D
    b_m, b_p, b_q_slope, b_k_slope = _weigh(b_kv, b_qdo, b_q_sum, b_k_sum, eps, POWER, p_tokens.dtype.element_ty)
    p_small += i_head * ROWS * BLOCK_D
    tl.store(p_small + some, b_m)
    if BACKWARD:
        tl.store(p_small + BLOCK_D * BLOCK_D + o_r, b_q_slope)
        tl.store(p_small + (BLOCK_D + 1) * BLOCK_D + o_r, b_k_slope)
        tl.store(p_small + (BLOCK_D + 2) * BLOCK_D + some, b_p)


@triton.jit
def _output_kernel(
    p_q, p_small, p_out,
    q_b, q_n, q_h,
    H, NQ, D, chunks, chunk_size,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # in reverse order: the last tokens are still in the cache
    i_head, start = i // chunks, i % chunks * chunk_size
    i_b, i_h, at = (i_head // H).to(tl.int64), (i_head % H).to(tl.int64), start.to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    b_m = tl.load(p_small + i_head.to(tl.int64) * ROWS * BLOCK_D + o_d[:, None] * BLOCK_D + o_d[None, :])
    _write_output(
        p_q + i_b * q_b + i_h * q_h + at * q_n,
        p_out + ((i_b * NQ + at) * H + i_h) * D,
        q_n, H * D, NQ - start, D, tl.minimum(chunk_size, NQ - start), b_m, BLOCK_N, BLOCK_D, STAGES,
    )  # fmt: skip


@triton.jit
def _gradients_kernel(
    p_do, p_q, p_k, p_v, p_small, p_dq, p_dk, p_dv,
    q_b, q_n, q_h, k_b, k_n, k_h, dq_b, dq_n, dq_h, dk_b, dk_n, dk_h, part,
    H, NQ, NK, D, chunks, chunk_size,
    JOINT: tl.constexpr, POWER: tl.constexpr, ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    if JOINT:
        p_dk, p_dv = p_dq + part, p_dq + 2 * part
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # in reverse order, as above
    i_head, start = i // chunks, i % chunks * chunk_size
    i_b, i_h, at = (i_head // H).to(tl.int64), (i_head % H).to(tl.int64), start.to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    p_small += i_head.to(tl.int64) * ROWS * BLOCK_D
    square = o_d[:, None] * BLOCK_D + o_d[None, :]
    _write_gradients(
        p_do + ((i_b * NQ + at) * H + i_h) * D,
        p_q + i_b * q_b + i_h * q_h + at * q_n,
        p_k + i_b * k_b + i_h * k_h + at * k_n,
        p_v + i_b * k_b + i_h * k_h + at * k_n,
        p_dq + i_b * dq_b + i_h * dq_h + at * dq_n,
        p_dk + i_b * dk_b + i_h * dk_h + at * dk_n,
        p_dv + i_b * dk_b + i_h * dk_h + at * dk_n,
        H * D, q_n, k_n, dq_n, dk_n, NQ - start, NK - start, D, tl.minimum(chunk_size, tl.maximum(NQ, NK) - start),
        tl.load(p_small + square),
        tl.load(p_small + (BLOCK_D + 2) * BLOCK_D + square),
        tl.load(p_small + BLOCK_D * BLOCK_D + o_d),
        tl.load(p_small + (BLOCK_D + 1) * BLOCK_D + o_d),
        POWER, BLOCK_N, BLOCK_D, STAGES,
    )  # fmt: skip


def _block_d(dim: int) -> int:
    return max(16, triton.next_power_of_2(dim))


class Plan(NamedTuple):
    """Launch parameters of a pass."""

    block_n: int  # tokens per iteration
    warps: int
    stages: int  # pipeline stages
    chunks: int = 1  # chunks of tokens; 1 means a single launch
    registers: int | None = None  # maximum per thread: fewer let more programs share a multiprocessor

    @property
    def fold(self) -> int:
        """The number of partial sums of a channel's norm: with 64 channels in half precision, each is in one thread."""
        return min(self.block_n, 4 * self.warps)

    def options(self, dim: int) -> dict[str, int | None]:
        """Launch options shared by all kernels."""
        return {
            "BLOCK_N": self.block_n,
            "BLOCK_D": _block_d(dim),
            "STAGES": self.stages,
            "num_warps": self.warps,
            "maxnreg": self.registers,
        }

    def split(self, tokens: int) -> tuple[int, int]:
        """Chunks and tokens per chunk, in whole blocks."""
        size = triton.cdiv(triton.cdiv(tokens, self.chunks), self.block_n) * self.block_n
        return triton.cdiv(tokens, size), size


@cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@lru_cache
def choose_plan(heads: int, tokens: int, dim: int, dtype: torch.dtype, device: torch.device, backward: bool) -> Plan:
    """The plan for `heads` (over the whole batch) of `tokens`, measured on an H200."""
    if dtype == torch.float32 or dim > 64:  # limited by registers and shared memory
        block_n, warps, stages = 32, 8, 1
    elif backward:
        block_n, warps, stages = 64, 4, 3
    elif dim == 64 and 128 < tokens <= 256:  # three programs per multiprocessor; one block per head gives two
        return Plan(64, 4, 3, registers=168)
    else:
        block_n, warps, stages = min(128, max(16, triton.next_power_of_2(tokens))), 4, 1
    if tokens <= 512 or heads >= 1.5 * _processors(device):
        return Plan(block_n, warps, stages)
    if not backward and block_n > 32:  # two programs per multiprocessor, with many loads in flight
        return Plan(64, 4, 4, max(1, 2 * _processors(device) // heads))
    return Plan(block_n, warps, stages, triton.cdiv(4 * _processors(device), heads))


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(3) == 1 else x.contiguous()


def _keys_and_values(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and values with the same strides."""
    return (k, v) if k.stride(3) == 1 and k.stride() == v.stride() else (k.contiguous(), v.contiguous())


def forward(q: Tensor, k: Tensor, v: Tensor, norm: str | None, eps: float, plan: Plan | None = None) -> Tensor:
    """Attend from q (B, Nq, H, D) to k, v (B, Nk, H, D) -> (B, Nq, H, D), contiguous."""
    batch, nq, heads, dim = q.shape
    nk, power = k.shape[1], POWERS[norm]
    out = empty_like(q)
    if not out.numel():
        return out
    q, (k, v) = _unit_stride(q), _keys_and_values(k, v)
    plan = plan or choose_plan(batch * heads, max(nq, nk), dim, q.dtype, q.device, backward=False)
    if plan.chunks == 1:
        _forward_launch(q.shape, q.stride(), nk, k.stride(), eps, power, plan)(q, k, v, out)
    else:
        small = _small_matrices(q, q, k, v, power, eps, plan, backward=False)
        _output_launch(q.shape, q.stride(), plan)(q, small, out)
    return out


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, grads: tuple[Tensor, ...], norm: str | None, eps: float,
    plan: Plan | None = None,
) -> None:  # fmt: skip
    """Write the gradients of q, k and v, (B, N, H, D) each.

    `grads` are three contiguous tensors for them, or one contiguous tensor (B, N, 3, H, D).
    """
    batch, nq, heads, dim = q.shape
    nk, power, joint = k.shape[1], POWERS[norm], len(grads) == 1
    do, q, (k, v) = do.contiguous(), _unit_stride(q), _keys_and_values(k, v)
    plan = plan or choose_plan(batch * heads, max(nq, nk), dim, q.dtype, q.device, backward=True)
    arguments = (q.shape, nk, (q.stride(), k.stride()), joint)
    dq, dk, dv = grads * 3 if joint else grads
    if plan.chunks == 1:
        _backward_launch(*arguments, eps, power, plan)(do, q, k, v, dq, dk, dv)
    else:
        small = _small_matrices(do, q, k, v, power, eps, plan, backward=True)
        _gradients_launch(*arguments, power, plan)(do, q, k, v, small, dq, dk, dv)


def _small_matrices(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, power: int, eps: float, plan: Plan, backward: bool
) -> Tensor:
    """The small matrices of every head, (B * H, rows, BLOCK_D), from tokens split into chunks."""
    (batch, nq, heads, dim), nk = q.shape, k.shape[1]
    chunks, _ = plan.split(max(nq, nk))
    shape = (batch * heads, _rows(dim, backward), _block_d(dim))
    sums = torch.empty(chunks, *shape, device=q.device, dtype=torch.float32)
    small = torch.empty(shape, device=q.device, dtype=torch.float32)
    gather, combine = _small_launches(q.shape, q.stride(), nk, k.stride(), eps, power, plan, backward)
    gather(do, q, k, v, sums)
    combine(q, sums, small)
    return small


def _rows(dim: int, backward: bool) -> int:
    """Rows of a head's small matrices."""
    return (2 if backward else 1) * _block_d(dim) + 2


Shape = tuple[int, ...]


@lru_cache(CACHE_SIZE)
def _forward_launch(shape: Shape, q: Shape, nk: int, k: Shape, eps: float, power: int, plan: Plan) -> Launch:
    batch, nq, heads, dim = shape
    return Launch(
        _forward_kernel, (batch * heads,), *q[:3], *k[:3], heads, nq, nk, dim, eps,
        POWER=power, ONE_BLOCK=max(nq, nk) <= plan.block_n, FOLD=plan.fold, **plan.options(dim),
    )  # fmt: skip


@lru_cache(CACHE_SIZE)
def _output_launch(shape: Shape, q: Shape, plan: Plan) -> Launch:
    batch, nq, heads, dim = shape
    chunks, size = plan.split(nq)
    sizes, rows = (*q[:3], heads, nq, dim, chunks, size), _rows(dim, backward=False)
    return Launch(_output_kernel, (batch * heads * chunks,), *sizes, ROWS=rows, **plan.options(dim))


@lru_cache(CACHE_SIZE)
def _backward_launch(
    shape: Shape, nk: int, strides: tuple[Shape, Shape], joint: bool, eps: float, power: int, plan: Plan
) -> Launch:
    """`strides` are those of q and k."""
    batch, nq, heads, dim = shape
    sizes = (*_gradient_strides(shape, nk, strides, joint), heads, nq, nk, dim, eps)
    constants = plan.options(dim) | {"JOINT": joint, "POWER": power, "FOLD": plan.fold}
    return Launch(_backward_kernel, (batch * heads,), *sizes, **constants)


@lru_cache(CACHE_SIZE)
def _gradients_launch(
    shape: Shape, nk: int, strides: tuple[Shape, Shape], joint: bool, power: int, plan: Plan
) -> Launch:
    batch, nq, heads, dim = shape
    chunks, size = plan.split(max(nq, nk))
    sizes = (*_gradient_strides(shape, nk, strides, joint), heads, nq, nk, dim, chunks, size)
    constants = plan.options(dim) | {"JOINT": joint, "POWER": power, "ROWS": _rows(dim, backward=True)}
    return Launch(_gradients_kernel, (batch * heads * chunks,), *sizes, **constants)


def _gradient_strides(shape: Shape, nk: int, strides: tuple[Shape, Shape], joint: bool) -> Shape:
    """The strides of q, k and of their gradients, and the distance of the gradients of q, k and v in one tensor."""
    _, nq, heads, dim = shape
    part = heads * dim
    token = 3 * part if joint else part
    return (*strides[0][:3], *strides[1][:3], nq * token, token, dim, nk * token, token, dim, part)


@lru_cache(CACHE_SIZE)
def _small_launches(
    shape: Shape, q: Shape, nk: int, k: Shape, eps: float, power: int, plan: Plan, backward: bool
) -> tuple[Launch, Launch]:
    """The launches that compute sums over chunks, and that combine them."""
    batch, nq, heads, dim = shape
    chunks, size = plan.split(max(nq, nk))
    constants = {"POWER": power, "BACKWARD": backward, "ROWS": _rows(dim, backward)}
    gather = Launch(
        _gather_kernel, (batch * heads * chunks,), *q[:3], *k[:3], heads, nq, nk, dim, chunks, size,
        FOLD=plan.fold, **constants, **plan.options(dim),
    )  # fmt: skip
    block_d = _block_d(dim)
    combine = Launch(
        _combine_kernel, (batch * heads, block_d // 16), chunks, eps, BLOCK_R=16, BLOCK_D=block_d, **constants
    )
    return gather, combine
