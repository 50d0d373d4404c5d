"""The demo: softmax attention and five other mixers, compared on handwritten digits."""

from tokamix.demo.run import CANDIDATES, run_demo

__all__ = ["CANDIDATES", "run_demo"]
