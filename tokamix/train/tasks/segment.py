"""Semantic segmentation."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn

from tokamix.data.annotated.datasets import AnnotatedImage
from tokamix.evaluate.segmentation import measure_miou
from tokamix.predict import Prediction
from tokamix.predict.draw import Colour, class_colours
from tokamix.train.tasks.dense import Dense


class Segment(Dense):
    """A class for each pixel, measured by the mean IoU of the classes."""

    metric = "miou"
    shown: Mapping[str, str] = MappingProxyType({"miou": "mIoU"})

    def evaluate(self, model: nn.Module, loader: Any, batch_size: int | None = None) -> dict[str, float]:
        """Mean IoU and accuracies on a validation set."""
        found = measure_miou(model, loader, self.inference)
        return {key: found[key] for key in ("miou", "pixel_accuracy", "mean_accuracy")}

    def truth(self, scene: AnnotatedImage) -> Prediction:
        """What a perfect model would answer."""
        assert scene.segmentation is not None
        return Prediction(segmentation=scene.segmentation.long())

    def legend(self, used: set[int]) -> list[tuple[str, Colour]]:
        """What the colours of classes mean."""
        colours = class_colours(self.opened.classes)
        return [(name, colours[i]) for i, name in enumerate(self.opened.classes) if i in used]
