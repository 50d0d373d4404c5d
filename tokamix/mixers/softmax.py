"""Softmax attention, the baseline of all comparisons."""

from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.mixers.heads import HeadMixer


class SoftmaxAttention(HeadMixer):
    """Multi-head self-attention, softmax(q k^T / sqrt(D)) v.

    Attention Is All You Need, arXiv 1706.03762.

    Args:
        dim: channels C.
        num_heads: heads, each with C / num_heads channels.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        qk_norm: normalise the queries and keys of each head (ViT-22B, arXiv 2302.05442), which allows higher learning
            rates.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, device, dtype)
        norm: Any = partial(nn.LayerNorm, self.head_dim, eps=1e-6, device=device, dtype=dtype)
        self.q_norm: nn.Module = norm() if qk_norm else nn.Identity()
        self.k_norm: nn.Module = norm() if qk_norm else nn.Identity()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
        """Mix queries, keys and values (B, heads, N, D)."""
        q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)  # autocast normalises in float32
        return F.scaled_dot_product_attention(q, k, v)
