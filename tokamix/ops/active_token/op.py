"""Public functions and operator registration of the active token gather."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.active_token import reference
from tokamix.ops.active_token.reference import GatherPlan
from tokamix.ops.operator import operator

# limits of on-chip memory: tokens of a line, and channels that share an offset
MAX_LINE, MAX_SHARE = 1024, 64


def active_gather(x: Tensor, offset: Tensor, dim: int, backend: str | None = None) -> Tensor:
    """Sample each channel of each token along one axis, at a learned offset from the token.

    Active Token Mixer, arXiv 2203.06108: out[..., c] = x at (own position + offset[..., c // share]) along `dim`, in
    linear interpolation. Outside the map x is zero, so a sample fades out between -1 and 0 and between n - 1 and n. The
    paper prints integer indices; its code interpolates, by a deformable convolution with a 1x1 kernel, which is the
    same function. At an integer position the gradient of the offset is the right-sided derivative.

    Args:
        x: map (B, H, W, C).
        offset: (B, H, W, C / share) in tokens, any finite size; `share` neighbouring channels use the same offset.
        dim: 1 to sample along the height, 2 along the width.
        backend: force "eager" or "triton".

    Returns:
        (B, H, W, C).
    """
    if dim not in (1, 2):
        raise ValueError(f"active_gather needs dim 1 (height) or 2 (width), got {dim}")
    _check(x, offset, axes=1)
    if dispatch.choose("active_gather", x, offset, backend=backend, limit=_limit(x, offset, axes=1)) == "triton":
        return _active_gather(x, offset, [dim])[0]
    return reference.active_gather(x, offset, dim)


def active_gather_axes(x: Tensor, offset: Tensor | GatherPlan, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """`active_gather` along the width and along the height, in one pass over x.

    Args:
        x: map (B, H, W, C).
        offset: (B, H, W, 2 C / share), first the offsets along the width, then those along the height; or the
            result of `plan_gather_axes`.
        backend: force "eager" or "triton".

    Returns:
        Samples along the width and along the height, (B, H, W, C) each.
    """
    if isinstance(offset, GatherPlan):
        dispatch.choose("active_gather_axes", x, backend=backend, limit="a plan is for plain PyTorch")
    plan = plan_gather_axes(x, offset, backend) if isinstance(offset, Tensor) else offset
    if isinstance(plan, GatherPlan) and dispatch.is_exporting_fixed(*x.shape):
        return reference.gather_exported(x, plan)
    if isinstance(plan, GatherPlan):
        return reference.active_gather_axes(x, plan)
    along_width, along_height = _active_gather(x, plan, [2, 1])
    return along_width, along_height


def plan_gather_axes(x: Tensor, offset: Tensor, backend: str | None = None) -> Tensor | GatherPlan:
    """Precompute what calls of `active_gather_axes` with the same offset share, for maps of the shape of x.

    The kernels compute it faster than they could read it, so where they run, the offset itself is returned.
    """
    _check(x, offset, axes=2)
    limit = _limit(x, offset, axes=2)
    if dispatch.choose("active_gather_axes", x, offset, backend=backend, limit=limit) == "triton":
        return offset
    return (reference.plan_exported if dispatch.is_exporting_fixed(*x.shape) else reference.plan_axes)(x, offset)


def active_gather_joint(x: Tensor, offset: Tensor) -> Tensor:
    """Sample along both axes at once, in bilinear interpolation: the paper's ablation without decoupled axes.

    Args:
        x: map (B, H, W, C).
        offset: (B, H, W, 2 C / share), first the offsets along the width, then those along the height.

    Returns:
        (B, H, W, C).
    """
    _check(x, offset, axes=2)
    return reference.active_gather_joint(x, offset)


def _check(x: Tensor, offset: Tensor, axes: int) -> None:
    if x.ndim != 4 or offset.ndim != 4 or x.shape[:3] != offset.shape[:3]:
        raise ValueError(
            "the active token gather needs x (B, H, W, C) and offsets (B, H, W, ...) of the same tokens, got "
            f"{tuple(x.shape)} and {tuple(offset.shape)}"
        )
    channels, given = x.shape[3], offset.shape[3]
    if 0 in (channels, given) or given % axes or channels % (given // axes):
        raise ValueError(
            f"{channels} channels cannot share {given} offsets over {axes} {'axis' if axes == 1 else 'axes'}: pass "
            f"{axes} * C / share of them, with a share that divides {channels}"
        )
    dispatch.check_floating("the active token gather", x, offset)


def _limit(x: Tensor, offset: Tensor, axes: int) -> str | None:
    """Why the kernels do not support this call; None if they do."""
    side, share = max(x.shape[1:3]), x.shape[3] * axes // offset.shape[3]
    if side > MAX_LINE:
        return f"a side of {side} tokens is over {MAX_LINE}"
    if share > MAX_SHARE:
        return f"{share} channels to an offset are over {MAX_SHARE}"
    return None


@operator("active_gather")
def _active_gather(x: Tensor, offset: Tensor, dims: Sequence[int]) -> list[Tensor]:
    if dispatch.why_not(x, offset) is None and _limit(x, offset, len(dims)) is None:
        from tokamix.ops.active_token import kernels

        return kernels.forward(x, offset, dims)
    parts = zip(offset.chunk(len(dims), dim=-1), dims, strict=True)
    return [reference.active_gather(x, part, dim) for part, dim in parts]


@_active_gather.register_fake
def _(x: Tensor, offset: Tensor, dims: Sequence[int]) -> list[Tensor]:
    return [x.new_empty(x.shape) for _ in dims]


@operator("active_gather_backward")
def _active_gather_backward(
    grads: Sequence[Tensor], x: Tensor, offset: Tensor, dims: Sequence[int]
) -> tuple[Tensor, Tensor]:
    if dispatch.why_not(x, offset) is None and _limit(x, offset, len(dims)) is None:
        from tokamix.ops.active_token import kernels

        return kernels.backward(grads, x, offset, dims)
    parts = zip(grads, offset.chunk(len(dims), dim=-1), dims, strict=True)
    grads_x, grads_offset = zip(*(reference.active_gather_backward(g, x, o, d) for g, o, d in parts), strict=True)
    return torch.stack(grads_x).sum(0), torch.cat(grads_offset, dim=-1)


@_active_gather_backward.register_fake
def _(grads: Sequence[Tensor], x: Tensor, offset: Tensor, dims: Sequence[int]) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), offset.new_empty(offset.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    x, offset, ctx.dims = inputs
    ctx.save_for_backward(x, offset)


def _differentiate(ctx: Any, grads: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
    return *_active_gather_backward(grads, *ctx.saved_tensors, ctx.dims), None


_active_gather.register_autograd(_differentiate, setup_context=_setup_context)
