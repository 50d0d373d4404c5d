"""The papers' operators as tensor functions without parameters."""

from tokamix.ops.context_broadcast.op import broadcast_context

__all__ = ["broadcast_context"]
