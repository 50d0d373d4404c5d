"""Statistics of a study: intervals, unpaired differences (Welch), several tests (Holm), several looks (alpha spending).

Runs are compared unpaired, because the same seed in two networks has no more in common than two seeds: a single changed
bit gives the full spread (arXiv 2103.04514).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

ALPHA = 0.05  # of each study's claims together, over all looks


class Estimate(NamedTuple):
    """A mean or difference with its standard error and degrees of freedom."""

    value: float
    error: float
    freedom: float

    def interval(self, level: float = 0.95) -> float:
        """Half the width of the confidence interval (Student's t)."""
        return float(_student().ppf((1 + level) / 2, self.freedom)) * self.error

    def p_inside(self, low: float, high: float) -> float:
        """Two-sided p-value of "the true value is not between low and high": small if it is inside, and surely so.

        The larger of two one-sided p-values, as in tests of equivalence (TOST), times two.
        """
        if self.error == 0:
            return 0.0 if low < self.value < high else 1.0
        distances = [(self.value - low) / self.error, (high - self.value) / self.error]
        return min(1.0, 2 * max(float(_student().sf(d, self.freedom)) for d in distances))


def contrast(samples: Sequence[Sequence[float]], weights: Sequence[float]) -> Estimate:
    """The weighted sum of the samples' means, with unequal variances (Welch and Satterthwaite).

    With weights 1 and -1 this is Welch's t-test; with a single weight of 1, the mean.
    """
    if any(len(sample) < 2 for sample in samples):
        raise ValueError("a standard error needs at least 2 runs of each arm")
    means = [math.fsum(sample) / len(sample) for sample in samples]
    # squared standard error of each weighted mean
    parts = [
        weight**2 * math.fsum((x - mean) ** 2 for x in sample) / (len(sample) - 1) / len(sample)
        for sample, mean, weight in zip(samples, means, weights, strict=True)
    ]
    total = math.fsum(parts)
    pooled = math.fsum(part**2 / (len(sample) - 1) for part, sample in zip(parts, samples, strict=True))
    freedom = total**2 / pooled if pooled else float(min(len(sample) for sample in samples) - 1)
    value = math.fsum(weight * mean for weight, mean in zip(weights, means, strict=True))
    return Estimate(value, math.sqrt(total), freedom)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted for their number (Holm's step-down): at most 5 % of studies then have a false positive."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def detectable(sigma: float, n: int, alpha: float = ALPHA, power: float = 0.8) -> float:
    """The smallest difference of two arms that a two-sided t-test finds with this power, from n runs of each.

    Args:
        sigma: standard deviation between the runs of an arm.
        n: runs of each arm; at least 2.
        alpha: significance level.
        power: probability to find the difference.
    """
    scipy, freedom = _scipy(), 2 * n - 2
    limit = float(scipy.t.isf(alpha / 2, freedom))
    low, high = 0.0, 50.0  # in standard errors
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if scipy.nct.sf(limit, freedom, middle) >= power else (middle, high)
    return high * sigma * math.sqrt(2 / n)


def alpha_of_looks(looks: Sequence[int], alpha: float = ALPHA) -> list[float]:
    """The significance level of each look at the growing number of seeds, whose sum is alpha.

    O'Brien and Fleming's spending function (Lan and DeMets 1983) at the fraction of the seeds; the levels are its
    increments, which is valid for any dependence between looks, and slightly conservative.
    """
    z = float(_normal().isf(alpha / 2))
    spent = [2 * float(_normal().sf(z / math.sqrt(n / looks[-1]))) for n in looks]
    return [b - a for a, b in zip([0.0, *spent], spent, strict=False)]


def _student():  # type: ignore[no-untyped-def]
    return _scipy().t


def _normal():  # type: ignore[no-untyped-def]
    return _scipy().norm


def _scipy():  # type: ignore[no-untyped-def]
    try:
        from scipy import stats
    except ImportError:
        raise ImportError("statistics of a study need SciPy; run pip install 'tokamix[study]'") from None
    return stats
