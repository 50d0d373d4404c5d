"""Super token sampling and scattering in plain PyTorch."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.precision import no_autocast

EPS = 1e-12

Cell = tuple[int, int]


def sample(x: Tensor, cell: Cell, n_iter: int) -> tuple[Tensor, Tensor, Tensor]:
    """Super tokens, association and weight sums (B, p, q, 1) of x; see `tokamix.ops.super_token_sample`."""
    # logits and sums of tokens overflow float16, so half precision is sampled in float32, also under autocast
    with no_autocast(x):
        cells = to_cells(x, cell).to(torch.promote_types(x.dtype, torch.float32))
        fixed = cells.detach()  # only the last aggregation is differentiated
        association = associate(fixed, fixed.mean(3))
        for _ in range(n_iter - 1):
            association = associate(fixed, aggregate(fixed, association)[0])
        tokens, weight = aggregate(cells, association)
    return tokens.to(x.dtype), from_cells(association, cell, *x.shape[1:3]).to(x.dtype), weight


def sample_backward(grad: Tensor, association: Tensor, weight: Tensor, cell: Cell) -> Tensor:
    """The gradient of `sample` with respect to x, given that of the super tokens."""
    return scatter(grad / weight, association.to(weight.dtype), cell).to(grad.dtype)


def associate(cells: Tensor, tokens: Tensor) -> Tensor:
    """Each token's weights (B, p, q, h*w, 9) for the super tokens around its cell."""
    near = around(tokens) * cells.shape[-1] ** -0.5
    if dispatch.is_exporting_to("openvino"):  # its softmax over a last axis of 9 is 15 times as slow as over this one
        return (near @ cells.mT).softmax(-2).mT
    return (cells @ near.mT).softmax(-1)


def aggregate(cells: Tensor, association: Tensor) -> tuple[Tensor, Tensor]:
    """The weighted means of the tokens (B, p, q, C), and the sums (B, p, q, 1) of their weights."""
    shares = association.mT
    parts = torch.cat([shares @ cells, shares.sum(-1, keepdim=True)], dim=-1)
    tokens, weight = to_super_tokens(parts).split([cells.shape[-1], 1], dim=-1)
    weight = weight + EPS
    return tokens / weight, weight


def scatter(tokens: Tensor, association: Tensor, cell: Cell) -> Tensor:
    """Map super tokens back to the map; see `tokamix.ops.super_token_scatter`."""
    return from_cells(to_cells(association, cell) @ around(tokens), cell, *association.shape[1:3])


def scatter_backward(grad: Tensor, association: Tensor, cell: Cell) -> Tensor:
    """The gradient of `scatter` with respect to the super tokens."""
    return to_super_tokens(to_cells(association, cell).mT @ to_cells(grad, cell))


def grid_of(shape: Sequence[int], cell: Cell) -> Cell:
    """The number of cells (p, q) that cover a map of shape (B, H, W, C)."""
    return (shape[1] + cell[0] - 1) // cell[0], (shape[2] + cell[1] - 1) // cell[1]


def to_cells(x: Tensor, cell: Cell) -> Tensor:
    """Cut x (B, H, W, C) into cells (B, p, q, h*w, C), with zeros in incomplete cells at the right and bottom."""
    p, q = grid_of(x.shape, cell)
    pad_h, pad_w = p * cell[0] - x.shape[1], q * cell[1] - x.shape[2]
    fixed = dispatch.is_exporting_fixed(pad_h, pad_w)
    # always while compiling: a branch would specialise the graph to divisible sizes, and empty padding is free there
    if (torch.compiler.is_compiling() and not fixed) or pad_h or pad_w:
        x = F.pad(x, (0, 0, 0, pad_w, 0, pad_h))
    if (
        dispatch.is_exporting() and not fixed
    ):  # unfold: torch.export cannot prove that 8 * q divides into (q, 8) for every q
        return x.unfold(1, cell[0], cell[0]).unfold(2, cell[1], cell[1]).permute(0, 1, 2, 4, 5, 3).flatten(3, 4)
    return x.unflatten(2, (q, cell[1])).unflatten(1, (p, cell[0])).transpose(2, 3).flatten(3, 4)


def from_cells(cells: Tensor, cell: Cell, height: int, width: int) -> Tensor:
    """Join cells (B, p, q, h*w, C) to a map and crop it to (B, H, W, C)."""
    x = cells.unflatten(3, cell).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    if dispatch.is_exporting_fixed(height, width) and tuple(x.shape[1:3]) == (height, width):
        return x
    if torch.compiler.is_compiling():  # a slice is contiguous at some sizes only, which specialises graphs
        return F.pad(x, (0, 0, 0, width - x.shape[2], 0, height - x.shape[1]))
    return x[:, :height, :width]


def around(tokens: Tensor) -> Tensor:
    """The 3x3 super tokens around each cell: (B, p, q, C) -> (B, p, q, 9, C), zero vectors beyond the border."""
    if dispatch.is_exporting_fixed(*tokens.shape[1:3]):
        index = neighbours(tokens.shape[1], tokens.shape[2], outward=True, device=tokens.device)
        return take(tokens.flatten(1, 2), index).unflatten(1, tokens.shape[1:3])
    for _ in range(2):  # rows, then columns: the axis is the third last both times
        n, padded = tokens.shape[-3], F.pad(tokens, (0, 0, 0, 0, 1, 1))
        tokens = torch.stack([padded.narrow(-3, i, n) for i in range(3)], dim=-2)
    return tokens.flatten(3, 4)


def to_super_tokens(parts: Tensor) -> Tensor:
    """Sum the cells' contributions to super tokens: (B, p, q, 9, C) -> (B, p, q, C); the adjoint of `around`."""
    if dispatch.is_exporting_fixed(*parts.shape[1:3]):
        index = neighbours(parts.shape[1], parts.shape[2], outward=False, device=parts.device)
        return take(parts.flatten(1, 3), index).sum(2).unflatten(1, parts.shape[1:3])
    parts = parts.unflatten(3, (3, 3))
    for _ in range(2):  # columns, then rows
        n, padded = parts.shape[-4], F.pad(parts, (0, 0, 0, 0, 0, 0, 1, 1))
        first, second, third = (padded.narrow(-4, 2 - i, n).select(-2, i) for i in range(3))
        parts = first + second + third
    return parts


def take(rows: Tensor, index: Tensor) -> Tensor:
    """Rows (B, n, C) at indices (m * 9), where n is a row of zeros -> (B, m, 9, C): one gather in an exported graph."""
    return F.pad(rows, (0, 0, 0, 1)).index_select(1, index).unflatten(1, (-1, 9))


def neighbours(p: int, q: int, outward: bool, device: torch.device | None = None) -> Tensor:
    """For each of p x q cells, where its 3x3 neighbours (outward) or their parts for it are; the last index is none."""
    cells, last = [(y, x) for y in range(p) for x in range(q)], p * q if outward else 9 * p * q
    steps = [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1)]
    index = []
    for y, x in cells:
        for k, (dy, dx) in enumerate(steps):
            inside = 0 <= y + dy < p and 0 <= x + dx < q
            cell = (y + dy) * q + x + dx
            index.append((cell if outward else 9 * cell + 8 - k) if inside else last)
    return torch.tensor(index, device=device)
