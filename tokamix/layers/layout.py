"""Views between the layouts of tokens, maps and images; none of them copies."""

import torch
from torch import Tensor


def channels_first(x: Tensor) -> Tensor:
    """(B, H, W, C) -> (B, C, H, W), a view whose memory is channels_last."""
    return x.permute(0, 3, 1, 2)


def channels_last(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, H, W, C), a view (contiguous when the memory was channels_last)."""
    return x.permute(0, 2, 3, 1)


def map_to_tokens(x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """(B, H, W, C) -> tokens (B, H*W, C) and the grid (H, W)."""
    return x.flatten(1, 2), (x.shape[1], x.shape[2])


def tokens_to_map(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Tokens (B, H*W, C) -> (B, H, W, C)."""
    if torch.compiler.is_compiling():  # does not compare sizes, which would specialise graphs
        return x.unflatten(1, grid)
    return x.view(x.shape[0], *grid, x.shape[2])
