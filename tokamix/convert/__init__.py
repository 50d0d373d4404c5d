"""Conversion of trained classifiers to another token mixer, keeping what they have learned."""

from tokamix.convert.report import Conversion, Speed
from tokamix.convert.run import convert

__all__ = ["Conversion", "Speed", "convert"]
