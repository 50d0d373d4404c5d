"""Metrics of trained models: accuracy, mIoU and COCO AP."""

from tokamix.evaluate.accuracy import measure_accuracy
from tokamix.evaluate.detection import CocoAP, check_detection, measure_ap
from tokamix.evaluate.run import evaluate
from tokamix.evaluate.segmentation import MeanIoU, measure_miou

__all__ = ["CocoAP", "MeanIoU", "check_detection", "evaluate", "measure_accuracy", "measure_ap", "measure_miou"]
