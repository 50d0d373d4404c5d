"""Attention heads: split, merge and attend."""

import torch.nn.functional as F
from torch import Tensor, nn


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, C) -> (B, num_heads, N, C / num_heads)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, H * D)."""
    return x.transpose(1, 2).flatten(2)


class SoftmaxProduct(nn.Module):
    """softmax(scale q k^T) v: the part of an attention between its projections, which `swap_mixer` replaces."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, H, Nq, D), k and v (B, H, Nk, D) -> (B, H, Nq, D)."""
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale)

    def extra_repr(self) -> str:
        """The scale."""
        return f"scale={self.scale:.4g}"
