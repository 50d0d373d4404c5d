"""Swap the mixer of an existing model, or insert context broadcasting into it."""

from tokamix.swap.changes import load_hf
from tokamix.swap.context_broadcast import insert_context_broadcast, remove_context_broadcast
from tokamix.swap.mixer import swap_mixer
from tokamix.swap.report import SwapReport

__all__ = ["SwapReport", "insert_context_broadcast", "load_hf", "remove_context_broadcast", "swap_mixer"]
