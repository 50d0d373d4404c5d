"""Faster execution: regional compilation and CUDA graphs."""

from tokamix.compile.blocks import compile_blocks, repeated_blocks
from tokamix.compile.graphs import Graphed, Recording, capture_graph, graphed

__all__ = ["Graphed", "Recording", "capture_graph", "compile_blocks", "graphed", "repeated_blocks"]
