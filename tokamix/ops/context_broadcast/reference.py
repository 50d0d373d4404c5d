"""Context broadcasting in plain PyTorch."""

import torch
from torch import Tensor


def broadcast_context(x: Tensor, scale: Tensor | None = None) -> Tensor:
    """(x_i + scale * mean) / 2 for tokens x (B, N, C)."""
    # the mean is computed in float32, because in float16 a sum over a few thousand tokens overflows
    mean = x.mean(dim=1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    if scale is not None:
        mean = mean * scale
    return (x + mean.to(x.dtype)) / 2


def gate(x: Tensor) -> Tensor:
    """x_i * (x_0 + 1), x_0 the class token."""
    return x * (x[:, :1] + 1)
