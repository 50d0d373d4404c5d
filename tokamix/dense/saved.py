"""Segmenters and detectors from config.json."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokamix.checkpoint import read_checkpoint, unwrap
from tokamix.dense import create_detector, create_segmenter

Config = dict[str, Any]


def create_dense(config: Config, **start: Any) -> Any:
    """The model that a config describes, with fresh weights.

    Args:
        config: `task`, `method`, `neck`, `backbone`, `num_classes`, `method_args` and `backbone_args`.
        start: further arguments of the backbone, such as `checkpoint`, `pretrained` and `drop_path`.
    """
    create = create_segmenter if config["task"] == "segment" else create_detector
    arguments = {**config["method_args"], **config["backbone_args"], **start}
    return create(config["method"], config["backbone"], config["num_classes"], neck=config["neck"], **arguments)


@torch.no_grad()
def load_weights(model: nn.Module, source: str | Path) -> list[str]:
    """Take every weight that fits by name and shape, and return the names of those that keep their initial values."""
    state, own = unwrap(read_checkpoint(source)), model.state_dict()
    fitting = {name: value for name, value in state.items() if name in own and own[name].shape == value.shape}
    model.load_state_dict(fitting, strict=False)
    return [name for name in own if name not in fitting]
