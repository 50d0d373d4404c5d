"""Context broadcasting in plain PyTorch."""

import torch
from torch import Tensor


def broadcast_context(x: Tensor, scale: Tensor | None = None, kind: str = "cb") -> Tensor:
    """Add the average token back to every token of x (B, N, C); see `tokamix.ops.broadcast_context`."""
    if kind == "gate":
        return x * (x[:, :1] + 1)
    # the mean over many tokens is taken in float32: float16 sums overflow at a few thousand tokens
    mean = x.mean(dim=1, keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32)).to(x.dtype)
    if scale is not None:
        mean = mean * scale
    broadcast = (x + mean) / 2
    return x * x[:, :1] + broadcast if kind == "hybrid" else broadcast
