"""Public function and operator registration of the depthwise convolution."""

from typing import Any

import torch
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.depthwise_conv import reference
from tokamix.ops.operator import operator
from tokamix.ops.precision import autocast_enabled, to_autocast_dtype


def depthwise_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: bool = False,
    gelu: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Convolve each channel of a zero-padded map with its own kernel: y = conv(z), or z + conv(z).

    Args:
        x: map (B, H, W, C).
        weight: kernels (C, 1, k, k), k odd, in the layout of torch.nn.Conv2d.
        bias: (C,).
        residual: whether z is added to its convolution.
        gelu: z is GELU(x) instead of x. Half precision kernels compute it to within 3e-5, below the resolution of half
            precision.
        backend: "eager", "triton" or None; see `tokamix.ops.dispatch`.
    """
    if x.ndim != 4:
        raise ValueError(f"depthwise_conv needs a map of shape (B, H, W, C), got {tuple(x.shape)}")
    if weight.ndim != 4 or weight.shape[:2] != (x.shape[3], 1) or not weight.shape[2] % 2 or not weight.shape[3] % 2:
        raise ValueError(f"{x.shape[3]} channels need kernels ({x.shape[3]}, 1, odd, odd), got {tuple(weight.shape)}")
    if bias is not None and bias.shape != x.shape[3:]:
        raise ValueError(f"{x.shape[3]} channels need a bias ({x.shape[3]},), got {tuple(bias.shape)}")
    dispatch.check_floating("depthwise_conv", x, weight, bias)
    if not torch.compiler.is_compiling() and 0 in x.shape[1:]:
        raise ValueError(f"depthwise_conv needs a map of at least 1x1 with channels, got {tuple(x.shape)}")
    parameters = {t.dtype for t in (weight, bias) if t is not None}
    if not residual:  # the residual stream keeps its precision, as in plain PyTorch
        x = to_autocast_dtype(x)
    limit = None if weight.shape[2:] == (3, 3) else f"kernels are {weight.shape[2]}x{weight.shape[3]}, not 3x3"
    chosen = dispatch.choose("depthwise_conv", x, weight, backend=backend, limit=limit)
    # the kernels take float32 parameters with maps of any dtype
    allowed = [{x.dtype}] if chosen == "eager" else [{x.dtype}, {torch.float32}]
    if parameters not in allowed and not autocast_enabled(x):
        found = ", ".join(map(str, {x.dtype} | parameters))
        raise ValueError(f"x, weight and bias must share one dtype, got {found}; cast them first")
    if chosen == "eager":
        return reference.depthwise_conv(x, weight, bias, residual, gelu)
    return _depthwise_conv(x, weight, bias, residual, gelu)


@operator("depthwise_conv")
def _depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None, residual: bool, gelu: bool) -> Tensor:
    if dispatch.why_not(x, weight) is None:
        from tokamix.ops.depthwise_conv import kernels

        return kernels.forward(x, weight, bias, residual, gelu)
    return reference.depthwise_conv(x, weight, bias, residual, gelu).contiguous()


@operator("depthwise_conv_backward")
def _depthwise_conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, residual: bool, gelu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    if dispatch.why_not(x, weight) is None:
        from tokamix.ops.depthwise_conv import kernels

        return kernels.backward(grad, x, weight, residual, gelu)
    grad_x, grad_weight, grad_bias = reference.depthwise_conv_backward(grad, x, weight, residual, gelu)
    return grad_x.contiguous(), grad_weight.contiguous(), grad_bias


@_depthwise_conv.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, residual: bool, gelu: bool) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@_depthwise_conv_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, residual: bool, gelu: bool) -> tuple[Tensor, Tensor, Tensor]:
    grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
    return grad_x, torch.empty_like(weight, memory_format=torch.contiguous_format), weight.new_empty(weight.shape[0])


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.residual, ctx.gelu = inputs
    ctx.biased = bias is not None
    ctx.save_for_backward(x, weight)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None, None]:
    grad_x, grad_weight, grad_bias = _depthwise_conv_backward(grad, *ctx.saved_tensors, ctx.residual, ctx.gelu)
    return grad_x, grad_weight, grad_bias if ctx.biased else None, None, None


_depthwise_conv.register_autograd(_backward, setup_context=_setup_context)
