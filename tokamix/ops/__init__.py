"""The papers' operators as tensor functions without parameters."""

from tokamix.ops.context_broadcast.op import broadcast_context
from tokamix.ops.sima.op import sima_attention, sima_class_attention, sima_self_attention
from tokamix.ops.super_token.op import super_token_sample, super_token_scatter

__all__ = [
    "broadcast_context",
    "sima_attention",
    "sima_class_attention",
    "sima_self_attention",
    "super_token_sample",
    "super_token_scatter",
]
