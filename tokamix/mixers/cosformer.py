"""cosFormer: ReLU instead of softmax, with larger weights for near tokens by a cosine."""

import math
from typing import Any

import torch
from torch import Tensor

from tokamix.mixers.heads import HeadMixer, full_precision, linear_attention


@full_precision
def cosformer_attention(q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], reweight: bool = False) -> Tensor:
    """Attention with weights relu(q_i) . relu(k_j), divided by their sum over j.

    Args:
        q: queries (B, heads, N, D).
        k: keys (B, heads, N, D).
        v: values (B, heads, N, D).
        grid: (H, W) with H * W = N.
        reweight: multiply the weight of tokens (y, x) and (y', x') by cos(pi/2 (y - y') / H) cos(pi/2 (x - x') / W).
    """
    q, k = q.relu(), k.relu()
    if reweight:
        q, k = (_with_positions(t, grid) for t in (q, k))
    return linear_attention(q, k, v)


def _with_positions(features: Tensor, grid: tuple[int, int]) -> Tensor:
    """Features (..., N, D) times each product of a sine or cosine of the row with one of the column: (..., N, 4D).

    Since cos(a - b) = cos a cos b + sin a sin b, the inner product of two such features has the weight of the pair.
    """
    y, x = (torch.arange(n, device=features.device, dtype=features.dtype) * (math.pi / 2 / n) for n in grid)
    waves = [wave_y[:, None] * wave_x for wave_y in (y.cos(), y.sin()) for wave_x in (x.cos(), x.sin())]
    return torch.cat([features * wave.reshape(-1, 1) for wave in waves], -1)


class CosFormer(HeadMixer):
    """Linear attention with ReLU features, with or without cosine re-weighting.

    cosFormer: Rethinking Softmax in Attention, arXiv 2202.08791. Re-weighting is off by default, as in the
    SimA paper's Table 2, where no run with it converged. It has that paper's form for images (appendix A.3), one cosine
    for each axis; the angles, unscaled there, are scaled to a quarter turn per side, as in cosFormer.

    Args:
        dim: channels C.
        num_heads: heads, each with C / num_heads channels.
        reweight: larger weights for near tokens, with four times the features.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        reweight: bool = False,
        qkv_bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, device, dtype)
        self.reweight = reweight

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
        """Mix queries, keys and values (B, heads, N, D)."""
        return cosformer_attention(q, k, v, grid=grid, reweight=self.reweight)
