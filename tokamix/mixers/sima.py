"""SimA: attention without softmax, and class attention of the same form."""

from typing import Any

from torch import Tensor, nn

from tokamix.layers import apply_linear
from tokamix.ops import sima_class_attention, sima_self_attention


class SimASelfAttention(nn.Module):
    """Multi-head attention with l1-normalised queries and keys in place of softmax.

    SimA: Simple Softmax-free Attention for Vision Transformers, arXiv 2206.08898. It does not use the grid.

    Args:
        dim: channels.
        num_heads: heads; the paper loses 0.4 points with one.
        qkv_bias: whether the projection to q, k and v has a bias.
        norm: "l1", or the paper's ablations "l2" and None.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        qkv_bias: bool = True,
        norm: str | None = "l1",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        if dim % num_heads:
            raise ValueError(f"SimA cannot divide {dim} channels among {num_heads} heads; choose a divisor of {dim}")
        if norm not in ("l1", "l2", None):
            raise ValueError(f"SimA has no norm {norm!r}; choose 'l1', 'l2' or None")
        self.num_heads = num_heads
        self.norm = norm
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, **dd)
        self.proj = nn.Linear(dim, dim, **dd)

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """Mix tokens x (B, N, C)."""
        return apply_linear(self.proj, sima_self_attention(self._heads(x), self.norm))

    def _heads(self, x: Tensor) -> Tensor:
        heads = (3, self.num_heads, x.shape[-1] // self.num_heads)
        return apply_linear(self.qkv, x).unflatten(-1, heads)  # (B, N, 3, H, D)


class SimAClassAttention(SimASelfAttention):
    """Attention of the class token (the first) to all tokens, including itself.

    As in the authors' XCiT, queries and keys are normalised over all tokens with eps 1e-6, although one query attends.
    """

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        """(B, 1 + N, C) -> the new class token (B, 1, C)."""
        q, k, v = self._heads(x).transpose(1, 3).unbind(2)  # (B, H, 1 + N, D)
        return self.proj(sima_class_attention(q, k, v, self.norm, eps=1e-6).transpose(1, 2).flatten(2))
