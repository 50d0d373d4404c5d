"""Create segmenters and detectors from config.json and load their weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokamix.checkpoint import read_checkpoint, unwrap
from tokamix.dense.boxes import Sizes, Target
from tokamix.dense.create import create_detector, create_segmenter
from tokamix.dense.detector import Detector, split_detections
from tokamix.dense.segmenter import Segmenter
from tokamix.runtimes import ExportedModel

Config = dict[str, Any]


def create_dense_model(config: Config, **backbone_kwargs: Any) -> Segmenter | Detector:
    """Create the model that a config describes, with initial weights.

    Args:
        config: has `task`, `method`, `neck`, `backbone`, `num_classes`, `method_args` and `backbone_args`.
        backbone_kwargs: further arguments of the backbone, such as `checkpoint`, `pretrained` and `drop_path`.
    """
    create = create_segmenter if config["task"] == "segment" else create_detector
    kwargs = {**config["method_args"], **config["backbone_args"], **backbone_kwargs}
    return create(config["method"], config["backbone"], config["num_classes"], neck=config["neck"], **kwargs)


@torch.no_grad()
def load_matching_weights(model: nn.Module, source: str | Path) -> list[str]:
    """Load every weight that matches by name and shape; return the names of those that keep their initial values."""
    state, own = unwrap(read_checkpoint(source)), model.state_dict()
    matching = {name: value for name, value in state.items() if name in own and own[name].shape == value.shape}
    model.load_state_dict(matching, strict=False)
    return [name for name in own if name not in matching]


class ExportedDetector(nn.Module):
    """An exported detector with the interface of `Detector` for inference."""

    def __init__(self, model: ExportedModel) -> None:
        super().__init__()
        self.model, self.has_masks = model, "masks" in model.metadata["outputs"]

    def forward(
        self, images: Tensor | Sequence[Tensor], targets: None = None, sizes: Sizes | None = None
    ) -> list[Target]:
        """Boxes, labels, scores and masks of each image; see `Detector.forward`."""
        found = []
        for i, image in enumerate(images):  # files take one image at a time
            height, width = image.shape[-2:]
            given = None if sizes is None else sizes[i : i + 1]
            found += split_detections(self.model.outputs(image[None]), [(height, width)], given)
        return found
