"""GELU with fast approximations for half precision on a GPU: in compiled models, and as a part of a linear layer."""

from typing import Any

import timm.layers
import torch
from torch import Tensor, nn

from tokamix.layers.bare import is_hooked
from tokamix.layers.recompute import recompute_in_backward
from tokamix.ops import dispatch

HALF = (torch.bfloat16, torch.float16)


class GELU(nn.GELU):
    """GELU; in models compiled for a GPU in half precision, `approximate_gelu`, recomputed in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """GELU of x."""
        fused = torch.compiler.is_compiling() and not dispatch.is_exporting()
        if fused and x.is_cuda and x.dtype in HALF:
            return recompute_in_backward(lambda x: approximate_gelu(x.float()).to(x.dtype), x)
        return super().forward(x)


GELUS = (GELU, nn.GELU, timm.layers.GELU)


def approximate_gelu(x: Tensor) -> Tensor:
    """GELU to within 3e-5, as x * sigmoid(odd quintic): in a fused kernel erf takes longer than the memory access."""
    square = (x * x).clamp(max=25.0)  # the quintic is monotonic only up to 5
    return x * torch.sigmoid(x * (1.59501055 + square * (0.07401604 - 0.00070380 * square)))


def linear_gelu(linear: nn.Module, act: nn.Module, x: Tensor) -> Tensor:
    """act(linear(x)), in one kernel where `fused_linear_gelu` can."""
    fused = fused_linear_gelu(linear, x) if type(act) in GELUS and not is_hooked(act) else None
    return act(linear(x)) if fused is None else fused


def fused_linear_gelu(linear: nn.Module, x: Tensor) -> Tensor | None:
    """GELU(linear(x)) from one kernel, for inference in half precision on a GPU; elsewhere None.

    The hidden map is the largest of a block, and a GELU of its own reads and writes it once more. cuBLAS has GELU's
    tanh form only, which is within 5e-4 of GELU.
    """
    if torch.is_grad_enabled() or type(linear) is not nn.Linear or is_hooked(linear):
        return None
    weight: Any
    bias: Any
    weight, bias = linear.weight, linear.bias  # read once: another thread may replace them, see `cast_weights`
    if not _can_fuse(x, weight, bias):
        return None
    product = torch._addmm_activation(bias, x.flatten(0, -2), weight.t(), use_gelu=True)
    return product.unflatten(0, x.shape[:-1])


def _can_fuse(x: Tensor, weight: Any, bias: Any) -> bool:
    """Whether these are plain tensors in half precision on a GPU, and nothing but the result of a layer is wanted."""
    if dispatch.is_watched() and not torch.compiler.is_compiling():
        return False
    if type(x) is not Tensor or x.ndim < 2:
        return False
    plain = type(weight) in (Tensor, nn.Parameter) and type(bias) in (Tensor, nn.Parameter)
    return plain and x.dtype in HALF and x.dtype is weight.dtype is bias.dtype and dispatch.prefers_kernels(x)
