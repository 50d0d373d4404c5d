"""Crash-safe training runs."""

from tokamix.train.run import RunResult, train

__all__ = ["RunResult", "train"]
