"""GELU with a fast approximation for compiled models in half precision on a GPU."""

import timm.layers
import torch
from torch import Tensor, nn

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
