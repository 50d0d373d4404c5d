"""The public context broadcasting operator."""

from torch import Tensor

from . import reference

KINDS = ("cb", "gate", "hybrid")


def broadcast_context(x: Tensor, scale: Tensor | None = None, kind: str = "cb") -> Tensor:
    """Context broadcasting: every token moves half way to the average token.

    Scratching Visual Transformer's Back with Uniform Attention, arXiv 2210.08457. The supplement's forms, with x_0 the
    first (class) token:

    - `cb`: (x_i + mean) / 2. The class token, if there is one, is part of the mean. With `scale`, CB_S:
      (x_i + scale * mean) / 2.
    - `gate`: x_i * (x_0 + 1).
    - `hybrid`: x_i * x_0 + cb(x_i).

    Args:
        x: tokens (B, N, C), the class token first where there is one.
        scale: (C,) per-channel weight of the mean (CB_S). The paper does not print its form; at 1 this one is CB.
        kind: one of "cb", "gate", "hybrid".
    """
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind!r} of context broadcasting: choose one of {', '.join(KINDS)}")
    if x.ndim != 3:
        raise ValueError(f"broadcast_context needs tokens of shape (B, N, C), got {tuple(x.shape)}")
    if scale is not None and scale.shape != x.shape[-1:]:
        raise ValueError(f"scale must have one value per channel, ({x.shape[-1]},), got {tuple(scale.shape)}")
    return reference.broadcast_context(x, scale, kind)
