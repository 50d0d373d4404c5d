"""The active token gather in plain PyTorch."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

PAD = 2
WIDE = {8: torch.int64, 16: torch.complex128}  # integer types by their size in bytes


class GatherPlan(NamedTuple):
    """Indices into a padded map and interpolation weights: everything that depends on the offsets only.

    Channels that share an offset are neighbours in memory, so a sample is a row of C / G numbers. Each fraction belongs
    to one leading axis of `rows`, which holds the left and the right rows.
    """

    rows: Tensor  # (2, ..., B, H, W, G)
    fractions: list[Tensor]  # (..., B, H, W, C) each, the weight of the right row


def active_gather(x: Tensor, offset: Tensor, dim: int) -> Tensor:
    """Sample x (B, H, W, C) along `dim`, offset (B, H, W, G) away from each token; see `tokamix.ops.active_gather`."""
    return _interpolate(x, _plan(x, {dim: offset}))


def plan_axes(x: Tensor, offset: Tensor) -> GatherPlan:
    """The part of `active_gather_axes` that does not depend on the values of x."""
    plans = [_plan(x, {dim: part}) for dim, part in zip((2, 1), offset.chunk(2, dim=-1), strict=True)]
    return GatherPlan(torch.stack([p.rows for p in plans], 1), [torch.stack([p.fractions[0] for p in plans])])


def active_gather_axes(x: Tensor, plan: GatherPlan) -> tuple[Tensor, Tensor]:
    """Sample x along its width and along its height; see `tokamix.ops.active_gather_axes`."""
    along_width, along_height = _interpolate(x, plan)
    return along_width, along_height


def plan_exported(x: Tensor, offset: Tensor) -> GatherPlan:
    """`plan_axes` in few operators, for exported graphs of fixed size: both axes at once, and constants for the rest.

    `rows` holds the left rows only, (2, B, H, W, G), `fractions` one tensor (2, B, H, W, G, C / G).
    """
    (batch, height, width, channels), groups = x.shape, offset.shape[-1] // 2
    strides = _strides(width, groups, x.device)
    sides = (torch.arange(n, device=x.device) for n in (batch, height, width, groups))
    b, y, column, g = torch.meshgrid(*sides, indexing="ij")
    own = torch.stack([column, y])
    base = (b * (height + 2 * PAD) + y + PAD) * strides[1] + (column + PAD) * groups + g
    base = base - own * strides  # the own position is in the index already
    exact = offset.to(torch.promote_types(offset.dtype, torch.float32))  # bfloat16 rounds positions to quarters
    position = exact.unflatten(3, (2, groups)).movedim(3, 0) + own.to(exact)
    if height == width:
        position = position.clamp(-PAD, height)
    else:
        limit = torch.tensor([width, height], dtype=exact.dtype, device=x.device)
        position = torch.minimum(position, limit.view(2, 1, 1, 1, 1)).clamp_min(-PAD)
    left = position.floor()
    index = base + left.long().clamp(-PAD, max(height, width)) * strides  # clamped again because of NaN
    fraction = (position - left).unsqueeze(-1) * exact.new_ones(channels // groups)  # runtimes are slow at Expand
    return GatherPlan(index, [fraction])


def gather_exported(x: Tensor, plan: GatherPlan) -> tuple[Tensor, Tensor]:
    """`active_gather_axes` with a plan of `plan_exported`."""
    (fraction,), groups = plan.fractions, plan.rows.shape[-1]
    rows = _pad(x).reshape(-1, x.shape[-1] // groups)
    right = plan.rows + _strides(x.shape[2], groups, x.device)
    left, right = (F.embedding(index, rows) for index in (plan.rows, right))  # (2, B, H, W, G, C / G)
    # split as the rows of a linear layer, which reads them next
    along_width, along_height = (left + fraction * (right - left)).to(x.dtype).view(-1, x.shape[-1]).chunk(2)
    return along_width.view(x.shape), along_height.view(x.shape)


def _strides(width: int, groups: int, device: torch.device) -> Tensor:
    """The distance of a row's right neighbour along the width, then along the height, (2, 1, 1, 1, 1)."""
    return torch.tensor([groups, (width + 2 * PAD) * groups], device=device).view(2, 1, 1, 1, 1)


def active_gather_joint(x: Tensor, offset: Tensor) -> Tensor:
    """Sample x along both axes at once; see `tokamix.ops.active_gather_joint`."""
    along_width, along_height = offset.chunk(2, dim=-1)
    return _interpolate(x, _plan(x, {1: along_height, 2: along_width}))


def active_gather_backward(grad: Tensor, x: Tensor, offset: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The gradients of x and offset in `active_gather`, for use inside a custom operator, where autograd is off."""
    index, (fraction,) = _plan(x, {dim: offset})
    padded = _pad(x)
    rows = padded.reshape(-1, x.shape[-1] // offset.shape[-1])
    left, right = rows.index_select(0, index.flatten()).to(fraction.dtype).view(2, *x.shape)
    grad = grad.to(fraction.dtype)
    grad_rows = torch.zeros_like(rows, dtype=fraction.dtype)
    grad_rows.index_add_(0, index[0].flatten(), (grad * (1 - fraction)).view(-1, rows.shape[1]))
    grad_rows.index_add_(0, index[1].flatten(), (grad * fraction).view(-1, rows.shape[1]))
    grad_x = grad_rows.view(padded.shape)[:, PAD:-PAD, PAD:-PAD]
    grad_offset = (grad * (right - left)).unflatten(-1, (-1, rows.shape[1])).sum(-1)
    return grad_x.to(x.dtype), grad_offset.to(offset.dtype)


def _pad(x: Tensor) -> Tensor:
    """Pad the map with zeros, so that a clamped position and its right neighbour can be read without a mask."""
    return F.pad(x, (0, 0, PAD, PAD, PAD, PAD))


def _interpolate(x: Tensor, plan: GatherPlan) -> Tensor:
    """Linear interpolation between the rows of x that a plan selects."""
    index, fractions = plan
    rows = _pad(x).reshape(-1, x.shape[-1] // index.shape[-1])
    # not one view: torch.export cannot prove that W * G rows divide into (W, G) for every W
    seen = _read(rows, index.flatten()).view(-1, x.shape[-1]).view(*index.shape[:-1], x.shape[-1])
    for fraction in fractions:
        left, right = seen.to(fraction.dtype)
        seen = torch.lerp(left, right, fraction)
    return seen.to(x.dtype)


def _read(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index]; without gradients, a CPU reads a short row as one integer, which takes half the time."""
    wide = WIDE.get(rows.shape[1] * rows.element_size())
    plain = torch.compiler.is_compiling() or not torch.is_inference_mode_enabled() or rows.device.type != "cpu"
    if wide is None or plain:
        return rows.index_select(0, index)
    return rows.view(wide).flatten().index_select(0, index).view(rows.dtype)


def _plan(x: Tensor, offsets: dict[int, Tensor]) -> GatherPlan:
    """The plan for samples along each of the axes in `offsets`, (B, H, W, G) each."""
    (batch, height, width, channels), groups = x.shape, next(iter(offsets.values())).shape[-1]
    strides = {1: (width + 2 * PAD) * groups, 2: groups}
    sizes = {1: height, 2: width}
    rows = batch * (height + 2 * PAD) * strides[1]
    # int32 halves the traffic and converts fast from floats; a graph for all sizes must not compare the map's size
    small = not torch.compiler.is_compiling() and rows < 2**31
    kind = torch.int32 if small else torch.int64

    def count(size: int, *shape: int) -> Tensor:
        return torch.arange(size, device=x.device, dtype=kind).view(shape)

    own = {1: count(height, -1, 1, 1), 2: count(width, -1, 1)}
    index = count(batch, -1, 1, 1, 1) * ((height + 2 * PAD) * strides[1]) + count(groups, -1)
    index = index + PAD * (strides[1] + strides[2])
    for dim in (1, 2):
        index = torch.stack([index, index + strides[dim]]) if dim in offsets else index + own[dim] * strides[dim]

    fractions = []
    # the axis stacked last becomes the first; Dynamo of torch 2.11 sorts integers, but no pairs
    for dim in sorted(offsets, reverse=True):
        offset = offsets[dim]
        exact = offset.to(torch.promote_types(x.dtype, torch.promote_types(offset.dtype, torch.float32)))
        # values below -1 are zero, but the gradient at -1 is the right-sided one, x[0], which a clamp would stop
        position = (exact + own[dim]).clamp(-PAD, sizes[dim])
        left = position.floor()
        whole = left.to(kind).clamp(-PAD, sizes[dim])  # clamp again: NaN passes the first one
        index = torch.add(index, whole, alpha=strides[dim])
        fractions.append((position - left).unsqueeze(-1).expand(*offset.shape, channels // groups).flatten(-2))
    return GatherPlan(index, fractions)
