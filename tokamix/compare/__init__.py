"""Fair comparisons: the same body, data and recipe, trained once for each token mixer."""

from tokamix.compare.candidate import Candidate
from tokamix.compare.report import Report
from tokamix.compare.run import Comparison, compare

__all__ = ["Candidate", "Comparison", "Report", "compare"]
