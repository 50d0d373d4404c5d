"""Softmax attention, the baseline of all comparisons."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokamix.mixers.heads import HeadMixer, head_norms


class SoftmaxAttention(HeadMixer):
    """Multi-head self-attention, softmax(q k^T / sqrt(D)) v.

    Attention Is All You Need, arXiv 1706.03762. With `window`, tokens attend within windows alone, as in Swin (arXiv
    2103.14030) without its relative positions: the peer of mixers that save time in other ways.

    Args:
        dim: channels C.
        num_heads: heads, each with C / num_heads channels.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        qk_norm: normalise the queries and keys of each head (ViT-22B, arXiv 2302.05442), which allows higher learning
            rates.
        window: side of the windows in tokens; None: every token attends to all.
        shift: shift of the windows down and right, in tokens.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        window: int | None = None,
        shift: int = 0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, device, dtype)
        self.window, self.shift = window, shift
        self.q_norm, self.k_norm = head_norms(qk_norm, self.head_dim, device, dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
        """Mix queries, keys and values (B, heads, N, D)."""
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)  # autocast normalises in float32
        if self.window is None:
            return F.scaled_dot_product_attention(q, k, v)
        return attend_in_windows(q, k, v, grid, self.window, self.shift)


def attend_in_windows(q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], window: int, shift: int = 0) -> Tensor:
    """Softmax attention of q, k, v (B, heads, H*W, D) within windows of `window` x `window` tokens of a grid (H, W).

    Windows start `shift` tokens before the first token; those at the borders are smaller.
    """
    height, width = grid
    rows, columns = (-(-(n + shift) // window) for n in grid)
    # tokens are padded on all sides; padding is masked out, unlike a roll, which would mix opposite borders
    pad = (0, 0, shift, columns * window - width - shift, shift, rows * window - height - shift)

    def split(x: Tensor) -> Tensor:  # (B, heads, H*W, D) -> (B, windows, heads, window^2, D)
        x = F.pad(x.unflatten(2, grid), pad).unflatten(3, (columns, window)).unflatten(2, (rows, window))
        return x.permute(0, 2, 4, 1, 3, 5, 6).flatten(4, 5).flatten(1, 2)

    inside = split(torch.ones(1, 1, height * width, 1, device=q.device, dtype=q.dtype))[..., 0].unsqueeze(3) > 0
    mask = None if pad == (0, 0) * 3 else inside | ~inside.any(-1, keepdim=True)  # a window of padding stays finite
    x = F.scaled_dot_product_attention(split(q), split(k), split(v), mask)
    x = x.unflatten(3, (window, window)).unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5, 6)
    x = x.flatten(4, 5).flatten(2, 3)[:, :, shift : shift + height, shift : shift + width]
    return x.flatten(2, 3)
