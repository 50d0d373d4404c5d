"""Efficient attention: separate softmax of queries and keys instead of a softmax of their product."""

from torch import Tensor

from tokamix.mixers.heads import HeadMixer, full_precision


@full_precision
def efficient_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q) (softmax(k)^T v): over the channels of each query, over the tokens of each key channel.

    Args:
        q: queries (B, heads, N, D).
        k: keys (B, heads, N, D).
        v: values (B, heads, N, D).
    """
    return q.softmax(-1) @ (k.softmax(-2).transpose(-2, -1) @ v)


class EfficientAttention(HeadMixer):
    """Efficient attention, with softmax as its normalisation.

    Efficient Attention: Attention with Linear Complexities, arXiv 1812.01243.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
        """Mix queries, keys and values (B, heads, N, D)."""
        return efficient_attention(q, k, v)
