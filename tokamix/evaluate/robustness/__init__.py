"""Robustness of classifiers: occlusion, attacks, corruptions, calibration and ImageNet's further test sets."""

from tokamix.evaluate.robustness.attacks import fgsm, pgd
from tokamix.evaluate.robustness.calibration import Calibration, measure_calibration
from tokamix.evaluate.robustness.conditions import TESTS, Condition
from tokamix.evaluate.robustness.corruptions import CORRUPTIONS, corrupt
from tokamix.evaluate.robustness.occlusion import drop_patches, occlude_centre
from tokamix.evaluate.robustness.result import ModelRobustness, RobustnessResult
from tokamix.evaluate.robustness.run import evaluate_robustness

__all__ = [
    "CORRUPTIONS",
    "TESTS",
    "Calibration",
    "Condition",
    "ModelRobustness",
    "RobustnessResult",
    "corrupt",
    "drop_patches",
    "evaluate_robustness",
    "fgsm",
    "measure_calibration",
    "occlude_centre",
    "pgd",
]
