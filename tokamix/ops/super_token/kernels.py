"""Super token sampling and scattering in Triton.

Both are limited by memory traffic: sampling reads x twice (averages; association and sums) and writes nine partial sums
per cell, which a small third kernel adds up; scattering writes the map once. A program handles one cell, whose tokens
are associated with nine super tokens. The gradient of scattering is sampling's sum with a given association, the
gradient of sampling is scattering, so the same kernels serve both passes, without atomics.
"""

from functools import lru_cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tokamix.ops.launch import CACHE_SIZE, Launch
from tokamix.ops.super_token.reference import EPS, Cell, grid_of


@triton.jit
def _cell_pixels(start, i_y, i_x, H, W, CELL_H: tl.constexpr, CELL_W: tl.constexpr, BLOCK_P: tl.constexpr):
    """Rows and columns of BLOCK_P tokens of a cell from token `start` on, and masks of the cell and the map."""
    o_p = start + tl.arange(0, BLOCK_P)
    o_y, o_x = i_y * CELL_H + o_p // CELL_W, i_x * CELL_W + o_p % CELL_W
    m_cell = o_p < CELL_H * CELL_W
    return o_y.to(tl.int64), o_x.to(tl.int64), m_cell, m_cell & (o_y < H) & (o_x < W)


@triton.jit
def _neighbours(i_b, i_y, i_x, P, Q):
    """Indices of the nine super tokens around a cell, padded to sixteen, and their mask."""
    o_k = tl.arange(0, 16)
    o_y, o_x = i_y + o_k // 3 - 1, i_x + o_k % 3 - 1
    inside = (o_k < 9) & (o_y >= 0) & (o_y < P) & (o_x >= 0) & (o_x < Q)
    return (i_b * P + o_y) * Q + o_x, inside


@triton.jit
def _mean_kernel(
    p_x,  # (B, H, W, C), any strides
    p_mean,  # (B, P, Q, C), float32
    H,
    W,
    P,
    Q,
    C,
    stride_b,
    stride_h,
    stride_w,
    stride_c,
    CELL_H: tl.constexpr,
    CELL_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    i_cell = tl.program_id(0).to(tl.int64)
    i_b, i_y, i_x = i_cell // (P * Q), i_cell // Q % P, i_cell % Q
    o_c = tl.arange(0, BLOCK_C)
    b_sum = tl.zeros((BLOCK_P, BLOCK_C), tl.float32)
    for start in range(0, CELL_H * CELL_W, BLOCK_P):
        o_y, o_x, _, m_map = _cell_pixels(start, i_y, i_x, H, W, CELL_H, CELL_W, BLOCK_P)
        p = p_x + i_b * stride_b + (o_y * stride_h + o_x * stride_w)[:, None] + o_c[None, :] * stride_c
        b_sum += tl.load(p, mask=m_map[:, None] & (o_c < C)[None, :], other=0.0).to(tl.float32)
    tl.store(p_mean + i_cell * C + o_c, tl.sum(b_sum, axis=0) / (CELL_H * CELL_W), mask=o_c < C)


@triton.jit
def _gather_kernel(
    p_x,  # (B, H, W, C), any strides
    p_tokens,  # (B, P, Q, C), float32: super tokens of the previous iteration
    p_association,  # (B, H, W, 9), contiguous: written if ASSOCIATE, else read
    p_parts,  # (B, P, Q, 9, C): contributions of each cell to the nine super tokens around it
    p_weights,  # (B, P, Q, 9), float32: the weight of each contribution
    H,
    W,
    P,
    Q,
    C,
    scale,
    stride_b,
    stride_h,
    stride_w,
    stride_c,
    ASSOCIATE: tl.constexpr,
    CELL_H: tl.constexpr,
    CELL_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_cell = tl.program_id(0).to(tl.int64)
    i_b, i_y, i_x = i_cell // (P * Q), i_cell // Q % P, i_cell % Q
    o_c, o_k = tl.arange(0, BLOCK_C), tl.arange(0, 16)
    dtype = p_x.dtype.element_ty
    if ASSOCIATE:
        o_t, m_t = _neighbours(i_b, i_y, i_x, P, Q)
        mask = m_t[:, None] & (o_c < C)[None, :]
        b_t = tl.load(p_tokens + o_t[:, None] * C + o_c[None, :], mask=mask, other=0.0) * scale
        # in half precision super tokens are split into two terms: with one, the logits would lose half their digits
        b_high = b_t.to(dtype)
        b_low = (b_t - b_high.to(tl.float32)).to(dtype)
    b_parts = tl.zeros((16, BLOCK_C), tl.float32)
    b_weights = tl.zeros((16,), tl.float32)
    for start in range(0, CELL_H * CELL_W, BLOCK_P):
        o_y, o_x, m_cell, m_map = _cell_pixels(start, i_y, i_x, H, W, CELL_H, CELL_W, BLOCK_P)
        p = p_x + i_b * stride_b + (o_y * stride_h + o_x * stride_w)[:, None] + o_c[None, :] * stride_c
        b_x = tl.load(p, mask=m_map[:, None] & (o_c < C)[None, :], other=0.0)
        p_a = p_association + ((i_b * H + o_y) * W + o_x)[:, None] * 9 + o_k[None, :]
        m_a = m_map[:, None] & (o_k < 9)[None, :]
        if ASSOCIATE:
            b_logits = tl.dot(b_x, tl.trans(b_high), input_precision=PRECISION)
            if PRECISION != "ieee":
                b_logits = tl.dot(b_x, tl.trans(b_low), b_logits, input_precision=PRECISION)
            b_logits = tl.where((o_k < 9)[None, :], b_logits, float("-inf"))
            b_a = tl.exp(b_logits - tl.max(b_logits, axis=1)[:, None])
            b_a = tl.where(m_cell[:, None], b_a / tl.sum(b_a, axis=1)[:, None], 0.0).to(dtype)
            tl.store(p_a, b_a, mask=m_a)
            b_weights += tl.sum(b_a.to(tl.float32), axis=0)  # rounded, so that weights sum to 1
        else:
            b_a = tl.load(p_a, mask=m_a, other=0.0)
        b_parts = tl.dot(tl.trans(b_a), b_x, b_parts, input_precision=PRECISION)
    p_own = p_parts + i_cell * 9 * C + o_k[:, None] * C + o_c[None, :]
    tl.store(p_own, b_parts.to(p_parts.dtype.element_ty), mask=(o_k < 9)[:, None] & (o_c < C)[None, :])
    if ASSOCIATE:
        tl.store(p_weights + i_cell * 9 + o_k, b_weights, mask=o_k < 9)


@triton.jit
def _combine_kernel(
    p_parts,  # (B, P, Q, 9, C)
    p_weights,  # (B, P, Q, 9)
    p_tokens,  # (B, P, Q, C)
    p_weight,  # (B, P, Q)
    P,
    Q,
    C,
    TOKENS,
    eps,
    MEAN: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    o_t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    o_c = tl.arange(0, BLOCK_C)
    o_y, o_x = o_t // Q % P, o_t % Q
    b_sum = tl.zeros((BLOCK_T, BLOCK_C), tl.float32)
    b_weight = tl.zeros((BLOCK_T,), tl.float32)
    for k in tl.static_range(
        9
    ):  # the k-th contribution of a cell goes to its k-th neighbour, so it is read from the opposite side
        d_y, d_x = 1 - k // 3, 1 - k % 3
        inside = (o_t < TOKENS) & (o_y + d_y >= 0) & (o_y + d_y < P) & (o_x + d_x >= 0) & (o_x + d_x < Q)
        o_part = (o_t + d_y * Q + d_x) * 9 + k
        mask = inside[:, None] & (o_c < C)[None, :]
        b_sum += tl.load(p_parts + o_part[:, None] * C + o_c[None, :], mask=mask, other=0.0).to(tl.float32)
        if MEAN:
            b_weight += tl.load(p_weights + o_part, mask=inside, other=0.0)
    if MEAN:
        b_weight += eps
        b_sum /= b_weight[:, None]
        tl.store(p_weight + o_t, b_weight, mask=o_t < TOKENS)
    mask = (o_t < TOKENS)[:, None] & (o_c < C)[None, :]
    tl.store(p_tokens + o_t[:, None] * C + o_c[None, :], b_sum.to(p_tokens.dtype.element_ty), mask=mask)


@triton.jit
def _scatter_kernel(
    p_tokens,  # (B, P, Q, C), contiguous
    p_association,  # (B, H, W, 9), contiguous
    p_weight,  # (B, P, Q), float32: divisor of each super token, if DIVIDE
    p_out,  # (B, H, W, C), contiguous
    H,
    W,
    P,
    Q,
    C,
    DIVIDE: tl.constexpr,
    CELL_H: tl.constexpr,
    CELL_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PRECISION: tl.constexpr,
):
    i_cell = tl.program_id(0).to(tl.int64)
    i_b, i_y, i_x = i_cell // (P * Q), i_cell // Q % P, i_cell % Q
    o_c, o_k = tl.arange(0, BLOCK_C), tl.arange(0, 16)
    o_t, m_t = _neighbours(i_b, i_y, i_x, P, Q)
    b_t = tl.load(p_tokens + o_t[:, None] * C + o_c[None, :], mask=m_t[:, None] & (o_c < C)[None, :], other=0.0)
    if DIVIDE:  # divide the association, which is at most 1: a gradient divided by a small weight may overflow
        b_weight = tl.load(p_weight + o_t, mask=m_t, other=1.0)
    for start in range(0, CELL_H * CELL_W, BLOCK_P):
        o_y, o_x, _, m_map = _cell_pixels(start, i_y, i_x, H, W, CELL_H, CELL_W, BLOCK_P)
        o_p = (i_b * H + o_y) * W + o_x
        mask = m_map[:, None] & (o_k < 9)[None, :]
        b_a = tl.load(p_association + o_p[:, None] * 9 + o_k[None, :], mask=mask, other=0.0)
        if DIVIDE:
            b_a = (b_a.to(tl.float32) / b_weight[None, :]).to(b_t.dtype)
        b_out = tl.dot(b_a, b_t, input_precision=PRECISION)
        mask = m_map[:, None] & (o_c < C)[None, :]
        tl.store(p_out + o_p[:, None] * C + o_c[None, :], b_out.to(p_out.dtype.element_ty), mask=mask)


class Plan(NamedTuple):
    """Launch parameters: tokens per iteration of a program, and warps."""

    block_p: int
    warps: int


@lru_cache
def plan_for(channels: int, cell: Cell) -> Plan:
    """All channels at once, and as many tokens of a cell as fit in registers."""
    block_c = triton.next_power_of_2(channels)
    block_p = max(16, min(triton.next_power_of_2(cell[0] * cell[1]), 8192 // block_c))
    return Plan(block_p, max(1, min(8, block_p * block_c // 1024)))


def sample(x: Tensor, cell: Cell, n_iter: int, plan: Plan | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Super tokens, association and weight sums of x; see `reference.sample`."""
    (p, q), (batch, height, width, channels) = grid_of(x.shape, cell), x.shape
    tokens = torch.empty(batch, p, q, channels, device=x.device, dtype=x.dtype)
    association = torch.empty(batch, height, width, 9, device=x.device, dtype=x.dtype)
    weight = torch.empty(batch, p, q, 1, device=x.device, dtype=torch.float32)
    estimate = torch.empty(batch, p, q, channels, device=x.device, dtype=torch.float32)
    if x.numel():
        _mean_launch(x.shape, x.stride(), cell, plan or plan_for(channels, cell))(x, estimate)
    for i in range(n_iter):
        parts, weights = gather(x, association, cell, estimate, plan)
        combine(parts, weights, estimate if i < n_iter - 1 else tokens, weight)
    return tokens, association, weight


def sample_backward(grad: Tensor, association: Tensor, weight: Tensor, cell: Cell, plan: Plan | None = None) -> Tensor:
    """The gradient of `sample` with respect to x."""
    return scatter(grad, association, cell, weight, plan)


def scatter(
    tokens: Tensor, association: Tensor, cell: Cell, weight: Tensor | None = None, plan: Plan | None = None
) -> Tensor:
    """Super tokens, divided by their weight if there is one, mapped back; see `reference.scatter`."""
    tokens, association = tokens.contiguous(), association.contiguous()
    size, channels = association.shape[1:3], tokens.shape[3]
    out = torch.empty(len(tokens), *size, channels, device=tokens.device, dtype=tokens.dtype)
    if out.numel():
        divide, plan = weight is not None, plan or plan_for(channels, cell)
        launch = _scatter_launch(tokens.shape, size, divide, cell, _precision(tokens), plan)
        launch(tokens, association, tokens if weight is None else weight, out)
    return out


def scatter_backward(grad: Tensor, association: Tensor, cell: Cell, plan: Plan | None = None) -> Tensor:
    """The gradient of `scatter` with respect to the super tokens."""
    tokens = torch.empty(grad.shape[0], *grid_of(grad.shape, cell), grad.shape[3], device=grad.device, dtype=grad.dtype)
    parts, _ = gather(grad, association.contiguous(), cell, None, plan)
    combine(parts, None, tokens, None)
    return tokens


def gather(
    x: Tensor, association: Tensor, cell: Cell, tokens: Tensor | None, plan: Plan | None = None
) -> tuple[Tensor, Tensor]:
    """Contributions of each cell of x to the nine super tokens around it, and their weights.

    With `tokens`, the association is computed first, otherwise read.
    """
    (p, q), (batch, _, _, channels) = grid_of(x.shape, cell), x.shape
    # float32, because sums of a cell's tokens overflow float16
    dtype = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float32
    parts = torch.empty(batch, p, q, 9, channels, device=x.device, dtype=dtype)
    weights = torch.empty(batch, p, q, 9, device=x.device, dtype=torch.float32)
    if x.numel():
        associate, plan = tokens is not None, plan or plan_for(channels, cell)
        launch = _gather_launch(x.shape, x.stride(), associate, cell, _precision(x), plan)
        launch(x, x if tokens is None else tokens, association, parts, weights)
    return parts, weights


def combine(parts: Tensor, weights: Tensor | None, tokens: Tensor, weight: Tensor | None) -> None:
    """Add up the parts of each super token; with `weights`, add those up too and divide by them."""
    if tokens.numel():
        launch = _combine_launch(tokens.shape, weights is not None)
        launch(parts, parts if weights is None else weights, tokens, tokens if weight is None else weight)


Shape = tuple[int, ...]


@lru_cache(CACHE_SIZE)
def _mean_launch(shape: Shape, strides: Shape, cell: Cell, plan: Plan) -> Launch:
    (batch, height, width, channels), (p, q) = shape, grid_of(shape, cell)
    sizes = (height, width, p, q, channels, *strides)
    return Launch(_mean_kernel, (batch * p * q,), *sizes, *cell, **_blocks(channels, plan))


@lru_cache(CACHE_SIZE)
def _gather_launch(shape: Shape, strides: Shape, associate: bool, cell: Cell, precision: str, plan: Plan) -> Launch:
    (batch, height, width, channels), (p, q) = shape, grid_of(shape, cell)
    sizes = (height, width, p, q, channels, channels**-0.5, *strides)
    constants = _blocks(channels, plan) | {"PRECISION": precision}
    return Launch(_gather_kernel, (batch * p * q,), *sizes, associate, *cell, **constants)


@lru_cache(CACHE_SIZE)
def _scatter_launch(shape: Shape, size: Cell, divide: bool, cell: Cell, precision: str, plan: Plan) -> Launch:
    batch, p, q, channels = shape
    constants = _blocks(channels, plan) | {"PRECISION": precision}
    return Launch(_scatter_kernel, (batch * p * q,), *size, p, q, channels, divide, *cell, **constants)


@lru_cache(CACHE_SIZE)
def _combine_launch(shape: Shape, mean: bool) -> Launch:
    batch, p, q, channels = shape
    block_c = triton.next_power_of_2(channels)
    block_t = max(1, 512 // block_c)
    grid, sizes = (triton.cdiv(batch * p * q, block_t),), (p, q, channels, batch * p * q, EPS)
    return Launch(_combine_kernel, grid, *sizes, mean, block_t, block_c)


def _precision(x: Tensor) -> str:
    return "ieee" if x.dtype == torch.float32 else "tf32"


def _blocks(channels: int, plan: Plan) -> dict[str, int | str]:
    block_c = max(16, triton.next_power_of_2(channels))
    return {"BLOCK_P": plan.block_p, "BLOCK_C": block_c, "num_warps": plan.warps}
