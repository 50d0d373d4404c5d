"""Token mixers as modules, called `mixer(x, grid)` on tokens (B, N, C)."""

from tokamix.mixers.sima import SimA, SimAClassAttention
from tokamix.mixers.super_token import SuperTokenAttention

__all__ = ["SimA", "SimAClassAttention", "SuperTokenAttention"]
