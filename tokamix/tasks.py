"""Names of the tasks and their methods, for modules that must not import the models."""

from typing import Literal

Task = Literal["classify", "segment", "detect", "dino"]
METHODS: dict[str, tuple[str, ...]] = {
    "segment": ("semantic_fpn", "upernet"),
    "detect": ("retinanet", "mask_rcnn", "cascade_mask_rcnn"),
}
IGNORE_INDEX = 255  # label of pixels that count neither in training nor in evaluation
