"""Kernels for mixed tokens = activation(logits) x values and its gradients, per pair of a window and a head."""

# Triton unrolls loops over tuples, which grow in ways that type checkers and linters do not expect.
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005

import triton
import triton.language as tl

from tokamix.ops.weight_mixing.windows import locate

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def mix_kernel(
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
    """Mix a block of destinations of a pair."""
    N: tl.constexpr = WIN_H * WIN_W
    # in reverse order: the last output of the previous kernel is still in the cache
    i_p = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h, i_w, i_b = i_p % HEADS, i_p // HEADS % windows, (i_p // HEADS // windows).to(tl.int64)
    i_p = i_p.to(tl.int64)
    o_m, o_d = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    m_m, m_d = o_m < N, o_d < D
    dst, side_dst = locate(i_w, o_m, height, width, shift_y, shift_x, WIN_W, WIN_H)
    p_v += (i_b * height * width * HEADS + i_h) * D
    p_out += (i_b * height * width * HEADS + i_h) * D
    b_out = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    b_max, b_sum = tl.full((BLOCK_M,), float("-inf"), tl.float32), tl.zeros((BLOCK_M,), tl.float32)
    for start in range(0, N, BLOCK_N):
        o_n = start + tl.arange(0, BLOCK_N)
        src, side_src = locate(i_w, o_n, height, width, shift_y, shift_x, WIN_W, WIN_H)
        valid = (o_n < N)[:, None] & (o_m < PITCH)[None, :]
        b_w = tl.load(p_logits + (i_p * N + o_n[:, None]) * PITCH + o_m[None, :], mask=valid, other=float("-inf"))
        b_w = b_w.to(tl.float32)
        if MASKED:
            valid &= side_src[:, None] == side_dst[None, :]
        if ACTIVATION == "softmax":
            if MASKED:
                b_w = tl.where(valid, b_w, float("-inf"))
            b_top = tl.maximum(b_max, tl.max(b_w, axis=0))
            b_safe = tl.where(b_top == float("-inf"), 0.0, b_top) * LOG2_E  # all sources so far are masked
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
    src, _ = locate(i_w, o_n, height, width, shift_y, shift_x, WIN_W, WIN_H)
    p = p_v + src[:, None] * (HEADS * D) + o_d[None, :]
    return tl.load(p, mask=(o_n < WIN_H * WIN_W)[:, None] & (o_d < D)[None, :], other=0.0)


@triton.jit
def _mix_tile(
    p_logits, p_out, p_lse, values, o_m, dst, o_d, D, N: tl.constexpr, HEADS: tl.constexpr, PITCH: tl.constexpr,
    INSIDE: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    """Mix the destinations o_m from all sources: blocks of BLOCK, and one of REST for the remainder."""
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
        # the sum of the weights is a product too, on otherwise idle tensor cores
        b_sum = tl.dot(b_w, tl.full(values[i].shape, 1.0, tl.float32).to(b_w.dtype), b_sum)
    b_total = tl.max(b_sum, axis=1)  # all columns are equal
    if not INSIDE:
        b_total = tl.where(o_m < N, b_total, 1.0)
    tl.store(p_lse + o_m, b_max + tl.log2(b_total), mask=o_m < N)
    p = p_out + dst[:, None] * (HEADS * D) + o_d[None, :]
    b_out *= (1 / b_total)[:, None]
    tl.store(p, b_out.to(p_out.dtype.element_ty), mask=(o_m < N)[:, None] & (o_d < D)[None, :])


@triton.jit
def mix_tiles_kernel(
    p_logits,  # as in `mix_kernel`
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
    """`mix_kernel` under softmax without a mask: one program mixes a pair, whose values it loads once.

    Sources and destinations are cut into blocks of BLOCK and one of REST, so that little is computed beyond the window:
    196 tokens are 3 * 64 + 16, where powers of two would be 256.
    """
    N: tl.constexpr = WIN_H * WIN_W
    BLOCKS: tl.constexpr = N // BLOCK
    # in reverse order: the last output of the previous kernel is still in the cache
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
        dst, _ = locate(i_w, o_m, height, width, shift_y, shift_x, WIN_W, WIN_H)
        _mix_tile(p_logits, p_out, p_lse, values, o_m, dst, o_d, D, N, HEADS, PITCH, True, BLOCK, REST)
    if REST > 0:
        o_m = BLOCKS * BLOCK + tl.arange(0, REST)
        dst, _ = locate(i_w, o_m, height, width, shift_y, shift_x, WIN_W, WIN_H)
        b_v = _source_values(p_v, o_d, i_w, height, width, shift_y, shift_x, D, HEADS, WIN_H, WIN_W, 0, BLOCK_ALL)
        _mix_tile(p_logits, p_out, p_lse, (b_v,), o_m, dst, o_d, D, N, HEADS, PITCH, False, BLOCK_ALL, 0)


@triton.jit
def mix_backward_kernel(
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
    """Some sources of a pair: the gradient of their values, and that of their logits in the logits' place."""
    N: tl.constexpr = WIN_H * WIN_W
    i_p = tl.num_programs(0) - 1 - tl.program_id(0)
    i_h, i_w, i_b = i_p % HEADS, i_p // HEADS % windows, (i_p // HEADS // windows).to(tl.int64)
    i_p = i_p.to(tl.int64)
    o_n, o_d = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_D)
    m_d = o_d < D
    base = (i_b * height * width * HEADS + i_h) * D
    src, side_src = locate(i_w, o_n, height, width, shift_y, shift_x, WIN_W, WIN_H)
    o_src = base + src[:, None] * (HEADS * D) + o_d[None, :]
    m_src = (o_n < N)[:, None] & m_d[None, :]
    b_v = tl.load(p_v + o_src, mask=m_src, other=0.0)
    b_grad_v = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, N, BLOCK_M):
        o_m = start + tl.arange(0, BLOCK_M)
        dst, side_dst = locate(i_w, o_m, height, width, shift_y, shift_x, WIN_W, WIN_H)
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
        # first, because nothing waits for it: the wait for the other product covers both. Otherwise Triton loads the
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
    b_grad_v = tl.dot(b_w.to(b_grad.dtype), b_grad, b_grad_v)  # first, as in `mix_backward_kernel`
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
    src, _side = locate(i_w, o_n, height, width, shift_y, shift_x, WIN_W, WIN_H)
    o_src, m_src = src[:, None] * (HEADS * D) + o_d[None, :], (o_n < N)[:, None] & (o_d < D)[None, :]
    b_v = tl.load(p_v + o_src, mask=m_src, other=0.0)
    b_grad_v = tl.zeros((o_n.shape[0], BLOCK_D), tl.float32)
    for start in range(0, WHOLE, BLOCK):
        o_m = start + tl.arange(0, BLOCK)
        dst, _side_dst = locate(i_w, o_m, height, width, shift_y, shift_x, WIN_W, WIN_H)
        b_grad_v = _mix_backward_tile(
            b_grad_v, b_v, p_logits, p_out, p_lse, p_grad, o_n, o_m, dst, o_d, D, N, HEADS, PITCH, INSIDE
        )
    if REST > 0:
        o_m = WHOLE + tl.arange(0, REST)
        dst, _side_dst = locate(i_w, o_m, height, width, shift_y, shift_x, WIN_W, WIN_H)
        b_grad_v = _mix_backward_tile(
            b_grad_v, b_v, p_logits, p_out, p_lse, p_grad, o_n, o_m, dst, o_d, D, N, HEADS, PITCH, False
        )
    tl.store(p_grad_v + o_src, b_grad_v.to(p_grad_v.dtype.element_ty), mask=m_src)


@triton.jit
def mix_backward_tiles_kernel(
    p_logits,  # as in `mix_backward_kernel`
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
    """`mix_backward_kernel` in the tiles of `mix_tiles_kernel`, a row of them for each program."""
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
