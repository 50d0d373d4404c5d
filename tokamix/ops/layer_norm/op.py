"""Public function and operator registration of LayerNorm."""

from typing import Any

import torch
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.layer_norm import reference
from tokamix.ops.operator import operator
from tokamix.ops.precision import autocast_dtype

MAX_CHANNELS = 8192  # a program holds whole rows


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5, backend: str | None = None) -> Tensor:
    """LayerNorm over the last axis, in front of a matrix product: it returns autocast's dtype.

    PyTorch's casts its input to float32, returns float32 and leaves the cast to the next layer: three kernels where
    this one has one.

    Args:
        x: (..., C).
        weight: (C,) scale of the channels.
        bias: (C,) shift of the channels.
        eps: added to the variance.
        backend: force "eager" or "triton".

    Returns:
        The shape of x; under autocast its dtype, otherwise that of x.
    """
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter.shape != x.shape[-1:]:
            shape = tuple(parameter.shape)
            raise ValueError(f"{name} must have one value per channel, ({x.shape[-1]},), got {shape}")
    dispatch.check_floating("layer_norm", x, weight, bias)
    limit = better = None
    if x.shape[-1] > MAX_CHANNELS:
        limit = f"{x.shape[-1]} channels are over {MAX_CHANNELS}"
    elif weight.dtype != bias.dtype:
        limit = f"the weight is {weight.dtype}, the bias {bias.dtype}"
    elif torch.compiler.is_compiling():
        better = "torch.compile fuses it with neighbouring operators"
    if dispatch.choose("layer_norm", x, weight, bias, backend=backend, limit=limit, better=better) == "triton":
        return _layer_norm(x, weight, bias, eps, autocast_dtype(x))
    return reference.layer_norm(x, weight, bias, eps)


@operator("layer_norm")
def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    if dispatch.why_not(x) is None:
        from tokamix.ops.layer_norm import kernels

        return kernels.layer_norm(x, weight, bias, eps, dtype)
    return reference.layer_norm_in(dtype, x, weight, bias, eps).contiguous()


@_layer_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


@operator("layer_norm_backward")
def _layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    if dispatch.why_not(x) is None:
        from tokamix.ops.layer_norm import kernels

        return kernels.layer_norm_backward(grad, x, weight, eps)
    grad_x, grad_weight, grad_bias = reference.layer_norm_backward(grad, x, weight, eps)
    return grad_x.contiguous(), grad_weight, grad_bias


@_layer_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, _, ctx.eps, _ = inputs
    ctx.save_for_backward(x, weight)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
    return (*_layer_norm_backward(grad, *ctx.saved_tensors, ctx.eps), None, None)


_layer_norm.register_autograd(_differentiate, setup_context=_keep_inputs)
