"""The simplest mixers: average pooling and the identity."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.layers import channels_first, channels_last, tokens_to_map


class Pooling(nn.Module):
    """The average of each token's neighbourhood minus the token itself.

    MetaFormer Is Actually What You Need for Vision, arXiv 2111.11418. Tokens outside the grid are not counted.

    Args:
        size: side of the neighbourhood, odd.
        device: ignored, there are no parameters.
        dtype: ignored, there are no parameters.
    """

    def __init__(self, size: int = 3, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        if size % 2 == 0:
            raise ValueError(f"a neighbourhood of {size}x{size} has no centre; choose an odd size")
        self.size = size

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Mix tokens x (B, H*W, C) of grid (H, W)."""
        maps = channels_first(tokens_to_map(x, grid))
        mean = F.avg_pool2d(maps, self.size, stride=1, padding=self.size // 2, count_include_pad=False)
        return channels_last(mean).flatten(1, 2) - x


class Identity(nn.Module):
    """No mixing: tokens are combined only where the body merges or averages them.

    MetaFormer Baselines for Vision, arXiv 2210.13452.

    Args:
        device: ignored, there are no parameters.
        dtype: ignored, there are no parameters.
    """

    def __init__(self, device: Any = None, dtype: Any = None) -> None:
        super().__init__()

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return the tokens x (B, H*W, C) unchanged."""
        return x
