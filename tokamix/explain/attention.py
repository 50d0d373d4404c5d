"""Softmax attention: weights, entropy (with and without context broadcasting) and rollout.

Functions take a layer of `tokamix.explain.capture.capture` and return tensors with one entry for each image.
"""

import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.explain.capture import Capture, CapturedLayer
from tokamix.layers import SoftmaxProduct

CHUNK = 2**24  # attention weights computed at once


@torch.no_grad()
def queries_and_keys(layer: CapturedLayer) -> tuple[Tensor, Tensor]:
    """Queries (B, heads, N, D) and keys (B, heads, M, D) of softmax attention or SimA, prefix tokens first.

    M is less than N in CvT and PVT, whose keys come from a smaller map.
    """
    mixer, x = layer.mixer, layer.x
    if layer.layer.kind not in ("softmax", "sima"):
        raise ValueError(f"{layer.layer.name} ({layer.layer.kind}) has no queries and keys of tokens; choose attention")
    if isinstance(getattr(mixer, "attend", None), nn.Module):  # CvT and PVT
        seen: list[Tensor] = []
        handle = mixer.attend.register_forward_pre_hook(lambda _, args: seen.extend(args[:2]))
        try:
            layer.mix(x)
        finally:
            handle.remove()
        return seen[0], seen[1]
    if isinstance(mixer, nn.MultiheadAttention):
        projected = F.linear(x, mixer.in_proj_weight, mixer.in_proj_bias)
    else:
        projected = mixer.qkv(x)
    q, k, _ = projected.unflatten(-1, (3, mixer.num_heads, -1)).permute(2, 0, 3, 1, 4).unbind(0)
    return getattr(mixer, "q_norm", nn.Identity())(q), getattr(mixer, "k_norm", nn.Identity())(k)


@torch.no_grad()
def attention_weights(layer: CapturedLayer, queries: Tensor | None = None) -> Tensor:
    """Weights (B, heads, Q, M) of softmax attention; each row sums to 1.

    Args:
        layer: a captured layer with softmax attention.
        queries: indices (Q,) of the attending tokens, prefix tokens first; None: all.
    """
    if layer.layer.kind != "softmax":
        raise ValueError(f"{layer.layer.name} ({layer.layer.kind}) is not softmax attention")
    q, k = queries_and_keys(layer)
    q = q if queries is None else q[:, :, queries]
    product = getattr(layer.mixer, "attend", None)
    scale = product.scale if isinstance(product, SoftmaxProduct) else q.shape[-1] ** -0.5
    logits = q * scale @ k.mT
    if (allowed := _same_window(layer)) is not None:
        logits = logits.masked_fill(~(allowed if queries is None else allowed[queries]), -torch.inf)
    return logits.softmax(-1)


def _same_window(layer: CapturedLayer) -> Tensor | None:
    """Which pairs of tokens (N, N) share a window of `SoftmaxAttention`; None if it has no windows."""
    window = getattr(layer.mixer, "window", None)
    if window is None:
        return None
    y, x = ((torch.arange(n, device=layer.x.device) + layer.mixer.shift) // window for n in layer.grid)
    number = (y[:, None] * (int(x[-1]) + 1) + x).flatten()
    return number[:, None] == number


def chunks_of_tokens(layer: CapturedLayer, per_token: int) -> Iterator[Tensor]:
    """All token indices in parts, so that `per_token` values for each image and token fit into memory."""
    count = layer.x.shape[1]
    size = max(1, CHUNK // max(1, per_token * len(layer.x)))
    yield from torch.arange(count, device=layer.x.device).split(size)


def entropy(weights: Tensor) -> Tensor:
    """Shannon entropy of the last dimension, in nats: log(n) if uniform over n, 0 if one weight is 1."""
    return torch.special.entr(weights).sum(-1)


@torch.no_grad()
def attention_entropy(layer: CapturedLayer) -> Tensor:
    """Entropy (B, heads, N) of each token's attention, in nats; high entropy is dense attention.

    Scratching Visual Transformer's Back with Uniform Attention, arXiv 2210.08457, measures it for ViT with and without
    context broadcasting. `highest_entropy` is what uniform attention has.
    """
    heads = layer.mixer.num_heads
    parts = chunks_of_tokens(layer, heads * layer.x.shape[1])
    return torch.cat([entropy(attention_weights(layer, part)) for part in parts], dim=-1)


def highest_entropy(layer: CapturedLayer) -> float:
    """Entropy of uniform attention: the logarithm of the number of keys, of the largest window if there are windows."""
    allowed = _same_window(layer)
    return math.log(queries_and_keys(layer)[1].shape[2] if allowed is None else int(allowed.sum(1).max()))


@torch.no_grad()
def attention_map(layer: CapturedLayer, token: tuple[int, int] | str | None = None) -> Tensor:
    """Attention (B, heads, h, w) of one token to the patch tokens.

    Args:
        layer: a captured layer with softmax attention.
        token: (row, column); None: the middle; "class": the class token.
    """
    index = 0 if token == "class" else layer.index_of(token)  # type: ignore[arg-type]
    if token == "class" and not layer.prefix:
        raise ValueError(f"{layer.layer.name} has no class token; choose a token (row, column)")
    weights = attention_weights(layer, torch.tensor([index], device=layer.x.device))
    return on_grid(layer, weights)[:, :, 0]


def on_grid(layer: CapturedLayer, weights: Tensor) -> Tensor:
    """Weights (..., M) over keys -> (..., H, W) over the patch tokens.

    A key that stands for several tokens (CvT, PVT) divides its weight among them.
    """
    if weights.shape[-1] == layer.x.shape[1]:
        return layer.to_map(weights)
    keys = weights.shape[-1] - layer.prefix
    (height, width) = layer.grid
    rows = round((keys * height / width) ** 0.5)
    columns = keys // rows
    y, x = (torch.arange(n, device=weights.device) * m // n for n, m in ((height, rows), (width, columns)))
    owner = y[:, None] * columns + x  # (H, W): the key of each token
    count = torch.bincount(owner.flatten(), minlength=keys)
    return (weights[..., layer.prefix :] / count)[..., owner]


@torch.no_grad()
def rollout(captured: Capture, residual: float = 0.5) -> Tensor:
    """Attention rollout (B, N, H, W): what reaches each token of the last layer from the first layer's patch tokens.

    Quantifying Attention Flow in Transformers, arXiv 2005.00928: the product over layers of the attention, averaged
    over heads and with the residual connection added. Where a pyramid merges tokens, their rows are averaged.

    Args:
        captured: of a model whose mixers are all softmax attention with one key for each token.
        residual: weight of the residual connection; the attention has the rest.
    """
    total: Tensor | None = None
    first = captured[0]
    grid, prefix = first.grid, first.prefix
    for layer in captured:
        weights = attention_weights(layer).mean(1)  # (B, N, N)
        if weights.shape[1] != weights.shape[2] or layer.prefix != prefix:
            raise ValueError(f"rollout needs one key for each token in every layer, but {layer.layer.name} has others")
        step = residual * torch.eye(weights.shape[1], device=weights.device) + (1 - residual) * weights
        if total is not None and layer.grid != grid:
            total = _merge(total, grid, layer.grid, prefix)
        total = step if total is None else step @ total
        grid = layer.grid
    assert total is not None
    return first.to_map(total)


def _merge(total: Tensor, grid: tuple[int, int], smaller: tuple[int, int], prefix: int) -> Tensor:
    """Average the rows (B, prefix + H*W, M) of patch tokens that a pyramid merges."""
    patches = total[:, prefix:].transpose(1, 2).unflatten(2, grid)
    merged = F.adaptive_avg_pool2d(patches, smaller).flatten(2).transpose(1, 2)
    return torch.cat([total[:, :prefix], merged], dim=1)
