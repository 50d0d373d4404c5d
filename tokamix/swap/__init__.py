"""Another mixer, or context broadcasting, in a model that exists."""

from tokamix.swap._swap import (
    QKVSimA,
    SimAProduct,
    SwapReport,
    insert_context_broadcast,
    remove_context_broadcast,
    swap_mixer,
)

__all__ = [
    "QKVSimA",
    "SimAProduct",
    "SwapReport",
    "insert_context_broadcast",
    "remove_context_broadcast",
    "swap_mixer",
]
