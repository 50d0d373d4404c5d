"""Visual explanations of models: the papers' figures for any image and model."""

from tokamix.explain.capture import Capture, CapturedLayer, Layer, capture
from tokamix.explain.explainer import Explainer, Explanation, load_explainer
from tokamix.explain.questions import QUESTIONS, Answer, Question
from tokamix.explain.run import ExplainResult, explain
from tokamix.explain.statistics import Statistics, collect_statistics

__all__ = [
    "QUESTIONS",
    "Answer",
    "Capture",
    "CapturedLayer",
    "ExplainResult",
    "Explainer",
    "Explanation",
    "Layer",
    "Question",
    "Statistics",
    "capture",
    "collect_statistics",
    "explain",
    "load_explainer",
]
