"""Linear layers in faster kernels: oneDNN's on a CPU, and for inference with GELU as a part of them."""

from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from tokamix.layers.activation import GELUS, HALF
from tokamix.layers.bare import is_bare, is_hooked
from tokamix.ops import cpu, dispatch


def apply_linear(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x); on a CPU with oneDNN where it is faster than PyTorch's own product, see `tokamix.ops.cpu`.

    A function, not a subclass of nn.Linear: adapters and quantisation look for that class.
    """
    if cpu.usable(x) and _fits(layer, x):
        return cpu.linear(x, layer.weight, layer.bias)
    if cpu.usable_in_training(x) and _fits(layer, x):
        return cpu.differentiable_linear(x, layer.weight, layer.bias)
    return layer(x)


class LinearSequential(nn.Sequential):
    """A Sequential that calls its linear layers with `apply_linear`."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply all layers to x."""
        for layer in self:
            x = apply_linear(layer, x)
        return x


def linear_gelu(linear: nn.Module, act: nn.Module, x: Tensor) -> Tensor:
    """act(linear(x)), in one kernel where `fused_linear_gelu` can."""
    exact = type(act) in GELUS and getattr(act, "approximate", "none") == "none" and not is_hooked(act)
    fused = fused_linear_gelu(linear, x) if exact else None
    return act(apply_linear(linear, x)) if fused is None else fused


def fused_linear_gelu(linear: nn.Module, x: Tensor) -> Tensor | None:
    """GELU(linear(x)) from one kernel, for inference on a CPU or in half precision on a GPU; elsewhere None.

    The hidden map is the largest of a block, and a GELU of its own reads and writes it once more. cuBLAS has GELU's
    tanh form only, which is within 5e-4 of GELU.
    """
    if cpu.usable(x):
        return cpu.linear(x, linear.weight, linear.bias, gelu=True) if _fits(linear, x) else None
    if torch.is_grad_enabled() or type(linear) is not nn.Linear or is_hooked(linear):
        return None
    weight: Any
    bias: Any
    weight, bias = linear.weight, linear.bias  # read once: another thread may replace them, see `cast_weights`
    if not _can_fuse(x, weight, bias):
        return None
    product = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return product.unflatten(0, x.shape[:-1])


def _fits(layer: nn.Module, x: Tensor) -> TypeGuard[nn.Linear]:
    """Whether oneDNN's product is all that this layer does with x."""
    return is_bare(layer, nn.Linear) and x.ndim > 1 and x.shape[-1] == layer.in_features


def _can_fuse(x: Tensor, weight: Any, bias: Any) -> bool:
    """Whether these are plain tensors in half precision on a GPU, and nothing but the result of a layer is wanted."""
    if dispatch.is_watched() and not torch.compiler.is_compiling():
        return False
    if type(x) is not Tensor or x.ndim < 2:
        return False
    plain = type(weight) in (Tensor, nn.Parameter) and type(bias) in (Tensor, nn.Parameter)
    return plain and x.dtype in HALF and x.dtype is weight.dtype is bias.dtype and dispatch.prefers_kernels(x)
