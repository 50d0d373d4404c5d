"""Shared parts of mixers with queries, keys and values: projections, precision, linear attention."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tokamix.layers import apply_linear
from tokamix.ops.precision import no_autocast


class HeadMixer(nn.Module):
    """Projects tokens to queries, keys and values per head, mixes them with `attend`, and projects back.

    Args:
        dim: channels C.
        num_heads: heads, each with C / num_heads channels.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    parts = 3  # query, key and value

    def __init__(
        self, dim: int, num_heads: int = 8, qkv_bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"{dim} channels do not divide into {num_heads} heads; choose a divisor of {dim}")
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.qkv = nn.Linear(dim, self.parts * dim, bias=qkv_bias, **dd)
        self.proj = nn.Linear(dim, dim, **dd)

    def attend(self, *args: Any, **kwargs: Any) -> Tensor:
        """Mix queries, keys and values (B, heads, N, D) of a `grid` (H, W) to (B, heads, N, D)."""
        raise NotImplementedError

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Mix tokens x (B, H*W, C) of grid (H, W)."""
        heads = (self.parts, self.num_heads, self.head_dim)
        parts = apply_linear(self.qkv, x).unflatten(-1, heads).permute(2, 0, 3, 1, 4)
        return apply_linear(self.proj, self.attend(*parts.unbind(0), grid=grid).transpose(1, 2).flatten(2))


def head_norms(qk_norm: bool, head_dim: int, device: Any = None, dtype: Any = None) -> tuple[nn.Module, nn.Module]:
    """The norms of the queries and keys of a head (ViT-22B, arXiv 2302.05442), or identities."""
    norm: Any = functools.partial(nn.LayerNorm, head_dim, eps=1e-6, device=device, dtype=dtype)
    return (norm(), norm()) if qk_norm else (nn.Identity(), nn.Identity())


def full_precision(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Decorator: run a function of tensors in float32 or wider, also under autocast; return the first input's dtype.

    Sums over many tokens overflow float16, and bfloat16 is too coarse for exponentials and iterated inverses.
    """

    @functools.wraps(function)
    def run(*tensors: Tensor, **options: Any) -> Tensor:
        with no_autocast(tensors[0]):
            wide = [t.to(torch.promote_types(t.dtype, torch.float32)) for t in tensors]
            return function(*wide, **options).to(tensors[0].dtype)

    return run


def linear_attention(q: Tensor, k: Tensor, v: Tensor, eps: float = 1e-6) -> Tensor:
    """Attention whose weights are products of non-negative features, without the matrix of all pairs.

    out_i = sum_j (q_i . k_j) v_j / sum_j (q_i . k_j), for features q, k (B, heads, N, F) and values v (B, heads, N, D).
    A query without any weight gives zero.
    """
    total = q @ k.sum(-2).unsqueeze(-1)
    return q @ (k.transpose(-2, -1) @ v) / total.clamp_min(eps)


def segment_means(length: int, segments: int, like: Tensor) -> Tensor:
    """The matrix (segments, length) whose row i averages the i-th of `segments` runs of nearly equal length.

    Runs begin at floor(i * length / segments) and end before ceil((i + 1) * length / segments): where the number of
    segments divides the length these are its equal parts; where there are fewer tokens than segments, tokens repeat.
    Plain comparisons instead of adaptive pooling, whose exported form is tied to one length.
    """
    i = torch.arange(segments, device=like.device).unsqueeze(-1)
    n = torch.arange(length, device=like.device)
    start = torch.div(i * length, segments, rounding_mode="floor")
    end = torch.div((i + 1) * length + segments - 1, segments, rounding_mode="floor")
    weights = (n >= start).to(like.dtype) * (n < end).to(like.dtype)
    return weights / weights.sum(-1, keepdim=True)
