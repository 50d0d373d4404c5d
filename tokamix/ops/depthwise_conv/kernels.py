"""Depthwise 3x3 convolution in Triton.

It is limited by memory traffic: the forward pass reads x and writes y, the whole backward pass reads the gradient and x
and writes the gradient of x. A program handles a few rows of a map and some channels and moves along the columns; each
value is loaded (and goes through GELU) once for all rows that use it, and values shared by columns stay in registers.
The gradient of the weights is summed within each program and then over programs, in a fixed order.
"""

# Triton unrolls loops over tuples, which grow in ways that type checkers and linters do not expect.
# mypy: disable-error-code="assignment, misc"
# ruff: noqa: RUF005

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.launch import CACHE_SIZE, Launch, empty_like

INTERPRET = tl.constexpr(dispatch.INTERPRET)


class Plan(NamedTuple):
    """Launch parameters: rows, channels and columns per program, warps, and programs of the backward pass."""

    rows: int
    block_c: int
    columns: int
    warps: int = 1
    programs: int = 132 * 12  # resident at once on an H200


@lru_cache
def plan_forward(shape: tuple[int, ...]) -> Plan:
    """Four rows; columns are split if there would be few programs."""
    batch, height, width, channels = shape
    rows, block_c, columns = 4, 64 if channels % 128 else 128, width
    programs = batch * triton.cdiv(height, rows) * triton.cdiv(channels, block_c)
    while columns > 8 and programs * triton.cdiv(width, columns) < 132 * 24:
        columns = triton.cdiv(columns, 2)
    return Plan(rows, block_c, columns)


def plan_backward(shape: tuple[int, ...]) -> Plan:
    """Small tiles, so that programs, which process several each, are evenly loaded."""
    return Plan(4, 64, min(shape[2], 28))


@triton.jit
def _phi(x, EXACT: tl.constexpr):
    """The normal cumulative distribution function: GELU(x) = x phi(x)."""
    if EXACT:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    # 1 / (1 + 2^u), u an odd quintic fitted to an error of x phi(x) of at most 3e-5; x is clamped at 5, where u turns
    t = tl.minimum(x * x, 25.0)
    u = x * (-2.3011136 + t * (-0.10678258 + t * 0.00101537))
    if INTERPRET:
        return 1.0 / (1.0 + tl.exp2(u))
    return tl.inline_asm_elementwise(
        "{ .reg .f32 t; ex2.approx.ftz.f32 t, $1; add.ftz.f32 t, t, 0f3F800000; rcp.approx.ftz.f32 $0, t; }",
        "=f,f",
        [u],
        dtype=tl.float32,
        is_pure=True,
        pack=1,
    )


@triton.jit
def _load_column(p_column, limits, stride_h, o_c, ROWS: tl.constexpr):
    """ROWS values of one column of a map, each (BLOCK_C,), zero beyond each row's channel limit."""
    values = ()
    for r in tl.static_range(ROWS):
        values = values + (tl.load(p_column + r * stride_h, mask=o_c < limits[r], other=0.0),)
    return values


@triton.jit
def _widen(column, ROWS: tl.constexpr, GELU: tl.constexpr, EXACT: tl.constexpr):
    """A column in float32, after GELU if requested."""
    values = ()
    for r in tl.static_range(ROWS):
        value = column[r].to(tl.float32)
        if GELU:
            value *= _phi(value, EXACT)
        values = values + (value,)
    return values


@triton.jit
def _row_limits(row, H, C, ROWS: tl.constexpr):
    """The number of valid channels in each of ROWS rows from `row` down: C, or 0 outside the map."""
    limits = ()
    for r in tl.static_range(ROWS):
        limits = limits + (tl.where((row + r >= 0) & (row + r < H), C, 0),)
    return limits


@triton.jit
def _load_kernels(p_weight, o_c, m_c, RESIDUAL: tl.constexpr):
    """The nine weights of each channel; a residual connection adds 1 at the centre."""
    weights = ()
    for k in tl.static_range(9):
        weight = tl.load(p_weight + o_c * 9 + k, mask=m_c, other=0.0).to(tl.float32)
        if RESIDUAL and k == 4:
            weight += 1.0
        weights = weights + (weight,)
    return weights


@triton.jit
def _taps(start, x, weights, j: tl.constexpr, ROWS: tl.constexpr):
    """Add to each row the product of column x with column j of the weights."""
    sums = ()
    for r in tl.static_range(ROWS):
        sums = sums + (start[r] + weights[j] * x[r] + weights[j + 3] * x[r + 1] + weights[j + 6] * x[r + 2],)
    return sums


@triton.jit
def _store_rows(p_out, rows, limits, stride, o_c, ROWS: tl.constexpr):
    for r in tl.static_range(ROWS):
        tl.store(p_out + r * stride, rows[r].to(p_out.dtype.element_ty), mask=o_c < limits[r + 1])


@triton.jit
def _forward_kernel(
    p_x,  # (B, H, W, C), any strides
    p_weight,  # (C, 9)
    p_bias,  # (C,)
    p_y,  # (B, H, W, C), contiguous
    H,
    W,
    C,
    COLUMNS,  # columns per program
    stride_b,
    stride_h,
    stride_w,
    stride_c,
    HAS_BIAS: tl.constexpr,
    RESIDUAL: tl.constexpr,
    GELU: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    strips, segments = tl.cdiv(H, ROWS), tl.cdiv(W, COLUMNS)
    i_tile, i_c = tl.program_id(0), tl.program_id(1)
    i_b = (i_tile // (strips * segments)).to(tl.int64)
    row, first = i_tile // segments % strips * ROWS, i_tile % segments * COLUMNS
    last = tl.minimum(first + COLUMNS, W)
    o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    weights = _load_kernels(p_weight, o_c, o_c < C, RESIDUAL)
    bias = tl.zeros((BLOCK_C,), tl.float32)
    if HAS_BIAS:
        bias += tl.load(p_bias + o_c, mask=o_c < C, other=0.0).to(tl.float32)
    biases = ()
    for _ in tl.static_range(ROWS):
        biases = biases + (bias,)
    limits = _row_limits(row - 1, H, C, ROWS + 2)
    p_column = p_x + i_b * stride_b + (row - 1).to(tl.int64) * stride_h + first.to(tl.int64) * stride_w + o_c * stride_c
    p_out = p_y + ((i_b * H + row) * W + first) * C + o_c

    before = _row_limits(row - 1, H, tl.where(first > 0, C, 0), ROWS + 2)
    x = _widen(_load_column(p_column - stride_w, before, stride_h, o_c, ROWS + 2), ROWS + 2, GELU, EXACT)
    sums = _taps(biases, x, weights, 0, ROWS)
    x = _widen(_load_column(p_column, limits, stride_h, o_c, ROWS + 2), ROWS + 2, GELU, EXACT)
    sums, sums_right = _taps(sums, x, weights, 1, ROWS), _taps(biases, x, weights, 0, ROWS)
    # a column is loaded while the previous one is processed; the last is loaded twice instead of one outside
    p_column += tl.where(first + 1 < W, stride_w, 0)
    ahead = _load_column(p_column, limits, stride_h, o_c, ROWS + 2)
    for step in range(tl.minimum(last + 1, W) - first - 1):
        x = _widen(ahead, ROWS + 2, GELU, EXACT)
        p_column += tl.where(first + step + 2 < W, stride_w, 0)
        ahead = _load_column(p_column, limits, stride_h, o_c, ROWS + 2)
        _store_rows(p_out, _taps(sums, x, weights, 2, ROWS), limits, W * C, o_c, ROWS)
        p_out += C
        sums, sums_right = _taps(sums_right, x, weights, 1, ROWS), _taps(biases, x, weights, 0, ROWS)
    if last == W:  # the last column has no right neighbour
        _store_rows(p_out, sums, limits, W * C, o_c, ROWS)


@triton.jit
def _backward_kernel(
    p_grad,  # (B, H, W, C), any strides
    p_x,  # (B, H, W, C), any strides
    p_weight,  # (C, 9)
    p_grad_x,  # (B, H, W, C), contiguous
    p_sums,  # (programs, 10, C): each program's part of the gradients of weight and bias
    TILES,  # strips of rows in all maps, times segments of columns
    H,
    W,
    C,
    COLUMNS,
    stride_gb,
    stride_gh,
    stride_gw,
    stride_gc,
    stride_b,
    stride_h,
    stride_w,
    stride_c,
    RESIDUAL: tl.constexpr,
    GELU: tl.constexpr,
    EXACT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    strips, segments = tl.cdiv(H, ROWS), tl.cdiv(W, COLUMNS)
    i_program, i_c = tl.program_id(0), tl.program_id(1)
    o_c = i_c * BLOCK_C + tl.arange(0, BLOCK_C)
    weights = _load_kernels(p_weight, o_c, o_c < C, RESIDUAL)
    sums = ()
    for _ in tl.static_range(10):
        sums = sums + (tl.zeros((BLOCK_C,), tl.float32),)

    for i_tile in range(i_program, TILES, tl.num_programs(0)):
        i_b = (i_tile // (strips * segments)).to(tl.int64)
        row, first = i_tile // segments % strips * ROWS, i_tile % segments * COLUMNS
        last = tl.minimum(first + COLUMNS, W)
        limits = _row_limits(row - 1, H, C, ROWS + 2)
        p_column = p_grad + i_b * stride_gb + (row - 1).to(tl.int64) * stride_gh + first.to(tl.int64) * stride_gw
        p_column += o_c * stride_gc
        p_in = p_x + i_b * stride_b + row.to(tl.int64) * stride_h + first.to(tl.int64) * stride_w + o_c * stride_c
        p_out = p_grad_x + ((i_b * H + row) * W + first) * C + o_c
        before = _row_limits(row - 1, H, tl.where(first > 0, C, 0), ROWS + 2)
        left = _load_column(p_column - stride_gw, before, stride_gh, o_c, ROWS + 2)
        here = _load_column(p_column, limits, stride_gh, o_c, ROWS + 2)
        left, here = _widen(left, ROWS + 2, False, EXACT), _widen(here, ROWS + 2, False, EXACT)
        # as above, a column is loaded while the previous one is processed
        after = _row_limits(row - 1, H, tl.where(first + 1 < W, C, 0), ROWS + 2)
        ahead = _load_column(p_column + stride_gw, after, stride_gh, o_c, ROWS + 2)
        p_column += 2 * stride_gw
        inputs = _load_column(p_in, _row_limits(row, H, C, ROWS), stride_h, o_c, ROWS)
        for step in range(last - first):
            right, xs = _widen(ahead, ROWS + 2, False, EXACT), _widen(inputs, ROWS, False, EXACT)
            after = _row_limits(row - 1, H, tl.where(first + step + 2 < W, C, 0), ROWS + 2)
            ahead = _load_column(p_column, after, stride_gh, o_c, ROWS + 2)
            p_in += tl.where(first + step + 1 < W, stride_w, 0)
            inputs = _load_column(p_in, _row_limits(row, H, C, ROWS), stride_h, o_c, ROWS)
            for r in tl.static_range(ROWS):
                m_in, x = o_c < limits[r + 1], xs[r]
                # the outputs that x contributes to, in the order of its weights in them
                around = (right[r + 2], here[r + 2], left[r + 2], right[r + 1], here[r + 1], left[r + 1])
                around = around + (right[r], here[r], left[r])
                z, slope = x, 1.0
                if GELU:
                    phi = _phi(x, EXACT)
                    z = x * phi
                    slope = phi + x * 0.3989422804014327 * tl.exp2(-0.7213475204444817 * x * x)
                grad = weights[0] * around[0]
                next_sums = (sums[0] + z * around[0],)
                for k in tl.static_range(1, 9):
                    grad += weights[k] * around[k]
                    next_sums = next_sums + (sums[k] + z * around[k],)
                sums = next_sums + (sums[9] + here[r + 1],)
                tl.store(p_out + r * W * C, (grad * slope).to(p_grad_x.dtype.element_ty), mask=m_in)
            left, here = here, right
            p_column += stride_gw
            p_out += C

    p_own = p_sums + i_program.to(tl.int64) * 10 * C + o_c
    for k in tl.static_range(10):
        tl.store(p_own + k * C, sums[k], mask=o_c < C)


@triton.jit
def _sum_kernel(
    p_sums,  # (programs, 10, C)
    p_weight,  # (C, 9)
    p_bias,  # (C,)
    PROGRAMS,
    C,
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_c, i_k = tl.program_id(0), tl.program_id(1)
    o_c, o_n = i_c * BLOCK_C + tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_N)
    b_sum = tl.zeros((BLOCK_N, BLOCK_C), tl.float32)
    for start in range(0, PROGRAMS, BLOCK_N):
        mask = (start + o_n < PROGRAMS)[:, None] & (o_c < C)[None, :]
        b_sum += tl.load(p_sums + ((start + o_n[:, None]) * 10 + i_k) * C + o_c[None, :], mask=mask, other=0.0)
    b_total = tl.sum(b_sum, axis=0)
    if i_k < 9:
        tl.store(p_weight + o_c * 9 + i_k, b_total.to(p_weight.dtype.element_ty), mask=o_c < C)
    else:
        tl.store(p_bias + o_c, b_total.to(p_bias.dtype.element_ty), mask=o_c < C)


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: bool, gelu: bool, plan: Plan | None = None
) -> Tensor:
    """The convolution of x (B, H, W, C)."""
    y = empty_like(x)
    if y.numel():
        plan, exact, biased = plan or plan_forward(x.shape), x.dtype == torch.float32, bias is not None
        launch = _forward_launch(x.shape, x.stride(), plan, biased, residual, gelu, exact)
        launch(x, weight.contiguous(), weight if bias is None else bias.contiguous(), y)
    return y


def backward(
    grad: Tensor, x: Tensor, weight: Tensor, residual: bool, gelu: bool, plan: Plan | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias."""
    plan, exact, channels = plan or plan_backward(x.shape), x.dtype == torch.float32, x.shape[3]
    programs, multiply, add = _backward_launches(x.shape, grad.stride(), x.stride(), plan, residual, gelu, exact)
    grad_x = empty_like(x)
    sums = torch.empty(programs, 10, channels, device=x.device, dtype=torch.float32)
    if programs:
        multiply(grad, x, weight.contiguous(), grad_x, sums)
    grad_weight = empty_like(weight)
    grad_bias = torch.empty(channels, device=x.device, dtype=weight.dtype)
    add(sums, grad_weight, grad_bias)
    return grad_x, grad_weight, grad_bias


@lru_cache(CACHE_SIZE)
def _forward_launch(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    plan: Plan,
    biased: bool,
    residual: bool,
    gelu: bool,
    exact: bool,
) -> Launch:
    batch, height, width, channels = shape
    tiles = batch * triton.cdiv(height, plan.rows) * triton.cdiv(width, plan.columns)
    return Launch(
        _forward_kernel, (tiles, triton.cdiv(channels, plan.block_c)), height, width, channels, plan.columns, *strides,
        HAS_BIAS=biased, RESIDUAL=residual, GELU=gelu, EXACT=exact, ROWS=plan.rows, BLOCK_C=plan.block_c,
        num_warps=plan.warps,
    )  # fmt: skip


@lru_cache(CACHE_SIZE)
def _backward_launches(
    shape: tuple[int, ...],
    grad_strides: tuple[int, ...],
    strides: tuple[int, ...],
    plan: Plan,
    residual: bool,
    gelu: bool,
    exact: bool,
) -> tuple[int, Launch, Launch]:
    """The number of programs, and the launches that compute the products and that add up their parts."""
    batch, height, width, channels = shape
    blocks = triton.cdiv(channels, plan.block_c)
    tiles = batch * triton.cdiv(height, plan.rows) * triton.cdiv(width, plan.columns)
    programs = min(tiles, triton.cdiv(plan.programs, blocks))
    multiply = Launch(
        _backward_kernel, (programs, blocks), tiles, height, width, channels, plan.columns, *grad_strides, *strides,
        RESIDUAL=residual, GELU=gelu, EXACT=exact, ROWS=plan.rows, BLOCK_C=plan.block_c, num_warps=plan.warps,
    )  # fmt: skip
    add = Launch(_sum_kernel, (triton.cdiv(channels, 32), 10), programs, channels, BLOCK_N=64, BLOCK_C=32)
    return programs, multiply, add
