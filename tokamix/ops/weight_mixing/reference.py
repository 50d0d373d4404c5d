"""Adaptive weight mixing in plain PyTorch.

Weights have the layout (sources, B, windows, heads, destinations): policy times bank is one matrix product per source,
so the source comes first; the product with the values reads them in place.
"""

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tokamix.ops import dispatch

Pair = tuple[int, int]
LAYERNORM_EPS = 1e-5


def bank_mixing(
    v: Tensor,
    policy: Tensor | None,
    bank: Tensor,
    grid: Pair,
    window: Pair,
    shift: Pair = (0, 0),
    shift_mask: bool = True,
    activation: str = "softmax",
) -> Tensor:
    """Mix values v (B, N, heads, d) with the weights of `mixing_weights`; see `tokamix.ops.bank_mixing`."""
    if dispatch.is_exporting() and activation == "softmax" and policy is not None:
        mixed = _exported_mixing(v, policy, bank, grid, window, shift, shift_mask)
    else:
        values = to_windows(v, grid, window, shift).transpose(2, 3)  # (B, windows, heads, sources, d)
        weights = mixing_weights(policy, bank, grid, window, shift, shift_mask, activation).to(v.dtype)
        mixed = (weights.permute(1, 2, 3, 4, 0) @ values).transpose(2, 3)
    return from_windows(mixed, grid, window, shift)  # from (B, windows, destinations, heads, d)


def _exported_mixing(
    v: Tensor, policy: Tensor, bank: Tensor, grid: Pair, window: Pair, shift: Pair, shift_mask: bool
) -> Tensor:
    """The product of softmax weights and values for exported graphs, (B, windows, destinations, heads, d).

    ONNX Runtime is fast at a softmax over the last axis only. OpenVINO is slow at transposing matrices, more than at a
    softmax over the first axis, written out: there, sources stay the first axis and only whole rows move.

    Values and policies are ordered alike, so that `tokamix.export.simplify` orders what both are made from, once.
    """
    values = _to_sources(v, grid, window, shift).permute(1, 2, 3, 0, 4)  # (B, windows, heads, sources, d)
    table = expand_bank(bank, window).permute(1, 0, 2)  # (sources, K, destinations)
    rows = _to_sources(policy.transpose(2, 3), grid, window, shift)
    shape = rows.shape[1:4]  # B, windows, heads
    logits = torch.bmm(rows.flatten(1, 3), table.to(rows.dtype))  # (sources, B * windows * heads, destinations)
    allowed = same_side(grid, window, shift, bank.device) if shift_mask else None
    if not dispatch.is_exporting_to("openvino"):
        logits = logits.permute(1, 2, 0).unflatten(0, shape)  # (B, windows, heads, destinations, sources)
        if allowed is not None:
            logits = logits.masked_fill(~allowed.permute(1, 2, 3, 4, 0), -torch.inf)
        return (logits.softmax(-1) @ values).transpose(2, 3)
    if allowed is not None:
        logits = logits.unflatten(1, shape).masked_fill(~allowed, -torch.inf).flatten(1, 3)
    weights = (logits - logits.amax(0, keepdim=True)).exp()
    sums = weights.sum(0).unflatten(0, shape).transpose(2, 3)  # (B, windows, destinations, heads)
    weights = _swap_rows(weights).unflatten(0, shape)  # (B, windows, heads, sources, destinations)
    return (weights.mT @ values).transpose(2, 3) / sums[..., None]


def mixing_weights(
    policy: Tensor | None,
    bank: Tensor,
    grid: Pair,
    window: Pair,
    shift: Pair = (0, 0),
    shift_mask: bool = True,
    activation: str = "softmax",
) -> Tensor:
    """The weights (sources, B, windows, heads, destinations) composed from a bank by policy (B, N, K, heads).

    Without a policy the bank has one entry for each head, B is 1, and windows is 1 unless a mask distinguishes them.
    """
    table = expand_bank(bank, window).transpose(0, 1)  # (sources, K, destinations)
    if policy is None:
        logits = table[:, None, None]
    else:
        rows = to_windows(policy, grid, window, shift).permute(2, 0, 1, 4, 3)  # (sources, B, windows, heads, K)
        if activation in ("l2", "layernorm") and rows.dtype == torch.float16:
            rows = rows.float()  # they divide by the size of the logits, so that gradients may exceed float16
        logits = torch.bmm(rows.flatten(1, 3), table.to(rows.dtype)).unflatten(1, rows.shape[1:4])
    if logits.dtype == torch.float16:  # if the product overflows, the largest weight still dominates
        logits = logits.clamp(-65504, 65504)
    weights = normalise(logits, activation, same_side(grid, window, shift, bank.device) if shift_mask else None)
    return weights if policy is None else weights.to(policy.dtype)


def normalise(logits: Tensor, activation: str, allowed: Tensor | None = None) -> Tensor:
    """Turn logits into weights, for each destination over its sources (dim 0); masked sources get weight 0."""
    if activation == "softmax":
        return (logits if allowed is None else logits.masked_fill(~allowed, -torch.inf)).softmax(0)
    if activation == "sigmoid":
        return _mask(logits.sigmoid(), allowed)
    if activation == "identity":
        return _mask(logits, allowed)
    # norms in float32 or wider: float16 has too little range, and eps underflows
    exact = _mask(logits.to(torch.promote_types(logits.dtype, torch.float32)), allowed)
    if activation == "l2":
        norm = torch.linalg.vector_norm(exact, dim=0, keepdim=True)
        # F.normalize divides zeros by 1e-12, and so multiplies their gradients by 1e12: NaN in float16
        return (exact / norm.where(norm > 0, 1)).to(logits.dtype)
    count = logits.shape[0] if allowed is None else allowed.sum(0)
    exact = _mask(exact - exact.sum(0) / count, allowed)
    return (exact * (exact.square().sum(0) / count + LAYERNORM_EPS).rsqrt()).to(logits.dtype)


def _mask(weights: Tensor, allowed: Tensor | None) -> Tensor:
    return weights if allowed is None else weights * allowed


def expand_bank(bank: Tensor, window: Pair) -> Tensor:
    """The bank as matrices (K, sources, destinations), from a relative table (K, (2h-1) * (2w-1)) if it is one."""
    if bank.ndim == 3:
        return bank
    h, w = window
    y, x = torch.arange(h, device=bank.device), torch.arange(w, device=bank.device)
    dy, dx = y[:, None] - y + h - 1, x[:, None] - x + w - 1
    index = dy[:, None, :, None] * (2 * w - 1) + dx[:, None, :]  # (h, w, h, w): sources, then destinations
    return bank.index_select(1, index.flatten()).unflatten(1, (h * w, h * w))


def same_side(grid: Pair, window: Pair, shift: Pair, device: torch.device) -> Tensor | None:
    """Mask of pairs on the same side of the map's border, (sources, 1, windows, 1, destinations).

    A cyclic shift joins opposite borders of the map in its last windows. None without a shift.
    """
    if shift == (0, 0):
        return None
    sides = []
    for n, size, s in zip(grid, window, shift, strict=True):
        wrapped = (torch.arange(n, device=device) >= n - s).unflatten(0, (n // size, size))
        sides.append(wrapped[:, :, None] == wrapped[:, None, :])  # (windows, source, destination) along one axis
    rows, columns = sides
    same = rows[:, None, :, None, :, None] & columns[None, :, None, :, None, :]
    return same.flatten(4, 5).flatten(2, 3).flatten(0, 1).transpose(0, 1)[:, None, :, None]


def to_windows(x: Tensor, grid: Pair, window: Pair, shift: Pair = (0, 0)) -> Tensor:
    """Tokens (B, H*W, ...) of a grid (H, W), shifted cyclically -> (B, windows, h*w, ...)."""
    (height, width), (h, w) = grid, window
    if dispatch.is_exporting_fixed(*grid):
        return _reorder(x, window_order(grid, window, shift)).unflatten(1, (-1, h * w))
    if dispatch.is_exporting() and x.ndim > 3:  # XNNPACK takes at most six axes
        return to_windows(x.flatten(2), grid, window, shift).unflatten(3, x.shape[2:])
    x = x.unflatten(1, grid)
    if shift != (0, 0):
        x = x.roll((-shift[0], -shift[1]), (1, 2))
    x = x.unflatten(2, (width // w, w)).unflatten(1, (height // h, h))
    return _contiguous(x.transpose(2, 3)).flatten(3, 4).flatten(1, 2)


def from_windows(x: Tensor, grid: Pair, window: Pair, shift: Pair = (0, 0)) -> Tensor:
    """The inverse of `to_windows`: (B, windows, h*w, ...) -> (B, H*W, ...)."""
    if dispatch.is_exporting_fixed(*grid):
        return _reorder(x.flatten(1, 2), np.argsort(window_order(grid, window, shift)))
    if dispatch.is_exporting() and x.ndim > 4:
        return from_windows(x.flatten(3), grid, window, shift).unflatten(2, x.shape[3:])
    (height, width), (h, w) = grid, window
    x = x.unflatten(2, window).unflatten(1, (height // h, width // w)).transpose(2, 3)
    x = _contiguous(x).flatten(3, 4).flatten(1, 2)
    if shift != (0, 0):
        x = x.roll(shift, (1, 2))
    return x.flatten(1, 2)


def _to_sources(x: Tensor, grid: Pair, window: Pair, shift: Pair) -> Tensor:
    """Tokens (B, H*W, ...) -> (h*w, B, windows, ...)."""
    if not dispatch.is_exporting_fixed(*grid):
        return to_windows(x, grid, window, shift).movedim(2, 0)
    size = window[0] * window[1]
    order = window_order(grid, window, shift).reshape(-1, size).T.flatten()
    return _reorder(x, order).unflatten(1, (size, -1)).transpose(0, 1)


def window_order(grid: Pair, window: Pair, shift: Pair) -> np.ndarray:
    """The tokens of a grid, window by window, as indices."""
    (height, width), (h, w) = grid, window
    tokens = np.roll(np.arange(height * width).reshape(grid), (-shift[0], -shift[1]), (0, 1))
    return tokens.reshape(height // h, h, width // w, w).swapaxes(1, 2).flatten()


def _reorder(x: Tensor, order: np.ndarray) -> Tensor:
    """Tokens (B, N, ...) in another order: one operator in graphs of a fixed size, none where the order is the same."""
    if np.array_equal(order, np.arange(len(order))):
        return x
    return x.flatten(2).index_select(1, torch.tensor(order.tolist(), device=x.device)).unflatten(2, x.shape[2:])


def _swap_rows(x: Tensor) -> Tensor:
    """(S, M, n) -> (M, S, n); in a graph of fixed size by indices: OpenVINO is slow at transposing rows of 49 bytes."""
    sources, rows = x.shape[:2]
    if not dispatch.is_exporting_fixed(rows):
        return x.transpose(0, 1)
    order = torch.tensor(np.arange(sources * rows).reshape(sources, rows).T.flatten().tolist(), device=x.device)
    return x.flatten(0, 1).index_select(0, order).unflatten(0, (rows, sources))


def _contiguous(x: Tensor) -> Tensor:
    """A copy in an exported graph, where a view would hold for a single window only; otherwise `flatten` decides."""
    return x.clone(memory_format=torch.contiguous_format) if dispatch.is_exporting() else x


def resize_bank(bank: Tensor, window: Pair, new_window: Pair) -> Tensor:
    """Resize a relative bank (K, (2h-1) * (2w-1)) to another window: bicubic over the table of displacements.

    The authors do not describe this. With the same window nothing changes.
    """
    size = (2 * new_window[0] - 1, 2 * new_window[1] - 1)
    table = bank.unflatten(1, (2 * window[0] - 1, 2 * window[1] - 1))[None]
    exact = table.to(torch.promote_types(bank.dtype, torch.float32))
    return F.interpolate(exact, size, mode="bicubic").to(bank.dtype)[0].flatten(1)
