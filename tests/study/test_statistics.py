"""Statistics against SciPy and values computed by hand."""

import math

import pytest
from scipy import stats

from tokamix.study.statistics import alpha_of_looks, contrast, detectable, holm

A, B = [76.9, 77.1, 76.6, 77.4], [76.1, 76.0, 76.9]


def test_mean_interval() -> None:
    """Mean 2, standard deviation 1, n 3: 4.302653 (Student's t with 2 degrees of freedom) / sqrt(3)."""
    mean = contrast([[1.0, 2.0, 3.0]], [1.0])
    assert (mean.value, mean.freedom) == (2.0, 2.0)
    assert mean.error == pytest.approx(1 / math.sqrt(3))
    assert mean.interval() == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


def test_difference_is_welchs() -> None:
    ours, theirs = contrast([A, B], [1, -1]), stats.ttest_ind(A, B, equal_var=False)
    assert ours.freedom == pytest.approx(theirs.df)
    low, high = theirs.confidence_interval(0.95)
    assert ours.value - ours.interval() == pytest.approx(low)
    assert ours.value + ours.interval() == pytest.approx(high)
    assert ours.p_inside(0, math.inf) == pytest.approx(theirs.pvalue)


def test_difference_of_differences() -> None:
    """(a - b) - (c - d): the squared errors add up."""
    parts = [contrast([x], [1.0]) for x in (A, B, A, B)]
    whole = contrast([A, B, A, B], [1, -1, -1, 1])
    assert whole.value == pytest.approx(0)
    assert whole.error == pytest.approx(math.sqrt(sum(p.error**2 for p in parts)))


def test_equivalence_is_tost() -> None:
    difference = contrast([A, B], [1, -1])
    one_sided = [stats.ttest_ind([x + s for x in A], B, equal_var=False) for s in (2, -2)]
    p = max(
        one_sided[0].pvalue / 2, 1 - one_sided[1].pvalue / 2 if one_sided[1].statistic > 0 else one_sided[1].pvalue / 2
    )
    assert difference.p_inside(-2, 2) == pytest.approx(2 * p)
    assert difference.p_inside(-0.1, 0.1) == 1.0
    assert contrast([[1.0, 1.0], [1.0, 1.0]], [1, -1]).p_inside(-0.5, 0.5) == 0.0


def test_inside_agrees_with_the_interval() -> None:
    """p <= 0.05 exactly if the 95 % interval lies inside the range."""
    difference = contrast([A, B], [1, -1])
    edge = difference.value - difference.interval()
    assert difference.p_inside(edge - 1e-6, math.inf) < 0.05 < difference.p_inside(edge + 1e-6, math.inf)


def test_holm_by_hand() -> None:
    """Sorted .01 .02 .03 .04: times 4, 3, 2, 1 = .04 .06 .06 .04, then never falling."""
    assert holm([0.03, 0.01, 0.04, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_alpha_of_looks() -> None:
    """O'Brien-Fleming's spending at 3/8, 5/8 and 1: 2 - 2 Phi(1.959964 / sqrt(t)) = .00137, .01317, .05."""
    assert alpha_of_looks([3, 5, 8]) == pytest.approx([0.00137, 0.0118, 0.03683], abs=2e-5)
    assert sum(alpha_of_looks([3, 4, 10])) == pytest.approx(0.05)
    assert alpha_of_looks([3]) == pytest.approx([0.05])


def test_one_run_has_no_error() -> None:
    with pytest.raises(ValueError, match="at least 2 runs"):
        contrast([[1.0], [2.0, 3.0]], [1, -1])


@pytest.mark.parametrize(("n", "difference"), [(3, 0.92), (5, 0.61), (10, 0.40), (37, 0.20)])
def test_detectable_difference(n: int, difference: float) -> None:
    """Seeds that a two-sided t-test needs at 5 % for a power of 80 %, with a standard deviation of 0.3."""
    assert detectable(0.3, n) == pytest.approx(difference, abs=0.005)
    assert detectable(0.3, n, alpha=0.01) > detectable(0.3, n)
