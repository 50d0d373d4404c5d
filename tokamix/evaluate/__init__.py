"""Measuring trained models."""

from tokamix.evaluate.accuracy import accuracy, evaluate

__all__ = ["accuracy", "evaluate"]
