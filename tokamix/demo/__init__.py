"""The demo: softmax and five mixers on digits."""

from tokamix.demo.run import (
    ENTRANTS,
    Job,
    run,
)

__all__ = [
    "ENTRANTS",
    "Job",
    "run",
]
