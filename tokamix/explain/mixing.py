"""Questions for every mixer: the row of its mixing matrix, and how far it mixes.

Softmax attention, SimA, super tokens and weight mixing have explicit weights. For all others the weight between two
tokens is the norm of the derivative of one token's output by the other's input (a block of the Jacobian).
"""

import torch
from torch import Tensor

from tokamix.explain import attention, sima, super_token, weight_mixing
from tokamix.explain.capture import CapturedLayer, Pair
from tokamix.explain.receptive_field import probe_directions

METHODS = ("weights", "jacobian")
WEIGHTS = {
    "softmax": attention.attention_weights,
    "sima": sima.sima_weights,
    "super_token": super_token.super_token_weights,
    "weight_mixing": weight_mixing.composed_weights,
}
PROBES = 16  # random directions from which the norm of a derivative is estimated
SAMPLES, SAMPLE_PROBES = 3, 2  # distances by derivatives: tokens along each side of a sampled grid, and their probes
COPIES = 64  # inputs of a mixer that are differentiated together


def has_weights(layer: CapturedLayer) -> bool:
    """Whether the mixer has explicit weights between tokens."""
    if layer.layer.kind == "super_token":
        return not isinstance(layer.mixer.refine, torch.nn.Sequential)
    return layer.layer.kind in WEIGHTS


def count_heads(layer: CapturedLayer) -> int:
    """Number of heads of `mixing_rows`; 1 for mixers without explicit weights."""
    if not has_weights(layer):
        return 1
    return getattr(layer.mixer.refine if layer.layer.kind == "super_token" else layer.mixer, "num_heads", 1)


def mixing_rows(
    layer: CapturedLayer, queries: Tensor, method: str | None = None, probes: int | None = PROBES
) -> Tensor:
    """Rows (B, heads, Q, H, W) of the mixing matrix: the weight of each patch token for some receiving tokens.

    Args:
        layer: a captured layer.
        queries: indices (Q,) of the receiving tokens, prefix tokens first.
        method: "weights", the mixer's own, with their signs; "jacobian", norms of derivatives, with one head for all;
            None: weights where the mixer has them.
        probes: random directions from which the norms are estimated; None: exact, from all channels.
    """
    method = method or ("weights" if has_weights(layer) else "jacobian")
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}: choose one of {', '.join(METHODS)}")
    if method == "jacobian":
        return layer.to_map(jacobian_rows(layer, queries, probes)).unsqueeze(1)
    if not has_weights(layer):
        raise ValueError(f"{layer.layer.name} ({layer.layer.kind}) has no explicit weights; use method='jacobian'")
    return attention.on_grid(layer, WEIGHTS[layer.layer.kind](layer, queries))


def mixing_row(
    layer: CapturedLayer, token: Pair | None = None, method: str | None = None, probes: int | None = PROBES
) -> Tensor:
    """The row (B, heads, H, W) of one token (row, column), None: the middle one; see `mixing_rows`."""
    return mixing_rows(layer, torch.tensor([layer.index_of(token)], device=layer.x.device), method, probes)[:, :, 0]


def jacobian_rows(layer: CapturedLayer, queries: Tensor, probes: int | None = PROBES) -> Tensor:
    """Norms (B, Q, N) of the derivatives of the outputs of tokens `queries` by the mixer's input tokens.

    Every direction of every token is one copy of the input in a batch, so one backward pass serves many.
    """
    directions = probe_directions(layer.x.shape[-1], probes, layer.x)
    pairs = torch.cartesian_prod(queries, torch.arange(len(directions), device=layer.x.device))
    squares = layer.x.new_zeros(len(layer.x), len(pairs), layer.x.shape[1])
    with torch.enable_grad():
        for image in range(len(layer.x)):
            for part in torch.arange(len(pairs), device=layer.x.device).split(COPIES):
                x = layer.x[image].expand(len(part), -1, -1).clone().requires_grad_()
                out = layer.mix(x, image)
                outputs = out[torch.arange(len(part)), pairs[part, 0]]  # (copies, C)
                (gradient,) = torch.autograd.grad((outputs * directions[pairs[part, 1]]).sum(), x)
                squares[image, part] = gradient.square().sum(-1)
    return squares.unflatten(1, (len(queries), -1)).sum(2).sqrt()


def mixing_distance(layer: CapturedLayer, method: str | None = None) -> Tensor:
    """Mean mixing distance (B, heads) in pixels: how far away tokens are, weighted by the mixing weights.

    AMixer's supplement, figure 1: the mean over tokens i of sum_j M_ij |i - j|. Here weights count by their absolute
    value and each row is divided by its sum, so that mixers whose rows do not sum to 1 compare with the others. With
    explicit weights all tokens are averaged, with derivatives 9 of a regular grid.
    """
    method = method or ("weights" if has_weights(layer) else "jacobian")
    patches = torch.arange(layer.prefix, layer.x.shape[1], device=layer.x.device)
    if method == "jacobian":
        patches = patches.unflatten(0, layer.grid)
        for dim, size in enumerate(layer.grid):
            count = min(size, SAMPLES)
            places = ((torch.arange(count, device=patches.device) + 0.5) * size / count).long()
            patches = patches.index_select(dim, places)
        patches = patches.flatten()
    size = max(1, attention.CHUNK // (layer.x.shape[1] * count_heads(layer) * len(layer.x)))
    parts = [_distances(layer, part, method) for part in patches.split(size)]
    return torch.cat(parts, dim=-1).mean(-1)


def _distances(layer: CapturedLayer, queries: Tensor, method: str) -> Tensor:
    """Mean distance (B, heads, Q) of the sources of each query, in pixels."""
    rows = mixing_rows(layer, queries, method, SAMPLE_PROBES).abs()
    (height, width), (down, right) = layer.grid, layer.stride
    number = queries - layer.prefix
    y, x = (torch.arange(n, device=rows.device) * s for n, s in ((height, down), (width, right)))
    dy = y[None, :] - (number // width * down)[:, None]  # (Q, H)
    dx = x[None, :] - (number % width * right)[:, None]  # (Q, W)
    distance = torch.hypot(dy[:, :, None], dx[:, None, :]).to(rows.dtype)  # (Q, H, W)
    return (rows * distance).sum((-2, -1)) / rows.sum((-2, -1)).clamp_min(torch.finfo(rows.dtype).tiny)
