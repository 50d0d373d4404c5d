"""Super token attention for inference on a CPU: the reference in fewer and larger steps.

The association keeps the order of the cells between sampling and scattering, with the tokens of a cell last: softmax
over nine numbers is slow where they are adjacent, because a vector register holds sixteen.
"""

from collections.abc import Callable
from functools import lru_cache

import torch
from torch import Tensor

from tokamix.ops.super_token import reference
from tokamix.ops.super_token.reference import EPS, Cell


def mix(
    x: Tensor, cell: Cell, n_iter: int, refine: Callable[[Tensor, Cell], Tensor], residual: Tensor | None = None
) -> Tensor:
    """Sample super tokens of a map x (B, H, W, C), refine them and scatter them back to a map; `residual` is added.

    `refine` takes the super tokens (B, p * q, C) and their grid (p, q), and returns as many.
    """
    cells = reference.to_cells(x, cell)  # (B, p, q, h*w, C)
    (_, p, q), flat = cells.shape[:3], cells.reshape(-1, *cells.shape[3:])
    around, inward = _neighbours(p, q, True), _neighbours(p, q, False)
    tokens = flat.mean(1).view(len(x), p * q, -1)
    for _ in range(n_iter):
        association = _associate(flat, _take(tokens, around))
        tokens = _aggregate(flat, association, inward, len(x))
    out = torch.bmm(association.mT, _take(refine(tokens, (p, q)), around))
    if residual is None or (p * cell[0], q * cell[1]) != x.shape[1:3]:
        out = reference.from_cells(out.view(cells.shape), cell, *x.shape[1:3])
        return out if residual is None else out + residual
    out = out.view(-1, p, q, *cell, x.shape[3]).transpose(2, 3)  # the sum reads the cells in the order of the map
    return (residual.reshape(out.shape) + out).view(x.shape)


def _associate(cells: Tensor, near: Tensor) -> Tensor:
    """Weights (n, 9, h*w) of the nine super tokens near (n, 9, C) for each token of the cells (n, h*w, C)."""
    weights = torch.bmm(near * cells.shape[-1] ** -0.5, cells.mT)
    weights = weights.sub_(weights.amax(1, keepdim=True)).exp_()
    return weights.div_(weights.sum(1, keepdim=True))


def _aggregate(cells: Tensor, association: Tensor, inward: Tensor, batch: int) -> Tensor:
    """Weighted means of the tokens (B, p * q, C)."""
    parts = torch.cat([torch.bmm(association, cells), association.sum(2, keepdim=True)], dim=-1)  # (n, 9, C + 1)
    sums = _take(parts.view(batch, -1, parts.shape[-1]), inward).sum(1).view(batch, -1, parts.shape[-1])
    return sums[..., :-1] / (sums[..., -1:] + EPS)


def _take(rows: Tensor, index: Tensor) -> Tensor:
    """Nine of the rows (B, m, C) for each super token -> (B * p * q, 9, C)."""
    return reference.take(rows, index).flatten(0, 1)


@lru_cache(32)
def _neighbours(p: int, q: int, outward: bool) -> Tensor:
    return reference.neighbours(p, q, outward)
