"""SimA: its weights, and the norms of queries and keys that highlight objects (figures 3 and 4 of the paper)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokamix.explain.attention import queries_and_keys
from tokamix.explain.capture import CapturedLayer

EPS = 1e-12


@torch.no_grad()
def sima_weights(layer: CapturedLayer, queries: Tensor | None = None) -> Tensor:
    """Weights (B, heads, Q, M) of SimA, which may be negative: products of l1-normalised queries and keys.

    Args:
        layer: a captured layer with SimA.
        queries: indices (Q,) of the attending tokens, prefix tokens first; None: all.
    """
    if layer.layer.kind != "sima":
        raise ValueError(f"{layer.layer.name} ({layer.layer.kind}) is not SimA")
    q, k = (_normalise(x, getattr(layer.mixer, "norm", "l1")) for x in queries_and_keys(layer))
    return (q if queries is None else q[:, :, queries]) @ k.mT


@torch.no_grad()
def query_key_norms(layer: CapturedLayer, normalise: bool = True) -> tuple[Tensor, Tensor]:
    """The l2 norm of each token's query (B, heads, N) and key (B, heads, M).

    SimA: Simple Softmax-free Attention for Vision Transformers, arXiv 2206.08898, section 4.7, overlays them on the
    image. The norm over all heads is the root of the sum of squares over heads.

    Args:
        layer: a captured layer with SimA or softmax attention.
        normalise: divide each channel by its l1 norm over the tokens first, as SimA does; for softmax attention the
            paper shows both.
    """
    q, k = queries_and_keys(layer)
    if normalise:
        own = getattr(layer.mixer, "norm", "l1") if layer.layer.kind == "sima" else "l1"
        q, k = _normalise(q, own), _normalise(k, own)
    return q.norm(dim=-1), k.norm(dim=-1)


def _normalise(x: Tensor, norm: object) -> Tensor:
    """Divide each channel of x (B, heads, N, D) by its norm over the tokens; only "l2" and None are not l1."""
    return x if norm is None else F.normalize(x, p=2.0 if norm == "l2" else 1.0, dim=-2, eps=EPS)
