"""Confidence intervals of accuracies, over the images; the spread over training seeds is not part of them."""

import math

from torch import Tensor

Z = 1.96  # 95 %


def mean_interval(scores: Tensor) -> tuple[float, float, float]:
    """Mean of per-image scores from 0 to 1 in percent, and the ends of its 95 % interval.

    Scores are 0 or 1 (Wilson's interval), or averages over several conditions (normal approximation).
    """
    n, mean = len(scores), scores.double().mean().item()
    if ((scores == 0) | (scores == 1)).all():
        centre = (mean + Z**2 / (2 * n)) / (1 + Z**2 / n)
        half = Z / (1 + Z**2 / n) * math.sqrt(mean * (1 - mean) / n + Z**2 / (4 * n**2))
    else:
        centre, half = mean, Z * scores.double().std().item() / math.sqrt(n)
    return 100 * mean, 100 * max(centre - half, 0), 100 * min(centre + half, 1)


def difference_interval(scores: Tensor, others: Tensor) -> tuple[float, float, float]:
    """Mean difference of the scores of two models on the same images in percentage points, and its 95 % interval."""
    differences = scores.double() - others.double()
    mean, n = differences.mean().item(), len(differences)
    half = Z * differences.std().item() / math.sqrt(n) if n > 1 else math.inf
    return 100 * mean, 100 * (mean - half), 100 * (mean + half)
