"""Studies: the papers' claims and fair comparisons as experiments with seeds, intervals and verdicts."""

from tokamix.study.page import render_page
from tokamix.study.run import run_study
from tokamix.study.schema import Study, list_studies, load_study

__all__ = ["Study", "list_studies", "load_study", "render_page", "run_study"]
