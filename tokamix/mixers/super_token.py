"""Super token attention: attention among a few hundred super tokens instead of among all tokens."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import Attention, trunc_normal_
from torch import Tensor, nn

from tokamix.layers import DepthwiseConv, is_bare, map_to_tokens, tokens_to_map
from tokamix.ops import cpu, super_token_sample, super_token_scatter
from tokamix.ops.precision import to_autocast_dtype
from tokamix.ops.super_token.cpu import mix

REFINEMENTS = ("attention", "conv", "none")


class SuperTokenAttention(nn.Module):
    """Samples super tokens, applies attention among them, and maps them back to tokens.

    Vision Transformer with Super Token Sampling, arXiv 2211.11167. With cells of 1x1 each token is its own super token:
    plain global attention, without association.

    Args:
        dim: channels C.
        num_heads: heads of the attention among super tokens.
        cell: side or (h, w) of the cell of one super token.
        n_iter: iterations of super token sampling.
        refine: operation on the super tokens: "attention", "conv" (Linear, depthwise 5x5, Linear) or "none".
        qkv_bias: whether the projection to queries, keys and values has a bias.
        qk_norm: normalise the queries and keys of each head.
        relative_grid: grid of super tokens of a learned relative position bias; None for no bias.
        backend: the operators' backend; see `tokamix.ops.dispatch`.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        cell: int | tuple[int, int] = 8,
        n_iter: int = 1,
        refine: str = "attention",
        qkv_bias: bool = True,
        qk_norm: bool = False,
        relative_grid: tuple[int, int] | None = None,
        backend: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        if refine not in REFINEMENTS:
            raise ValueError(f"unknown refinement {refine!r} of super tokens: choose one of {', '.join(REFINEMENTS)}")
        if dim % num_heads:
            raise ValueError(f"{dim} channels do not divide into {num_heads} heads; choose a divisor of {dim}")
        self.cell = (cell, cell) if isinstance(cell, int) else (cell[0], cell[1])
        if min(self.cell) < 1 or n_iter < 0:
            raise ValueError(f"super tokens need a cell from 1 on and n_iter from 0 on, got {cell} and {n_iter}")
        self.n_iter, self.backend = n_iter, backend
        self.position = RelativePosition(relative_grid, num_heads, **dd) if relative_grid else None
        self.refine: nn.Module
        if refine == "attention":
            norm = partial(nn.LayerNorm, eps=1e-6) if qk_norm else None
            self.refine = Attention(dim, num_heads, qkv_bias=qkv_bias, qk_norm=qk_norm, norm_layer=norm, **dd)
            self.refine.proj_drop = nn.Identity()  # its dropout of rate 0 would be called
        elif refine == "conv":
            self.refine = nn.Sequential(
                nn.Linear(dim, dim, **dd), DepthwiseConv(dim, 5, **dd), nn.Linear(dim, dim, **dd)
            )
        else:
            self.refine = nn.Identity()

    def forward(self, x: Tensor, grid: tuple[int, int], residual: Tensor | None = None) -> Tensor:
        """Mix tokens x (B, H*W, C) of grid (H, W); `residual` is added to them."""
        if self.cell == (1, 1):
            return self._refine(to_autocast_dtype(x), grid, residual)
        x = to_autocast_dtype(x)
        if self.backend is None and cpu.usable(x):
            added = None if residual is None else tokens_to_map(residual, grid)
            return mix(tokens_to_map(x, grid), self.cell, self.n_iter, self._refine, added).flatten(1, 2)
        out = self._mix(x, grid)
        return out if residual is None else residual + out

    def _mix(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        tokens, association = super_token_sample(tokens_to_map(x, grid), self.cell, self.n_iter, self.backend)
        tokens, small = map_to_tokens(tokens)
        tokens = tokens_to_map(self._refine(tokens, small), small)
        return super_token_scatter(tokens, association, self.cell, self.backend).flatten(1, 2)

    def _refine(self, tokens: Tensor, grid: tuple[int, int], residual: Tensor | None = None) -> Tensor:
        if isinstance(self.refine, Attention):
            mask = self.position(grid) if self.position else None
            if cpu.usable(tokens) and _is_bare(self.refine):
                return _attend(self.refine, tokens, mask, residual)
            out = self.refine(tokens, attn_mask=mask)
        else:
            out = self.refine(tokens_to_map(tokens, grid)).flatten(1, 2)
        return out if residual is None else residual + out


def _is_bare(attention: Attention) -> bool:
    """Whether `_attend` computes what this attention does: nothing was swapped, adapted or hooked."""
    plain = type(attention) is Attention and attention.fused_attn and "forward" not in vars(attention)
    hooked = attention._forward_hooks or attention._forward_pre_hooks
    return plain and not hooked and is_bare(attention.qkv, nn.Linear) and is_bare(attention.proj, nn.Linear)


def _attend(attention: Attention, x: Tensor, mask: Tensor | None, residual: Tensor | None) -> Tensor:
    """Attention among tokens x (B, N, C) plus `residual`, for inference on a CPU; see `tokamix.ops.cpu`."""
    qkv, proj = attention.qkv, attention.proj
    heads = cpu.linear(x, qkv.weight, qkv.bias).view(*x.shape[:2], 3, attention.num_heads, -1)
    q, k, v = heads.permute(2, 0, 3, 1, 4).unbind()
    x = F.scaled_dot_product_attention(attention.q_norm(q), attention.k_norm(k), v, mask)
    return cpu.linear(x.transpose(1, 2).flatten(2), proj.weight, proj.bias, residual=residual)


class RelativePosition(nn.Module):
    """A learned bias for each head and offset between two tokens, resized to the grid of the input.

    Args:
        grid: the grid (H, W) of the table.
        num_heads: heads of the attention.
        device: device of the table.
        dtype: dtype of the table.
    """

    def __init__(self, grid: tuple[int, int], num_heads: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        shape = (num_heads, 2 * grid[0] - 1, 2 * grid[1] - 1)
        self.table = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise near zero."""
        trunc_normal_(self.table, std=0.02)

    def forward(self, grid: tuple[int, int]) -> Tensor:
        """The bias (num_heads, H*W, H*W) of grid (H, W)."""
        h, w = grid
        # also at the table's own size, where it changes nothing: a branch would specialise exported graphs to one size
        table = F.interpolate(self.table[None], (2 * h - 1, 2 * w - 1), mode="bicubic")[0]
        y, x = (torch.arange(n, device=table.device) for n in grid)
        dy, dx = y[:, None] - y + h - 1, x[:, None] - x + w - 1
        return table[:, dy[:, None, :, None], dx[None, :, None, :]].flatten(3, 4).flatten(1, 2)
