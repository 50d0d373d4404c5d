"""Visual explanations of models: the papers' figures for any image and model."""

from tokamix.explain.capture import Capture, CapturedLayer, Layer, capture
from tokamix.explain.explainer import Explainer, Explanation, load_explainer
from tokamix.explain.questions import QUESTIONS, Answer, Question

__all__ = [
    "QUESTIONS",
    "Answer",
    "Capture",
    "CapturedLayer",
    "Explainer",
    "Explanation",
    "Layer",
    "Question",
    "capture",
    "load_explainer",
]
