"""Training: one engine, tasks that plug into it, runs that nothing is lost of."""

from tokamix.train.run import RunResult, train

__all__ = ["RunResult", "train"]
