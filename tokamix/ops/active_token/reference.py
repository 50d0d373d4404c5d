"""The active token gather in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

PAD = 2


def active_gather(x: Tensor, offset: Tensor, dim: int) -> Tensor:
    """Sample x (B, H, W, C) along `dim`, offset (B, H, W, G) away from each token; see `tokamix.ops.active_gather`."""
    return _interpolate(_pad(x), {dim: offset})


def active_gather_axes(x: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """Sample x along its width and along its height; see `tokamix.ops.active_gather_axes`."""
    padded, (along_width, along_height) = _pad(x), offset.chunk(2, dim=-1)
    return _interpolate(padded, {2: along_width}), _interpolate(padded, {1: along_height})


def active_gather_joint(x: Tensor, offset: Tensor) -> Tensor:
    """Sample x along both axes at once; see `tokamix.ops.active_gather_joint`."""
    along_width, along_height = offset.chunk(2, dim=-1)
    return _interpolate(_pad(x), {1: along_height, 2: along_width})


def active_gather_backward(grad: Tensor, x: Tensor, offset: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """The gradients of x and offset in `active_gather`, where autograd cannot be asked (inside a custom operator)."""
    padded = _pad(x)
    index, ((stride, fraction),) = _plan(padded, {dim: offset})
    rows = padded.reshape(-1, x.shape[-1] // offset.shape[-1])
    left, right = (rows.index_select(0, i.flatten()).to(fraction.dtype).view(x.shape) for i in (index, index + stride))
    grad = grad.to(fraction.dtype)
    grad_rows = torch.zeros_like(rows, dtype=fraction.dtype)
    grad_rows.index_add_(0, index.flatten(), (grad * (1 - fraction)).view(-1, rows.shape[1]))
    grad_rows.index_add_(0, (index + stride).flatten(), (grad * fraction).view(-1, rows.shape[1]))
    grad_x = grad_rows.view(padded.shape)[:, PAD:-PAD, PAD:-PAD]
    grad_offset = (grad * (right - left)).unflatten(-1, (-1, rows.shape[1])).sum(-1)
    return grad_x.to(x.dtype), grad_offset.to(offset.dtype)


def _pad(x: Tensor) -> Tensor:
    """Zeros around the map, so that a clamped position and its right neighbour can be read without a mask."""
    return F.pad(x, (0, 0, PAD, PAD, PAD, PAD))


def _interpolate(padded: Tensor, offsets: dict[int, Tensor]) -> Tensor:
    """Linear interpolation of a padded map along each of the axes in `offsets`.

    Channels that share an offset are neighbours in memory, so a sample is a row of C / G numbers: indices and fractions
    are computed once for each row, and only the rows themselves are as wide as the map.
    """
    index, steps = _plan(padded, offsets)
    rows = padded.reshape(-1, padded.shape[-1] // index.shape[-1])

    def sample(index: Tensor, steps: list[tuple[int, Tensor]]) -> Tensor:
        if not steps:
            return rows.index_select(0, index.flatten()).view(*index.shape[:3], padded.shape[-1])
        (stride, fraction), *rest = steps
        left, right = sample(index, rest), sample(index + stride, rest)
        return torch.lerp(left.to(fraction.dtype), right.to(fraction.dtype), fraction)

    return sample(index, steps).to(padded.dtype)


def _plan(padded: Tensor, offsets: dict[int, Tensor]) -> tuple[Tensor, list[tuple[int, Tensor]]]:
    """Where to read in the padded map: the index (B, H, W, G) of each left-most row; and for each axis the distance to
    the row on the right and how far (B, H, W, C) to go towards it.
    """
    (batch, height, width, groups), channels = next(iter(offsets.values())).shape, padded.shape[-1]
    device = padded.device
    strides = {1: padded.shape[2] * groups, 2: groups}
    sizes = {1: height, 2: width}
    own = {
        1: torch.arange(height, device=device).view(-1, 1, 1),
        2: torch.arange(width, device=device).view(-1, 1),
    }
    index = torch.arange(batch, device=device).view(-1, 1, 1, 1) * (padded.shape[1] * strides[1])
    index = index + (torch.arange(groups, device=device) + PAD * (strides[1] + strides[2]))
    for dim in [d for d in (1, 2) if d not in offsets]:
        index = index + own[dim] * strides[dim]

    steps = []
    for dim, offset in offsets.items():
        exact = offset.to(torch.promote_types(padded.dtype, torch.promote_types(offset.dtype, torch.float32)))
        # beyond -1 all is zero, but the gradient at -1 is that of the right side, x[0], and a clamp may stop it
        position = (exact + own[dim]).clamp(-PAD, sizes[dim])
        left = position.floor()
        whole = left.long().clamp(-PAD, sizes[dim])  # again: NaN passes the first clamp
        index = torch.add(index, whole, alpha=strides[dim])
        fraction = (position - left).unsqueeze(-1).expand(*offset.shape, channels // groups).flatten(-2)
        steps.append((strides[dim], fraction))
    return index, steps
