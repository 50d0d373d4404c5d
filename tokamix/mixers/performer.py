"""Performer: softmax attention estimated with random features."""

import functools
import math
from typing import Any

import torch
from torch import Tensor

from tokamix.mixers.heads import HeadMixer, full_precision, linear_attention


@full_precision
def performer_attention(q: Tensor, k: Tensor, v: Tensor, directions: Tensor, eps: float = 1e-4) -> Tensor:
    """Softmax attention estimated with positive random features (FAVOR+).

    exp(q . k) is the mean of exp(w . q - |q|^2 / 2) exp(w . k - |k|^2 / 2) over normal directions w.

    Args:
        q: queries (B, heads, N, D).
        k: keys (B, heads, N, D).
        v: values (B, heads, N, D).
        directions: (F, D) directions w.
        eps: added to each feature, of which the largest is 1, so that every query has a key.
    """
    scale = q.shape[-1] ** -0.25  # the two halves of 1 / sqrt(D)
    q, k = ((t * scale) @ directions.T - (t * scale).square().sum(-1, keepdim=True) / 2 for t in (q, k))
    # factors of a query, and of all keys, cancel in the ratio, so the largest exponents are shifted to 0
    q = (q - q.amax(-1, keepdim=True)).exp() + eps
    k = (k - k.amax((-2, -1), keepdim=True)).exp() + eps
    return linear_attention(q, k, v, eps=0.0)


@functools.cache
def orthogonal_directions(features: int, dim: int, seed: int = 0) -> Tensor:
    """(features, dim) normal random directions, orthogonal within each block of `dim`; the same for the same seed."""
    generator = torch.Generator().manual_seed(seed)
    blocks = []
    for start in range(0, features, dim):
        # on the CPU, also within `with torch.device(...)`: they are kept for other mixers
        normal, other = torch.randn(2, dim, dim, generator=generator, dtype=torch.float64, device="cpu")
        q, r = torch.linalg.qr(normal)
        rotation = q * r.diagonal().sign()  # the signs make it uniform: LAPACK prefers some directions
        blocks.append((rotation * other.norm(dim=-1, keepdim=True))[: features - start])
    return torch.cat(blocks)


class Performer(HeadMixer):
    """Attention with FAVOR+: positive orthogonal random features.

    Rethinking Attention with Performers, arXiv 2009.14794. The features are drawn once, the same in every run, and
    stored with the weights; the paper also redraws them during training. The largest exponent of the keys is taken
    within one image and head, not over the batch, so that images of a batch are independent.

    Args:
        dim: channels C.
        num_heads: heads, each with D = C / num_heads channels.
        features: number of random features; D log D, as in the paper, if None.
        seed: seed of the features.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    directions: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        features: int | None = None,
        seed: int = 0,
        qkv_bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, device, dtype)
        self.seed = seed
        features = features or max(1, int(self.head_dim * math.log(self.head_dim)))
        self.register_buffer("directions", torch.empty(features, self.head_dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the features."""
        self.directions.copy_(orthogonal_directions(*self.directions.shape, self.seed))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
        """Mix queries, keys and values (B, heads, N, D)."""
        return performer_attention(q, k, v, self.directions)
