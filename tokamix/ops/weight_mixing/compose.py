"""Kernels for logits = policies x bank and its gradients; for one source the logits of all pairs are one product."""

import triton
import triton.language as tl

from tokamix.ops.weight_mixing.windows import locate


@triton.jit
def _bank_row(p_bank, i_n, o_k, o_m, K, WIN_H: tl.constexpr, WIN_W: tl.constexpr, RELATIVE: tl.constexpr):
    """The bank's weights from source i_n, (BLOCK_K, BLOCK_M)."""
    if RELATIVE:
        dy = i_n // WIN_W - o_m // WIN_W + WIN_H - 1
        dx = i_n % WIN_W - o_m % WIN_W + WIN_W - 1
        o_bank = o_k[:, None] * ((2 * WIN_H - 1) * (2 * WIN_W - 1)) + (dy * (2 * WIN_W - 1) + dx)[None, :]
    else:
        o_bank = (o_k[:, None] * (WIN_H * WIN_W) + i_n) * (WIN_H * WIN_W) + o_m[None, :]
    return tl.load(p_bank + o_bank, mask=(o_k < K)[:, None] & (o_m < WIN_H * WIN_W)[None, :], other=0.0)


@triton.jit
def _policy_offsets(
    i_n,
    o_p,
    o_k,
    windows,
    height,
    width,
    shift_y,
    shift_x,
    K,
    HEADS: tl.constexpr,
    WIN_H: tl.constexpr,
    WIN_W: tl.constexpr,
):
    """Offsets of the policies (BLOCK_K, BLOCK_P) of source i_n in (B, H*W, K, HEADS)."""
    i_h, i_w = o_p % HEADS, o_p // HEADS % windows
    token, _ = locate(i_w, i_n, height, width, shift_y, shift_x, WIN_W, WIN_H)
    token += (o_p // HEADS // windows) * (height * width)
    return (token.to(tl.int64) * (K * HEADS) + i_h)[None, :] + (o_k * HEADS)[:, None]


@triton.jit
def compose_kernel(
    p_policy,  # (B, H*W, K, HEADS)
    p_bank,  # (K, displacements) or (K, N, N)
    p_logits,  # (pairs, N, PITCH)
    pairs,
    windows,
    height,
    width,
    shift_y,
    shift_x,
    K,
    HEADS: tl.constexpr,
    WIN_H: tl.constexpr,
    WIN_W: tl.constexpr,
    RELATIVE: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The logits of one source, for a part of the pairs and of the destinations."""
    N: tl.constexpr = WIN_H * WIN_W
    i_n = tl.program_id(0)
    o_k, o_m = tl.arange(0, BLOCK_K), tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    dtype = p_policy.dtype.element_ty
    b_bank = _bank_row(p_bank, i_n, o_k, o_m, K, WIN_H, WIN_W, RELATIVE).to(dtype)
    for start in range(tl.program_id(2) * BLOCK_P, pairs, tl.num_programs(2) * BLOCK_P):
        o_p = start + tl.arange(0, BLOCK_P)
        o_policy = _policy_offsets(i_n, o_p, o_k, windows, height, width, shift_y, shift_x, K, HEADS, WIN_H, WIN_W)
        b_policy = tl.load(p_policy + o_policy, mask=(o_k < K)[:, None] & (o_p < pairs)[None, :], other=0.0)
        b_logits = tl.dot(tl.trans(b_policy), b_bank, input_precision="ieee")
        if dtype == tl.float16:
            b_logits = tl.minimum(tl.maximum(b_logits, -65504.0), 65504.0)
        p = p_logits + (o_p[:, None].to(tl.int64) * N + i_n) * PITCH + o_m[None, :]
        tl.store(p, b_logits.to(dtype), mask=(o_p < pairs)[:, None] & (o_m < PITCH)[None, :])


@triton.jit
def compose_backward_kernel(
    p_grad_logits,  # (pairs, N, PITCH)
    p_policy,  # (B, H*W, K, HEADS)
    p_bank,  # (K, displacements) or (K, N, N)
    p_grad_policy,  # (parts of M, B, H*W, K, HEADS)
    p_grad_bank,  # (parts of the pairs, N, K, N)
    pairs,
    windows,
    height,
    width,
    shift_y,
    shift_x,
    K,
    HEADS: tl.constexpr,
    WIN_H: tl.constexpr,
    WIN_W: tl.constexpr,
    RELATIVE: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The gradients of one source's policies and of its row of the bank."""
    N: tl.constexpr = WIN_H * WIN_W
    i_n, i_m, i_s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    o_k, o_m = tl.arange(0, BLOCK_K), i_m * BLOCK_M + tl.arange(0, BLOCK_M)
    dtype = p_policy.dtype.element_ty
    b_bank = _bank_row(p_bank, i_n, o_k, o_m, K, WIN_H, WIN_W, RELATIVE).to(dtype)
    b_grad_bank = tl.zeros((BLOCK_K, BLOCK_M), tl.float32)
    p_grad_policy += i_m.to(tl.int64) * (pairs * N) * K
    for start in range(i_s * BLOCK_P, pairs, tl.num_programs(2) * BLOCK_P):
        o_p = start + tl.arange(0, BLOCK_P)
        m_policy = (o_k < K)[:, None] & (o_p < pairs)[None, :]
        o_policy = _policy_offsets(i_n, o_p, o_k, windows, height, width, shift_y, shift_x, K, HEADS, WIN_H, WIN_W)
        b_policy = tl.load(p_policy + o_policy, mask=m_policy, other=0.0)
        p = p_grad_logits + (o_p[:, None].to(tl.int64) * N + i_n) * PITCH + o_m[None, :]
        b_slope = tl.load(p, mask=(o_p < pairs)[:, None] & (o_m < PITCH)[None, :], other=0.0)
        # first, as in `mix_backward_kernel`
        b_grad_bank = tl.dot(b_policy, b_slope, b_grad_bank, input_precision="ieee")
        b_grad_policy = tl.dot(b_bank, tl.trans(b_slope), input_precision="ieee")
        tl.store(p_grad_policy + o_policy, b_grad_policy.to(p_grad_policy.dtype.element_ty), mask=m_policy)
    p = p_grad_bank + ((i_s * N + i_n).to(tl.int64) * K + o_k[:, None]) * N + o_m[None, :]
    tl.store(p, b_grad_bank, mask=(o_k < K)[:, None] & (o_m < N)[None, :])


@triton.jit
def displacements_kernel(
    p_pairs,  # (PARTS, N, K, N)
    p_bank,  # (K, displacements)
    K,
    PARTS: tl.constexpr,
    WIN_H: tl.constexpr,
    WIN_W: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Sum the gradient of a bank of pairs of positions over the pairs with the same displacement."""
    N: tl.constexpr = WIN_H * WIN_W
    TABLE: tl.constexpr = (2 * WIN_H - 1) * (2 * WIN_W - 1)
    i_k = tl.program_id(0)
    o_r = tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)
    dy, dx = o_r // (2 * WIN_W - 1) - (WIN_H - 1), o_r % (2 * WIN_W - 1) - (WIN_W - 1)
    b_sum = tl.zeros((BLOCK_R,), tl.float32)
    for start in range(0, N, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        y, x = (o_n // WIN_W)[:, None] - dy[None, :], (o_n % WIN_W)[:, None] - dx[None, :]
        valid = (y >= 0) & (y < WIN_H) & (x >= 0) & (x < WIN_W) & (o_n < N)[:, None]
        for part in range(PARTS):
            p = p_pairs + ((part * N + o_n[:, None]).to(tl.int64) * K + i_k) * N + y * WIN_W + x
            b_sum += tl.sum(tl.load(p, mask=valid, other=0.0), axis=0)
    tl.store(p_bank + i_k * TABLE + o_r, b_sum.to(p_bank.dtype.element_ty), mask=o_r < TABLE)
