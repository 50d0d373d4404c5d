"""Measuring trained models."""

from tokamix.evaluate.accuracy import accuracy, evaluate
from tokamix.evaluate.detection import CocoAP, check_detection
from tokamix.evaluate.segmentation import MeanIoU

__all__ = ["CocoAP", "MeanIoU", "accuracy", "check_detection", "evaluate"]
