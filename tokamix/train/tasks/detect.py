"""Object detection and instance segmentation."""

from typing import Any

from torch import nn

from tokamix.data import AnnotatedImage, DatasetSplits
from tokamix.evaluate.detection import check_detection, measure_ap
from tokamix.predict import Prediction
from tokamix.recipes import Recipe
from tokamix.train.tasks.dense import Dense


class Detect(Dense):
    """Boxes of objects, measured by COCO's box AP; with instance masks, by mask AP."""

    def __init__(self, recipe: Recipe, data: str | DatasetSplits) -> None:
        super().__init__(recipe, data)
        self.masks = recipe.method != "retinanet"
        self.metric = "mask_ap" if self.masks else "box_ap"
        self.metric_names = {"box_ap": "box AP", "mask_ap": "mask AP"} if self.masks else {"box_ap": "box AP"}

    def _check_data(self, network: Any) -> None:
        check_detection(self.splits.val, network.has_masks)

    def evaluate(self, model: nn.Module, loader: Any, pad_to: int | None = None) -> dict[str, float]:
        """Average precisions on a validation set."""
        return measure_ap(model, loader, self.splits.val)

    def ground_truth(self, sample: AnnotatedImage) -> Prediction:
        """The annotations as a prediction."""
        return Prediction(boxes=sample.boxes, labels=sample.labels, masks=sample.masks)
