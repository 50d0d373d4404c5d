"""Softmax attention, the baseline of all comparisons."""

import torch.nn.functional as F
from torch import Tensor

from tokamix.mixers.heads import HeadMixer


class SoftmaxAttention(HeadMixer):
    """Multi-head self-attention, softmax(q k^T / sqrt(D)) v.

    Attention Is All You Need, arXiv 1706.03762.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
        """Mix queries, keys and values (B, heads, N, D)."""
        return F.scaled_dot_product_attention(q, k, v)
