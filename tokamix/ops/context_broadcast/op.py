"""Public function and operator registration of context broadcasting."""

from typing import Any

import torch
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.context_broadcast import reference
from tokamix.ops.operator import operator

KINDS = ("cb", "gate", "hybrid")
MAX_TOKENS = 65_535 * 128  # programs along the last axis of a grid, times tokens of each (`kernels.BLOCK_N`)


def broadcast_context(
    x: Tensor, scale: Tensor | None = None, kind: str = "cb", class_token: bool = True, backend: str | None = None
) -> Tensor:
    """Context broadcasting: replace every token by its mean with the average token.

    Scratching Visual Transformer's Back with Uniform Attention, arXiv 2210.08457. The supplement's forms, with x_0 the
    first (class) token:

    - `cb`: (x_i + mean) / 2. The class token, if there is one, is part of the mean. With `scale`, CB_S:
      (x_i + scale * mean) / 2.
    - `gate`: x_i * (x_0 + 1).
    - `hybrid`: x_i * x_0 + cb(x_i).

    Args:
        x: tokens (B, N, C), the class token first where there is one.
        scale: (C,) per-channel weight of the mean (CB_S). The paper does not print its form; at 1 this one is CB.
        kind: one of "cb", "gate", "hybrid".
        class_token: whether x begins with a class token, which "gate" and "hybrid" need.
        backend: force "eager" or "triton".
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r} of context broadcasting: choose one of {', '.join(KINDS)}")
    if kind != "cb" and not class_token:
        raise ValueError(f"{kind!r} multiplies by the class token, but class_token is False: use kind='cb'")
    if x.ndim != 3:
        raise ValueError(f"broadcast_context needs tokens of shape (B, N, C), got {tuple(x.shape)}")
    if scale is not None and scale.shape != x.shape[-1:]:
        raise ValueError(f"scale must have one value per channel, ({x.shape[-1]},), got {tuple(scale.shape)}")
    dispatch.check_floating("broadcast_context", x, scale)
    limit, better = _limit(x, kind), None
    if torch.compiler.is_compiling():
        better = "torch.compile fuses it with neighbouring operators"
    if dispatch.choose("broadcast_context", x, backend=backend, limit=limit, better=better) == "triton":
        broadcast = _broadcast_context(x, scale)
    elif kind == "gate":
        return reference.gate(x)
    else:
        broadcast = reference.broadcast_context(x, scale)
    return x * x[:, :1] + broadcast if kind == "hybrid" else broadcast


def _limit(x: Tensor, kind: str) -> str | None:
    if kind == "gate":
        return "a gate has no mean, and no kernel"
    if x.shape[1] > MAX_TOKENS:
        return f"{x.shape[1]:,} tokens are over {MAX_TOKENS:,}, the limit of a launch grid"
    return None


@operator("broadcast_context")
def _broadcast_context(x: Tensor, scale: Tensor | None) -> Tensor:
    if dispatch.why_not(x) is None:
        from tokamix.ops.context_broadcast import kernels

        return kernels.broadcast_context(x, scale)
    return reference.broadcast_context(x, scale).clone(memory_format=torch.contiguous_format)


@_broadcast_context.register_fake
def _(x: Tensor, scale: Tensor | None) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, scale = inputs
    ctx.save_for_backward(x if scale is not None else None, scale)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
    # the linear map from x to its broadcast is symmetric, so the backward pass applies it again
    return _broadcast_context(grad, ctx.saved_tensors[1]), _grad_scale(grad, *ctx.saved_tensors)


def _grad_scale(grad: Tensor, x: Tensor | None, scale: Tensor | None) -> Tensor | None:
    if x is None or scale is None:
        return None
    mean, total = x.float().mean(1), grad.float().sum(1)
    return ((mean * total).sum(0) / 2).to(scale.dtype)


_broadcast_context.register_autograd(_backward, setup_context=_setup_context)
