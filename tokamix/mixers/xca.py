"""Cross-covariance attention: channels attend to channels."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.mixers.heads import HeadMixer, full_precision


@full_precision
def cross_covariance_attention(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    """Let the channels of each head attend to each other.

    Args:
        q: queries (B, heads, N, D), normalised here to unit l2 length over the tokens.
        k: keys (B, heads, N, D), likewise.
        v: values (B, heads, N, D).
        temperature: (heads,), multiplies the logits.
    """
    q, k = F.normalize(q, dim=-2), F.normalize(k, dim=-2)
    logits = q.transpose(-2, -1) @ k * temperature[:, None, None]  # (B, heads, D, D)
    return v @ logits.softmax(-1).transpose(-2, -1)


class XCA(HeadMixer):
    """Cross-covariance attention with a learned temperature for each head.

    XCiT: Cross-Covariance Image Transformers, arXiv 2106.09681.
    """

    def __init__(
        self, dim: int, num_heads: int = 8, qkv_bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, device, dtype)
        self.temperature = nn.Parameter(torch.empty(num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Start at temperature 1."""
        nn.init.ones_(self.temperature)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
        """Mix queries, keys and values (B, heads, N, D)."""
        return cross_covariance_attention(q, k, v, self.temperature)
