"""The cost of softmax alone: attention with and without it, in the same order of multiplication (SimA, figure 1)."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from tokamix.bench.timing import median_ms

HEAD_DIM = 64


@dataclass
class SoftmaxRow:
    """One size of attention (q kᵀ) v, with softmax and without it."""

    tokens: int
    width: int
    device: str
    softmax_ms: float  # softmax(q kᵀ) v
    products_ms: float  # (q kᵀ) v
    linear_ms: float  # q (kᵀ v), the order that softmax forbids
    share: float  # of softmax in the time of attention

    def as_dict(self) -> dict[str, Any]:
        """The row as a dict, for a CSV file."""
        return asdict(self)


def measure_softmax(side: int, width: int, device: str = "cpu", seconds: float = 0.5) -> SoftmaxRow:
    """Time attention over a grid of side x side tokens, batch 1, plain PyTorch, bfloat16 on a GPU.

    Args:
        side: of the grid of tokens: an image of 16 * side pixels in patches of 16.
        width: channels, in heads of 64.
        device: "cpu" or "cuda".
        seconds: time of each measurement.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    heads, tokens = max(1, width // HEAD_DIM), side * side
    q, k, v = (torch.randn(1, heads, tokens, HEAD_DIM, device=device, dtype=dtype) for _ in range(3))
    with torch.inference_mode():
        times = [
            median_ms(run, device, seconds)
            for run in (
                lambda: (q @ k.mT).softmax(-1) @ v,
                lambda: (q @ k.mT) @ v,
                lambda: q @ (k.mT @ v),
            )
        ]
    softmax, products, linear = times
    return SoftmaxRow(tokens, width, device, softmax, products, linear, share=1 - products / softmax)
