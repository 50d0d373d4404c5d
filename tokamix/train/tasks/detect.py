"""Object detection and instance segmentation."""

from typing import Any

from torch import nn

from tokamix.data.annotated.datasets import AnnotatedImage, DatasetSplits
from tokamix.evaluate.detection import measure_ap
from tokamix.predict import Prediction
from tokamix.recipes import Recipe
from tokamix.train.tasks.dense import Dense


class Detect(Dense):
    """Things with their boxes, measured by COCO's average precision; with masks, by that of the masks."""

    def __init__(self, recipe: Recipe, opened: DatasetSplits, config: dict[str, Any]) -> None:
        super().__init__(recipe, opened, config)
        self.masks = recipe.method != "retinanet"
        self.metric = "mask_ap" if self.masks else "box_ap"
        self.shown = {"box_ap": "box AP", "mask_ap": "mask AP"} if self.masks else {"box_ap": "box AP"}

    def evaluate(self, model: nn.Module, loader: Any, batch_size: int | None = None) -> dict[str, float]:
        """Average precisions on a validation set."""
        return measure_ap(model, loader, self.opened.val)

    def truth(self, scene: AnnotatedImage) -> Prediction:
        """What a perfect model would answer."""
        return Prediction(boxes=scene.boxes, labels=scene.labels, masks=scene.masks)
