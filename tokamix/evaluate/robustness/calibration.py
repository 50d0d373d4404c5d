"""Calibration: whether a model that is 80 % confident is right in 80 % of the cases."""

from typing import NamedTuple

import torch
from torch import Tensor

BINS = 15  # as in "On Calibration of Modern Neural Networks", arXiv 1706.04599


class Calibration(NamedTuple):
    """Calibration of a model on a data set.

    Attributes:
        ece: expected calibration error in percent, the mean distance of confidence and accuracy, by torchmetrics.
        confidence: mean confidence in each bin, in percent; NaN where there is no image.
        accuracy: likewise.
        images: number of images in each bin.
    """

    ece: float
    confidence: Tensor
    accuracy: Tensor
    images: Tensor


def measure_calibration(confidence: Tensor, correct: Tensor, bins: int = BINS) -> Calibration:
    """Compare the confidence of predictions, the largest probability, with how often they are correct.

    Args:
        confidence: (N,) from 0 to 1.
        correct: (N,) booleans.
        bins: of equal width.
    """
    try:
        from torchmetrics.functional.classification import binary_calibration_error
    except ImportError:
        raise ImportError("calibration needs torchmetrics: pip install 'tokamix[robustness]'") from None
    # the binary form takes the confidences as they are; the multiclass one would need all probabilities in memory
    ece = binary_calibration_error(confidence, correct.long(), n_bins=bins, norm="l1")
    edges = torch.linspace(0, 1, bins + 1, device=confidence.device)
    place = (torch.bucketize(confidence, edges, right=True) - 1).clamp(0, bins - 1)
    count, sums, hits = (
        torch.zeros(bins, device=confidence.device).index_add_(0, place, values)
        for values in (torch.ones_like(confidence), confidence, correct.to(confidence.dtype))
    )
    return Calibration(100 * float(ece), 100 * sums / count, 100 * hits / count, count.long())
