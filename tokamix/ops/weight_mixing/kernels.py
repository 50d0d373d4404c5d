"""Adaptive weight mixing in Triton.

For one source the logits of all heads of all windows are one matrix product, policies (windows * heads, K) times the
bank's row (K, destinations): tensor cores want the source outermost. Softmax and the product with the values want a
window and a head outermost. The change of order goes through memory once, in the inputs' precision: `logits`
(pairs, N, PITCH), where a pair is a window and a head, N its tokens, and PITCH is N rounded up to whole vectors.
Written and read that is 4 N^2 bytes a pair in half precision. It is scratch: the backward pass computes it again, turns
it into its own gradient in place, and reads that once more for policy and bank. There are no atomics: every result is
deterministic.

Windows, shifts and heads are found by address; maps are neither rolled nor cut.
"""

# Triton unrolls its loops over tuples, which grow as Python's types and idioms do not foresee.
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

Pair = tuple[int, int]
VECTOR = 8  # elements of a 16-byte access in half precision
MAX_BLOCK = 256  # destinations a program takes at once
TILE = 64  # sources and destinations of a tile
SCRATCH_BYTES = 2**30  # larger batches are worked off in parts
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _locate(i_w, o_n, height, width, shift_y, shift_x, WIN_W: tl.constexpr, WIN_H: tl.constexpr):
    """Tokens o_n of window i_w: their index in the map, and on which side of its borders the shift brought them."""
    columns = width // WIN_W
    y = (i_w // columns) * WIN_H + o_n // WIN_W
    x = (i_w % columns) * WIN_W + o_n % WIN_W
    side = tl.where(y >= height - shift_y, 2, 0) + tl.where(x >= width - shift_x, 1, 0)
    y = tl.where(y + shift_y >= height, y + shift_y - height, y + shift_y)
    x = tl.where(x + shift_x >= width, x + shift_x - width, x + shift_x)
    return y * width + x, side


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
    """Where the policies (BLOCK_K, BLOCK_P) of source i_n lie in (B, H*W, K, HEADS); heads run along the last axis."""
    i_h, i_w = o_p % HEADS, o_p // HEADS % windows
    token, _ = _locate(i_w, i_n, height, width, shift_y, shift_x, WIN_W, WIN_H)
    token += (o_p // HEADS // windows) * (height * width)
    return (token.to(tl.int64) * (K * HEADS) + i_h)[None, :] + (o_k * HEADS)[:, None]


@triton.jit
def _compose_kernel(
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
def _mix_kernel(
    p_logits,  # (pairs, N, PITCH)
    p_v,  # (B, H*W, HEADS, D)
    p_out,  # (B, H*W, HEADS, D)
    p_lse,  # (pairs, N), the logarithm of each destination's sum under softmax
    windows,
    height,
    width,
    shift_y,
    shift_x,
    D,
    HEADS: tl.constexpr,
    WIN_H: tl.constexpr,
    WIN_W: tl.constexpr,
    MASKED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    N: tl.constexpr = WIN_H * WIN_W
    # backwards: what the previous kernel wrote last is still in the cache
    i_p = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h, i_w, i_b = i_p % HEADS, i_p // HEADS % windows, (i_p // HEADS // windows).to(tl.int64)
    i_p = i_p.to(tl.int64)
    o_m, o_d = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    m_m, m_d = o_m < N, o_d < D
    dst, side_dst = _locate(i_w, o_m, height, width, shift_y, shift_x, WIN_W, WIN_H)
    p_v += (i_b * height * width * HEADS + i_h) * D
    p_out += (i_b * height * width * HEADS + i_h) * D
    b_out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    b_max, b_sum = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, N, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        src, side_src = _locate(i_w, o_n, height, width, shift_y, shift_x, WIN_W, WIN_H)
        valid = (o_n < N)[:, None] & (o_m < PITCH)[None, :]
        b_w = tl.load(p_logits + (i_p * N + o_n[:, None]) * PITCH + o_m[None, :], mask=valid, other=float("-inf"))
        b_w = b_w.to(tl.float32)
        if MASKED:
            valid &= side_src[:, None] == side_dst[None, :]
        if ACTIVATION == "softmax":
            if MASKED:
                b_w = tl.where(valid, b_w, float("-inf"))
            b_top = tl.maximum(b_max, tl.max(b_w, axis=0))
            b_safe = tl.where(b_top == float("-inf"), 0.0, b_top) * LOG2_E  # no source allowed yet
            b_w = tl.exp2(b_w * LOG2_E - b_safe[None, :])
            b_scale = tl.exp2(b_max * LOG2_E - b_safe)
            b_sum = b_sum * b_scale + tl.sum(b_w, axis=0)
            b_out *= b_scale[:, None]
            b_max = b_top
        else:
            if ACTIVATION == "sigmoid":
                b_w = 1 / (1 + tl.exp2(-b_w * LOG2_E))
            b_w = tl.where(valid, b_w, 0.0)
        b_v = tl.load(
            p_v + src[:, None] * (HEADS * D) + o_d[None, :], mask=(o_n < N)[:, None] & m_d[None, :], other=0.0
        )
        b_out += tl.dot(tl.trans(b_w).to(b_v.dtype), b_v, input_precision="ieee")
    if ACTIVATION == "softmax":
        b_sum = tl.where(m_m, b_sum, 1.0)
        b_out /= b_sum[:, None]
        tl.store(p_lse + i_p * N + o_m, b_max * LOG2_E + tl.log2(b_sum), mask=m_m)
    p = p_out + dst[:, None] * (HEADS * D) + o_d[None, :]
    tl.store(p, b_out.to(p_out.dtype.element_ty), mask=m_m[:, None] & m_d[None, :])


@triton.jit
def _source_logits(
    p_logits, o_m, N, PITCH: tl.constexpr, INSIDE: tl.constexpr, START: tl.constexpr, COUNT: tl.constexpr
):
    """A pair's logits (COUNT, BLOCK_M) from START on, -inf beyond the last source; INSIDE: all destinations exist."""
    o_n = START + tl.arange(0, COUNT)
    p = p_logits + o_n[:, None] * PITCH + o_m[None, :]
    if START + COUNT > N:
        b_w = tl.load(p, mask=(o_n < N)[:, None] & (o_m < PITCH)[None, :], other=float("-inf"))
    elif INSIDE:
        b_w = tl.load(p)
    else:
        b_w = tl.load(p, mask=(o_m < PITCH)[None, :], other=0.0)
    return b_w.to(tl.float32)


@triton.jit
def _source_values(
    p_v, o_d, i_w, height, width, shift_y, shift_x, D, HEADS: tl.constexpr, WIN_H: tl.constexpr, WIN_W: tl.constexpr,
    START: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """A pair's values (COUNT, BLOCK_D) from START on."""
    o_n = START + tl.arange(0, COUNT)
    src, _ = _locate(i_w, o_n, height, width, shift_y, shift_x, WIN_W, WIN_H)
    p = p_v + src[:, None] * (HEADS * D) + o_d[None, :]
    return tl.load(p, mask=(o_n < WIN_H * WIN_W)[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def _mix_tile(
    p_logits, p_out, p_lse, values, o_m, dst, o_d, D, N: tl.constexpr, HEADS: tl.constexpr, PITCH: tl.constexpr,
    INSIDE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Mix the destinations o_m from all sources: blocks of BLOCK, and one of REST for those left over."""
    BLOCKS: tl.constexpr = N // BLOCK if N > BLOCK else 1
    PIECES: tl.constexpr = BLOCKS + 1 if REST > 0 else BLOCKS
    logits = ()
    for i in tl.static_range(BLOCKS):
        logits = logits + (_source_logits(p_logits, o_m, N, PITCH, INSIDE, i * BLOCK, BLOCK),)
    b_top = logits[0]
    for i in tl.static_range(1, BLOCKS):
        b_top = tl.maximum(b_top, logits[i])
    b_max = tl.max(b_top, axis=0)
    if REST > 0:
        logits = logits + (_source_logits(p_logits, o_m, N, PITCH, INSIDE, BLOCKS * BLOCK, REST),)
        b_max = tl.maximum(b_max, tl.max(logits[BLOCKS], axis=0))
    if not INSIDE:
        b_max = tl.where(o_m < N, b_max, 0.0)
    b_max *= LOG2_E
    b_out = tl.zeros((o_m.shape[0], o_d.shape[0]), tl.float32)
    b_sum = b_out
    for i in tl.static_range(PIECES):
        b_w = tl.trans(tl.exp2(logits[i] * LOG2_E - b_max[None, :]).to(values[i].dtype))
        b_out = tl.dot(b_w, values[i], b_out)
        # the sum of the weights is a product too: tensor cores are idle
        b_sum = tl.dot(b_w, tl.full(values[i].shape, 1.0, tl.float32).to(b_w.dtype), b_sum)
    b_total = tl.max(b_sum, axis=1)  # all columns are equal
    if not INSIDE:
        b_total = tl.where(o_m < N, b_total, 1.0)
    tl.store(p_lse + o_m, b_max + tl.log2(b_total), mask=o_m < N)
    p = p_out + dst[:, None] * (HEADS * D) + o_d[None, :]
    b_out *= (1 / b_total)[:, None]
    tl.store(p, b_out.to(p_out.dtype.element_ty), mask=(o_m < N)[:, None] & (o_d < D)[None, :])


@triton.jit
def _mix_tiles_kernel(
    p_logits,  # as in `_mix_kernel`
    p_v,
    p_out,
    p_lse,
    windows,
    height,
    width,
    shift_y,
    shift_x,
    D,
    HEADS: tl.constexpr,
    WIN_H: tl.constexpr,
    WIN_W: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`_mix_kernel` under softmax without a mask: one program mixes a pair, whose values it loads once.

    Sources and destinations are cut into blocks of BLOCK and one of REST, so that little is computed beyond the window:
    196 tokens are 3 * 64 + 16, where powers of two would be 256.
    """
    N: tl.constexpr = WIN_H * WIN_W
    BLOCKS: tl.constexpr = N // BLOCK
    # backwards: what the previous kernel wrote last is still in the cache
    i_p = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h, i_w, i_b = i_p % HEADS, i_p // HEADS % windows, (i_p // HEADS // windows).to(tl.int64)
    o_d = tl.arange(0, BLOCK_D)
    p_v += (i_b * height * width * HEADS + i_h) * D
    p_out += (i_b * height * width * HEADS + i_h) * D
    p_logits += i_p.to(tl.int64) * (N * PITCH)
    p_lse += i_p.to(tl.int64) * N
    values = ()
    for i in tl.static_range(BLOCKS):
        b_v = _source_values(
            p_v, o_d, i_w, height, width, shift_y, shift_x, D, HEADS, WIN_H, WIN_W, i * BLOCK, BLOCK
        )  # fmt: skip
        values = values + (b_v,)
    if REST > 0:
        b_v = _source_values(
            p_v, o_d, i_w, height, width, shift_y, shift_x, D, HEADS, WIN_H, WIN_W, BLOCKS * BLOCK, REST
        )  # fmt: skip
        values = values + (b_v,)
    for start in range(0, BLOCKS * BLOCK, BLOCK):
        o_m = start + tl.arange(0, BLOCK)
        dst, _ = _locate(i_w, o_m, height, width, shift_y, shift_x, WIN_W, WIN_H)
        _mix_tile(p_logits, p_out, p_lse, values, o_m, dst, o_d, D, N, HEADS, PITCH, True, BLOCK, REST)
    if REST > 0:
        o_m = BLOCKS * BLOCK + tl.arange(0, REST)
        dst, _ = _locate(i_w, o_m, height, width, shift_y, shift_x, WIN_W, WIN_H)
        b_v = _source_values(p_v, o_d, i_w, height, width, shift_y, shift_x, D, HEADS, WIN_H, WIN_W, 0, BLOCK_ALL)
        _mix_tile(p_logits, p_out, p_lse, (b_v,), o_m, dst, o_d, D, N, HEADS, PITCH, False, BLOCK_ALL, 0)


@triton.jit
def _mix_backward_kernel(
    p_logits,  # (pairs, N, PITCH), replaced by their gradient
    p_v,  # (B, H*W, HEADS, D)
    p_out,  # (B, H*W, HEADS, D)
    p_lse,  # (pairs, N)
    p_grad,  # (B, H*W, HEADS, D), gradient of out
    p_grad_v,  # (B, H*W, HEADS, D)
    windows,
    height,
    width,
    shift_y,
    shift_x,
    D,
    HEADS: tl.constexpr,
    WIN_H: tl.constexpr,
    WIN_W: tl.constexpr,
    MASKED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    N: tl.constexpr = WIN_H * WIN_W
    i_p = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h, i_w, i_b = i_p % HEADS, i_p // HEADS % windows, (i_p // HEADS // windows).to(tl.int64)
    i_p = i_p.to(tl.int64)
    o_n, o_d = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_d = o_d < D
    base = (i_b * height * width * HEADS + i_h) * D
    src, side_src = _locate(i_w, o_n, height, width, shift_y, shift_x, WIN_W, WIN_H)
    o_src = base + src[:, None] * (HEADS * D) + o_d[None, :]
    m_src = (o_n < N)[:, None] & m_d[None, :]
    b_v = tl.load(p_v + o_src, mask=m_src, other=0.0)
    b_grad_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, N, BLOCK_M):
        o_m = start + tl.arange(0, BLOCK_M)
        dst, side_dst = _locate(i_w, o_m, height, width, shift_y, shift_x, WIN_W, WIN_H)
        o_dst = base + dst[:, None] * (HEADS * D) + o_d[None, :]
        m_dst = (o_m < N)[:, None] & m_d[None, :]
        b_grad = tl.load(p_grad + o_dst, mask=m_dst, other=0.0)
        valid = (o_n < N)[:, None] & (o_m < PITCH)[None, :]
        p = p_logits + (i_p * N + o_n[:, None]) * PITCH + o_m[None, :]
        b_w = tl.load(p, mask=valid, other=0.0).to(tl.float32)
        if ACTIVATION == "softmax":
            b_lse = tl.load(p_lse + i_p * N + o_m, mask=o_m < N, other=0.0)
            b_w = tl.exp2(b_w * LOG2_E - b_lse[None, :])
        elif ACTIVATION == "sigmoid":
            b_w = 1 / (1 + tl.exp2(-b_w * LOG2_E))
        allowed = (o_n < N)[:, None] & (o_m < N)[None, :]
        if MASKED:
            allowed &= side_src[:, None] == side_dst[None, :]
        b_w = tl.where(allowed, b_w, 0.0)
        # first, as nothing waits for it: the wait for the other product covers both. Triton 3.6 would else fetch the
        # next gradients over those that tensor cores still read.
        b_grad_v = tl.dot(b_w.to(b_grad.dtype), b_grad, b_grad_v, input_precision="ieee")
        b_slope = tl.dot(b_v, tl.trans(b_grad), input_precision="ieee")
        if ACTIVATION == "softmax":
            b_out = tl.load(p_out + o_dst, mask=m_dst, other=0.0)
            b_delta = tl.sum(b_out.to(tl.float32) * b_grad.to(tl.float32), axis=1)
            b_slope = b_w * (b_slope - b_delta[None, :])
        elif ACTIVATION == "sigmoid":
            b_slope *= b_w * (1 - b_w)
        tl.store(p, tl.where(allowed, b_slope, 0.0).to(p_logits.dtype.element_ty), mask=valid)
    tl.store(p_grad_v + o_src, b_grad_v.to(p_grad_v.dtype.element_ty), mask=m_src)


@triton.jit
def _mix_backward_tile(
    b_grad_v, b_v, p_logits, p_out, p_lse, p_grad, o_n, o_m, dst, o_d, D,
    N: tl.constexpr, HEADS: tl.constexpr, PITCH: tl.constexpr, INSIDE: tl.constexpr,
):  # fmt: skip
    """Replace the logits of some sources and destinations by their gradient; return the sources' own, added."""
    o_dst = dst[:, None] * (HEADS * D) + o_d[None, :]
    m_dst = (o_m < N)[:, None] & (o_d < D)[None, :]
    p = p_logits + o_n[:, None] * PITCH + o_m[None, :]
    valid = (o_n < N)[:, None] & (o_m < PITCH)[None, :]
    if INSIDE:
        b_w = tl.load(p)
        b_lse = tl.load(p_lse + o_m)
    else:
        b_w = tl.load(p, mask=valid, other=0.0)
        b_lse = tl.load(p_lse + o_m, mask=o_m < N, other=0.0)
    b_grad = tl.load(p_grad + o_dst, mask=m_dst, other=0.0)
    b_out = tl.load(p_out + o_dst, mask=m_dst, other=0.0)
    b_delta = tl.sum(b_out.to(tl.float32) * b_grad.to(tl.float32), axis=1)
    b_w = tl.exp2(b_w.to(tl.float32) * LOG2_E - b_lse[None, :])
    if not INSIDE:
        b_w = tl.where((o_n < N)[:, None] & (o_m < N)[None, :], b_w, 0.0)
    b_grad_v = tl.dot(b_w.to(b_grad.dtype), b_grad, b_grad_v)  # first, as in `_mix_backward_kernel`
    b_slope = (b_w * (tl.dot(b_v, tl.trans(b_grad)) - b_delta[None, :])).to(p_logits.dtype.element_ty)
    if INSIDE:
        tl.store(p, b_slope)
    else:
        tl.store(p, b_slope, mask=valid)
    return b_grad_v


@triton.jit
def _mix_backward_row(
    p_logits, p_v, p_out, p_lse, p_grad, p_grad_v, o_n, i_w, height, width, shift_y, shift_x, D,
    HEADS: tl.constexpr, WIN_H: tl.constexpr, WIN_W: tl.constexpr, PITCH: tl.constexpr, INSIDE: tl.constexpr,
    BLOCK: tl.constexpr, REST: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The backward pass of the sources o_n of a pair."""
    N: tl.constexpr = WIN_H * WIN_W
    WHOLE: tl.constexpr = N // BLOCK * BLOCK
    o_d = tl.arange(0, BLOCK_D)
    src, _side = _locate(i_w, o_n, height, width, shift_y, shift_x, WIN_W, WIN_H)
    o_src, m_src = src[:, None] * (HEADS * D) + o_d[None, :], (o_n < N)[:, None] & (o_d < D)[None, :]
    b_v = tl.load(p_v + o_src, mask=m_src, other=0.0)
    b_grad_v = tl.zeros((o_n.shape[0], BLOCK_D), tl.float32)
    for start in range(0, WHOLE, BLOCK):
        o_m = start + tl.arange(0, BLOCK)
        dst, _side_dst = _locate(i_w, o_m, height, width, shift_y, shift_x, WIN_W, WIN_H)
        b_grad_v = _mix_backward_tile(
            b_grad_v, b_v, p_logits, p_out, p_lse, p_grad, o_n, o_m, dst, o_d, D, N, HEADS, PITCH, INSIDE
        )
    if REST > 0:
        o_m = WHOLE + tl.arange(0, REST)
        dst, _side_dst = _locate(i_w, o_m, height, width, shift_y, shift_x, WIN_W, WIN_H)
        b_grad_v = _mix_backward_tile(
            b_grad_v, b_v, p_logits, p_out, p_lse, p_grad, o_n, o_m, dst, o_d, D, N, HEADS, PITCH, False
        )
    tl.store(p_grad_v + o_src, b_grad_v.to(p_grad_v.dtype.element_ty), mask=m_src)


@triton.jit
def _mix_backward_tiles_kernel(
    p_logits,  # as in `_mix_backward_kernel`
    p_v,
    p_out,
    p_lse,
    p_grad,
    p_grad_v,
    windows,
    height,
    width,
    shift_y,
    shift_x,
    D,
    HEADS: tl.constexpr,
    WIN_H: tl.constexpr,
    WIN_W: tl.constexpr,
    PITCH: tl.constexpr,
    BLOCK: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_ALL: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """`_mix_backward_kernel` in the tiles of `_mix_tiles_kernel`, a row of them for each program."""
    N: tl.constexpr = WIN_H * WIN_W
    i_p, i_n = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    i_h, i_w, i_b = i_p % HEADS, i_p // HEADS % windows, (i_p // HEADS // windows).to(tl.int64)
    base = (i_b * height * width * HEADS + i_h) * D
    p_logits += i_p.to(tl.int64) * (N * PITCH)
    p_lse += i_p.to(tl.int64) * N
    if i_n < N // BLOCK:
        _mix_backward_row(
            p_logits, p_v + base, p_out + base, p_lse, p_grad + base, p_grad_v + base,
            i_n * BLOCK + tl.arange(0, BLOCK), i_w, height, width, shift_y, shift_x, D,
            HEADS, WIN_H, WIN_W, PITCH, True, BLOCK, REST, BLOCK_D,
        )  # fmt: skip
    elif REST > 0:
        _mix_backward_row(
            p_logits, p_v + base, p_out + base, p_lse, p_grad + base, p_grad_v + base,
            i_n * BLOCK + tl.arange(0, REST), i_w, height, width, shift_y, shift_x, D,
            HEADS, WIN_H, WIN_W, PITCH, False, BLOCK_ALL, BLOCK_ALL, BLOCK_D,
        )  # fmt: skip


@triton.jit
def _compose_backward_kernel(
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
        b_grad_bank = tl.dot(b_policy, b_slope, b_grad_bank, input_precision="ieee")  # first, as above
        b_grad_policy = tl.dot(b_bank, tl.trans(b_slope), input_precision="ieee")
        tl.store(p_grad_policy + o_policy, b_grad_policy.to(p_grad_policy.dtype.element_ty), mask=m_policy)
    p = p_grad_bank + ((i_s * N + i_n).to(tl.int64) * K + o_k[:, None]) * N + o_m[None, :]
    tl.store(p, b_grad_bank, mask=(o_k < K)[:, None] & (o_m < N)[None, :])


@triton.jit
def _displacements_kernel(
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


def forward(
    v: Tensor,
    policy: Tensor,
    bank: Tensor,
    sums: Tensor,
    grid: Pair,
    window: Pair,
    shift: Pair,
    shift_mask: bool,
    activation: str,
) -> Tensor:
    """Mixed values (B, N, heads, d); under softmax the logarithms of its sums are written to sums (pairs, h*w)."""
    v, policy, bank = v.contiguous(), policy.contiguous(), bank.contiguous()  # as Linear layers leave them already
    plan = Plan(v, bank, grid, window, shift, shift_mask, activation)
    out = torch.empty_like(v)
    for images, pairs, logits in plan.parts():
        plan.compose(policy[images], bank, logits)
        plan.mix(logits, v[images], out[images], sums[pairs])
    return out


def backward(
    grad: Tensor,
    v: Tensor,
    policy: Tensor,
    bank: Tensor,
    out: Tensor,
    sums: Tensor,
    grid: Pair,
    window: Pair,
    shift: Pair,
    shift_mask: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of v, policy and bank."""
    grad, v, policy, bank = grad.contiguous(), v.contiguous(), policy.contiguous(), bank.contiguous()
    plan = Plan(v, bank, grid, window, shift, shift_mask, activation)
    grad_v, grad_policy, grad_bank = torch.empty_like(v), torch.empty_like(policy), None
    for images, pairs, logits in plan.parts():
        plan.compose(policy[images], bank, logits)
        plan.mix_backward(logits, v[images], out[images], sums[pairs], grad[images], grad_v[images])
        part = plan.compose_backward(logits, policy[images], bank, grad_policy[images])
        grad_bank = part if grad_bank is None else grad_bank + part
    assert grad_bank is not None
    return grad_v, grad_policy, grad_bank.to(bank.dtype)


class Plan:
    """Geometry and block sizes of one call, and its launches; all tensors are contiguous."""

    def __init__(
        self, v: Tensor, bank: Tensor, grid: Pair, window: Pair, shift: Pair, shift_mask: bool, activation: str
    ) -> None:
        self.batch, self.heads, self.dim, self.entries = v.shape[0], v.shape[2], v.shape[3], bank.shape[0]
        self.tokens = window[0] * window[1]
        self.windows = grid[0] * grid[1] // self.tokens
        self.map = (self.windows, *grid, *shift)
        self.window = (self.heads, *window)
        self.relative = bank.ndim == 2
        self.activation = (shift_mask and shift != (0, 0), activation)
        self.pitch = triton.cdiv(self.tokens, VECTOR) * VECTOR
        self.dtype, self.device = v.dtype, v.device

        self.block_d = max(16, triton.next_power_of_2(self.dim))
        self.block_k = max(16, triton.next_power_of_2(self.entries))
        half = self.dtype.itemsize == 2  # float32 is multiplied without tensor cores, from half as many registers
        most = min(MAX_BLOCK, 16384 // self.block_d) if half else 64
        self.block_all = min(most, max(16, triton.next_power_of_2(self.tokens)))
        # all sources of a few destinations at once: softmax needs one pass and little exchange between warps; a small
        # window fits a single warp, which exchanges nothing
        small = half and self.block_all <= 64
        self.mix_block = min(self.block_all, 64 if small else 32)
        self.mix_warps = max(1, self.block_d // 32) if small else 4
        self.mix_backward_rows = min(self.block_all, 128)
        self.mix_backward_block = min(self.block_all, 64 if small else 32)
        self.mix_backward_warps = 4 if self.mix_backward_rows <= 64 else 8
        # the accumulator (block_k, compose_m) must stay in registers
        self.compose_m = min(self.block_all, (16384 if half else 4096) // self.block_k)
        self.compose_p = self.compose_backward_p = 64 if half else 32
        self.compose_warps = self.compose_backward_warps = 4 if half and self.compose_m * self.block_k <= 4096 else 8
        self.compose_programs, self.compose_backward_programs = 2048, 512
        # with masks and wider heads tiles need more registers than there are
        fits = self.dim <= 32 and TILE < self.tokens <= MAX_BLOCK
        self.tiled = half and fits and self.activation == (False, "softmax")
        if self.tiled:
            self.compose_programs = 4 * self.tokens

    def parts(self) -> Iterator[tuple[slice, slice, Tensor]]:
        """Images, their pairs, and scratch for the pairs' logits, as many at a time as the scratch may hold."""
        size = self.tokens * self.pitch
        pairs = self.windows * self.heads
        images = max(1, SCRATCH_BYTES // (pairs * size * self.dtype.itemsize))
        scratch = torch.empty(min(images, self.batch) * pairs, size, device=self.device, dtype=self.dtype)
        for first in range(0, self.batch, images):
            last = min(first + images, self.batch)
            yield slice(first, last), slice(first * pairs, last * pairs), scratch[: (last - first) * pairs]

    def compose(self, policy: Tensor, bank: Tensor, logits: Tensor) -> None:
        """Write the logits of all pairs."""
        launch = self._compose_launch(len(logits), self.compose_p, self.compose_programs)
        _compose_kernel[launch](
            policy, bank, logits, *self._compose_arguments(len(logits), self.compose_p), num_warps=self.compose_warps
        )

    def mix(self, logits: Tensor, v: Tensor, out: Tensor, sums: Tensor) -> None:
        """Write the mixed values, and the logarithms of softmax's sums."""
        if self.tiled:
            _mix_tiles_kernel[(len(logits),)](
                logits, v, out, sums, *self.map, self.dim, *self.window, self.pitch, *self._tiles(),
                num_warps=4, num_stages=1,
            )  # fmt: skip
            return
        _mix_kernel[len(logits), triton.cdiv(self.tokens, self.mix_block)](
            logits, v, out, sums, *self.map, self.dim, *self.window, *self.activation, self.pitch,
            self.block_all, self.mix_block, self.block_d, num_warps=self.mix_warps,
        )  # fmt: skip

    def mix_backward(self, logits: Tensor, v: Tensor, out: Tensor, sums: Tensor, grad: Tensor, grad_v: Tensor) -> None:
        """Write the gradient of the values, and replace the logits by theirs."""
        if self.tiled:
            _mix_backward_tiles_kernel[len(logits), triton.cdiv(self.tokens, TILE)](
                logits, v, out, sums, grad, grad_v, *self.map, self.dim, *self.window, self.pitch, *self._tiles(),
                num_warps=4, num_stages=2, maxnreg=168,
            )  # fmt: skip
            return
        _mix_backward_kernel[len(logits), triton.cdiv(self.tokens, self.mix_backward_rows)](
            logits, v, out, sums, grad, grad_v, *self.map, self.dim, *self.window, *self.activation, self.pitch,
            self.mix_backward_rows, self.mix_backward_block, self.block_d, num_warps=self.mix_backward_warps,
        )  # fmt: skip

    def compose_backward(self, grad_logits: Tensor, policy: Tensor, bank: Tensor, grad_policy: Tensor) -> Tensor:
        """Write the gradient of the policies; return the bank's, in float32."""
        launch = self._compose_launch(len(grad_logits), self.compose_backward_p, self.compose_backward_programs)
        _, parts, splits = launch
        by_part = grad_policy if parts == 1 else grad_policy.new_empty(parts, *grad_policy.shape, dtype=torch.float32)
        by_pair = bank.new_empty(splits, self.tokens, self.entries, self.tokens, dtype=torch.float32)
        _compose_backward_kernel[launch](
            grad_logits, policy, bank, by_part, by_pair,
            *self._compose_arguments(len(grad_logits), self.compose_backward_p), num_warps=self.compose_backward_warps,
        )  # fmt: skip
        if parts > 1:
            grad_policy.copy_(by_part.sum(0))
        if not self.relative:
            return by_pair.sum(0).transpose(0, 1)
        table = torch.empty_like(bank, dtype=torch.float32)
        _displacements_kernel[self.entries, triton.cdiv(table.shape[1], 64)](
            by_pair, table, self.entries, splits, *self.window[1:], 32, 64, num_warps=4
        )
        return table

    def _tiles(self) -> tuple[int, ...]:
        """BLOCK, REST, BLOCK_ALL and BLOCK_D of the tiled kernels."""
        rest = self.tokens % TILE
        return TILE, max(16, triton.next_power_of_2(rest)) if rest else 0, self.block_all, self.block_d

    def _compose_launch(self, pairs: int, block: int, programs: int) -> tuple[int, int, int]:
        """One program for each source, part of the destinations and share of the pairs; enough to fill a GPU."""
        parts = triton.cdiv(self.tokens, self.compose_m)
        return self.tokens, parts, min(triton.cdiv(pairs, block), triton.cdiv(programs, self.tokens * parts))

    def _compose_arguments(self, pairs: int, block: int) -> tuple[object, ...]:
        return (
            pairs, *self.map, self.entries, *self.window, self.relative, self.pitch, block, self.compose_m, self.block_k
        )  # fmt: skip
