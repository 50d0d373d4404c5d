"""Linformer: attention to a few learned combinations of the tokens."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import trunc_normal_
from torch import Tensor, nn

from tokamix.mixers.heads import HeadMixer


def resize_projection(projection: Tensor, grid: tuple[int, int]) -> Tensor:
    """Resize projections (2, K, h, w) to another grid (H, W), bilinearly, like position embeddings.

    Values shrink with more tokens, so that sums over an image keep their size.
    """
    # also at its own size, where it changes nothing: a branch would specialise exported graphs to one size
    resized = F.interpolate(projection, grid, mode="bilinear")
    return resized * (projection.shape[-2] * projection.shape[-1] / (grid[0] * grid[1]))


class Linformer(HeadMixer):
    """Attention to `projected` learned combinations of the tokens' keys and values.

    Linformer: Self-Attention with Linear Complexity, arXiv 2006.04768, with its headwise sharing: one projection of
    the keys and one of the values for all heads. In the paper they fit one number of tokens; here they are tables over
    the grid, resized for other grids. Their initial scale keeps a combination of independent tokens about as large as a
    token.

    Args:
        dim: channels C.
        num_heads: heads, each with C / num_heads channels.
        grid: the grid (H, W) of the projections.
        projected: number of projected keys and values.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        grid: tuple[int, int] = (14, 14),
        projected: int = 49,
        qkv_bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, device, dtype)
        if projected < 1:
            raise ValueError(f"Linformer needs at least one projected key, got projected={projected}")
        self.projection = nn.Parameter(torch.empty(2, projected, *grid, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise projections that keep the size of independent tokens."""
        trunc_normal_(self.projection, std=(self.projection.shape[-2] * self.projection.shape[-1]) ** -0.5)

    def set_grid(self, grid: tuple[int, int]) -> None:
        """Resize the projections to another grid permanently."""
        self.projection = nn.Parameter(resize_projection(self.projection.detach(), grid), self.projection.requires_grad)

    def fit(self, projection: Tensor) -> Tensor:
        """Resize a checkpoint's projections to this grid."""
        return resize_projection(projection, (self.projection.shape[-2], self.projection.shape[-1]))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
        """Mix queries, keys and values (B, heads, N, D)."""
        to_keys, to_values = resize_projection(self.projection, grid).flatten(-2).to(q.dtype)
        return F.scaled_dot_product_attention(q, to_keys @ k, to_values @ v)
