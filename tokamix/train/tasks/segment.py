"""Semantic segmentation."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from tokamix.data import AnnotatedImage
from tokamix.evaluate.segmentation import measure_miou
from tokamix.predict import Prediction
from tokamix.predict.draw import Colour, class_colours
from tokamix.train.tasks.dense import Dense


class Segment(Dense):
    """A class for each pixel, measured by the mean IoU of the classes."""

    metric = "miou"
    metric_names: Mapping[str, str] = MappingProxyType({"miou": "mIoU"})

    def evaluate(self, model: nn.Module, loader: Any, pad_to: int | None = None) -> dict[str, float]:
        """Mean IoU and accuracies on a validation set."""
        metrics = measure_miou(model, loader, self.inference)
        return {key: metrics[key] for key in ("miou", "pixel_accuracy", "mean_accuracy")}

    def ground_truth(self, sample: AnnotatedImage) -> Prediction:
        """The annotations as a prediction."""
        assert sample.segmentation is not None
        return Prediction(segmentation=sample.segmentation.long())

    def legend(self, used: set[int]) -> list[tuple[str, Colour]]:
        """Names and colours of the classes that are used."""
        colours = class_colours(self.splits.classes)
        return [(name, colours[i]) for i, name in enumerate(self.splits.classes) if i in used]
