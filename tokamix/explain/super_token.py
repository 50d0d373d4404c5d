"""Super tokens: regions, soft associations, and attention among them."""

import torch
from timm.layers import Attention
from torch import Tensor, nn

from tokamix.explain.capture import CapturedLayer, Pair, check_token
from tokamix.ops.super_token import reference

OUTSIDE = -1


@torch.no_grad()
def super_tokens(layer: CapturedLayer, n_iter: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Super tokens (B, p, q, C) of a layer, the tokens' associations (B, H*W, p*q) and their sums (B, p*q).

    Rows sum to 1 away from the border; at the border, super tokens beyond it take part with the value zero, as in the
    authors' code.

    Args:
        layer: a captured layer with super tokens.
        n_iter: iterations of the sampling; None: the layer's own number.
    """
    cell = check_cells(layer)
    x = layer.x.unflatten(1, layer.grid)
    tokens, near, weight = reference.sample(x, cell, layer.mixer.n_iter if n_iter is None else n_iter)
    owner = _neighbours(layer, cell)  # (H*W, 9)
    count = tokens.shape[1] * tokens.shape[2]
    dense = near.new_zeros(len(x), len(owner), count + 1)  # the last column collects super tokens beyond the border
    index = owner.masked_fill(owner == OUTSIDE, count).expand(len(x), -1, -1)
    dense.scatter_add_(2, index, near.flatten(1, 2))
    return tokens, dense[..., :count], weight.flatten(1)


def super_token_grid(layer: CapturedLayer) -> Pair:
    """Grid (p, q) of the super tokens."""
    (height, width), (h, w) = layer.grid, check_cells(layer)
    return -(-height // h), -(-width // w)


def super_token_regions(layer: CapturedLayer, n_iter: int | None = None) -> Tensor:
    """The super token (B, H, W) int64 that each token is most associated with, numbered row by row."""
    return super_tokens(layer, n_iter)[1].argmax(-1).unflatten(1, layer.grid)


def super_token_association(layer: CapturedLayer, super_token: Pair | None = None, n_iter: int | None = None) -> Tensor:
    """Association (B, H, W) of each token with one super token (row, column); None: the middle one."""
    row, column = check_token(super_token, super_token_grid(layer))
    return super_tokens(layer, n_iter)[1][..., row * super_token_grid(layer)[1] + column].unflatten(1, layer.grid)


def super_token_attention(layer: CapturedLayer, super_token: Pair | None = None) -> Tensor:
    """Attention (B, heads, H, W) of one super token to all, mapped back to the tokens by their associations."""
    row, column = check_token(super_token, super_token_grid(layer))
    tokens, association, _ = super_tokens(layer)
    weights = _attention(layer, tokens)[:, :, row * super_token_grid(layer)[1] + column]  # (B, heads, p*q)
    return (weights @ association.mT).unflatten(-1, layer.grid)


@torch.no_grad()
def super_token_weights(layer: CapturedLayer, queries: Tensor | None = None) -> Tensor:
    """Weights (B, heads, Q, N) with which tokens see each other through super tokens.

    The product of each query's association, the attention among super tokens, and the averaging of tokens into super
    tokens.
    """
    if layer.layer.kind != "super_token":
        raise ValueError(f"{layer.layer.name} ({layer.layer.kind}) has no super tokens")
    if layer.mixer.cell == (1, 1):  # every token is its own super token
        weights = _attention(layer, layer.x.unflatten(1, layer.grid))
        return weights if queries is None else weights[:, :, queries]
    tokens, association, sums = super_tokens(layer)
    rows = association if queries is None else association[:, queries]
    average = (association / sums.unsqueeze(1)).mT.unsqueeze(1)  # (B, 1, p*q, N)
    return rows.unsqueeze(1) @ _attention(layer, tokens) @ average


def _attention(layer: CapturedLayer, tokens: Tensor) -> Tensor:
    """Attention (B, heads, p*q, p*q) among super tokens (B, p, q, C)."""
    mixer = layer.mixer
    if isinstance(mixer.refine, nn.Identity):
        return torch.eye(tokens.shape[1] * tokens.shape[2], device=tokens.device).expand(len(tokens), 1, -1, -1)
    if not isinstance(mixer.refine, Attention):
        raise ValueError(f"{layer.layer.name} has no attention among its super tokens: it refines them by convolutions")
    attention = mixer.refine
    with torch.no_grad():
        parts = attention.qkv(tokens.flatten(1, 2)).unflatten(-1, (3, attention.num_heads, -1))
        q, k, _ = parts.permute(2, 0, 3, 1, 4).unbind(0)
        logits = attention.q_norm(q) * attention.scale @ attention.k_norm(k).mT
        if mixer.position is not None:
            logits = logits + mixer.position((tokens.shape[1], tokens.shape[2]))
        return logits.softmax(-1)


def check_cells(layer: CapturedLayer) -> Pair:
    """The cell (h, w) of one super token; ValueError if the layer has no super tokens other than its tokens."""
    if layer.layer.kind != "super_token":
        raise ValueError(f"{layer.layer.name} ({layer.layer.kind}) has no super tokens")
    if layer.mixer.cell == (1, 1):
        raise ValueError(
            f"{layer.layer.name} has cells of 1x1: every token is its own super token; choose an earlier layer"
        )
    return layer.mixer.cell


def _neighbours(layer: CapturedLayer, cell: Pair) -> Tensor:
    """Numbers (H*W, 9) of the super tokens around each token's cell; OUTSIDE beyond the border."""
    (rows, columns), device = super_token_grid(layer), layer.x.device
    y, x = (torch.arange(n, device=device) // size for n, size in zip(layer.grid, cell, strict=True))
    near = torch.arange(-1, 2, device=device)
    r, c = y[:, None, None, None] + near[:, None], x[None, :, None, None] + near  # (H, 1, 3, 1), (1, W, 1, 3)
    inside = (r >= 0) & (r < rows) & (c >= 0) & (c < columns)
    return torch.where(inside, r * columns + c, OUTSIDE).flatten(2).flatten(0, 1)
