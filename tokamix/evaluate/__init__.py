"""Metrics of trained models: accuracy, mIoU and COCO AP, and k-NN and linear accuracy of features."""

from tokamix.evaluate.accuracy import measure_accuracy
from tokamix.evaluate.detection import CocoAP, check_detection, measure_ap
from tokamix.evaluate.knn import measure_knn
from tokamix.evaluate.linear import LinearResult, measure_linear
from tokamix.evaluate.run import evaluate
from tokamix.evaluate.segmentation import MeanIoU, measure_miou

__all__ = [
    "CocoAP",
    "LinearResult",
    "MeanIoU",
    "check_detection",
    "evaluate",
    "measure_accuracy",
    "measure_ap",
    "measure_knn",
    "measure_linear",
    "measure_miou",
]
