"""The active token gather in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def active_gather(x: Tensor, offset: Tensor, dim: int) -> Tensor:
    """Sample x (B, H, W, C) along `dim`, offset (B, H, W, G) away from each token; see `tokamix.ops.active_gather`."""
    return _interpolate(x, {dim: offset})


def active_gather_axes(x: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Sample x along its width and along its height; see `tokamix.ops.active_gather_axes`."""
    along_width, along_height = offset.chunk(2, dim=-1)
    return active_gather(x, along_width, 2), active_gather(x, along_height, 1)


def active_gather_joint(x: Tensor, offset: Tensor) -> Tensor:
    """Sample x along both axes at once; see `tokamix.ops.active_gather_joint`."""
    along_width, along_height = offset.chunk(2, dim=-1)
    return _interpolate(x, {1: along_height, 2: along_width})


def active_gather_backward(grad: Tensor, x: Tensor, offset: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The gradients of x and offset in `active_gather`, where autograd cannot be asked (inside a custom operator)."""
    padded, index, ((stride, fraction),) = _plan(x, {dim: offset})
    rows = padded.reshape(-1, x.shape[-1] // offset.shape[-1])
    left, right = (rows.index_select(0, i.flatten()).to(fraction.dtype).view(x.shape) for i in (index, index + stride))
    grad = grad.to(fraction.dtype)
    grad_rows = torch.zeros_like(rows, dtype=fraction.dtype)
    grad_rows.index_add_(0, index.flatten(), (grad * (1 - fraction)).view(-1, rows.shape[1]))
    grad_rows.index_add_(0, (index + stride).flatten(), (grad * fraction).view(-1, rows.shape[1]))
    grad_x = grad_rows.view(padded.shape).narrow(dim, 2, x.shape[dim])
    grad_offset = (grad * (right - left)).unflatten(-1, (-1, rows.shape[1])).sum(-1)
    return grad_x.to(x.dtype), grad_offset.to(offset.dtype)


def _interpolate(x: Tensor, offsets: dict[int, Tensor]) -> Tensor:
    """Linear interpolation of x (B, H, W, C) along each of the axes in `offsets`, zero outside.

    Channels that share an offset are neighbours in memory, so a sample is a row of C / G numbers: indices and fractions
    are computed once for each row, and only the rows themselves are as wide as x.
    """
    padded, index, steps = _plan(x, offsets)
    rows = padded.reshape(-1, x.shape[-1] // index.shape[-1])

    def sample(index: Tensor, steps: list[tuple[int, Tensor]]) -> Tensor:
        if not steps:
            return rows.index_select(0, index.flatten()).view(x.shape)
        (stride, fraction), *rest = steps
        left, right = sample(index, rest), sample(index + stride, rest)
        return torch.lerp(left.to(fraction.dtype), right.to(fraction.dtype), fraction)

    return sample(index, steps).to(x.dtype)


def _plan(x: Tensor, offsets: dict[int, Tensor]) -> tuple[Tensor, Tensor, list[tuple[int, Tensor]]]:
    """Where to read: x padded with zeros; the index (B, H, W, G) of each left-most row in it; and for each axis the
    distance to the row on the right and how far (B, H, W, C) to go towards it.
    """
    (batch, height, width, channels), groups = x.shape, next(iter(offsets.values())).shape[-1]
    # zeros at -2, -1, n and n + 1 let a clamped position and its right neighbour be read without a mask; the clamp is
    # at -2 because the gradient at -1 is that of the right side, x[0], and clamps may stop gradients at their ends
    pad = {dim: 2 if dim in offsets else 0 for dim in (1, 2)}
    padded = F.pad(x, (0, 0, pad[2], pad[2], pad[1], pad[1]))
    strides = {1: padded.shape[2] * groups, 2: groups}
    own = {
        1: torch.arange(height, device=x.device).view(-1, 1, 1),
        2: torch.arange(width, device=x.device).view(-1, 1),
    }
    image = torch.arange(batch, device=x.device).view(-1, 1, 1, 1) * (padded.shape[1] * strides[1])
    index = image + torch.arange(groups, device=x.device)
    for dim in (1, 2):
        index = index + (pad[dim] if dim in offsets else own[dim]) * strides[dim]

    steps = []
    for dim, offset in offsets.items():
        size = x.shape[dim]
        exact = offset.to(torch.promote_types(x.dtype, torch.promote_types(offset.dtype, torch.float32)))
        position = (exact + own[dim]).clamp(-2, size)
        left = position.floor()
        index = torch.add(index, left.long().clamp(-2, size), alpha=strides[dim])  # again: NaN passes the first clamp
        fraction = (position - left).unsqueeze(-1).expand(*offset.shape, channels // groups).reshape(x.shape)
        steps.append((strides[dim], fraction))
    return padded, index, steps
