"""Segmenters and detectors in folders: what config.json says of one, and making it again."""

import json
import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokamix.checkpoint import read_checkpoint, unwrap
from tokamix.dense import create_detector, create_segmenter

_log = logging.getLogger("tokamix")
Config = dict[str, Any]


def read_config(source: str | Path) -> Config | None:
    """config.json of a folder, or beside a file, that holds a segmenter or a detector; None where it does not."""
    told = config_of(source)
    return told if "method" in told else None


def config_of(source: str | Path) -> Config:
    """What a folder, or that of a file, says that it holds, timm's classifiers and ours; {} where it says nothing."""
    source = Path(source)
    path = (source.parent if source.is_file() else source) / "config.json"
    if not path.is_file():
        return {}
    try:
        told = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return told if isinstance(told, dict) else {}


def create_dense(config: Config, **start: Any) -> Any:
    """The model that a config describes, with fresh weights.

    Args:
        config: `task`, `method`, `neck`, `backbone`, `num_classes`, `method_args` and `backbone_args`.
        start: further arguments of the backbone, such as `checkpoint`, `pretrained` and `drop_path`.
    """
    create = create_segmenter if config["task"] == "segment" else create_detector
    arguments = {**config["method_args"], **config["backbone_args"], **start}
    return create(config["method"], config["backbone"], config["num_classes"], neck=config["neck"], **arguments)


def load_dense(folder: str | Path) -> tuple[Any, Config]:
    """The segmenter or detector of a run's folder with its best weights, in evaluation mode, and its config."""
    folder = Path(folder)
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give the run's folder, {folder.parent}")
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no run {folder}")
    config = read_config(folder)
    if config is None:
        raise ValueError(f"{folder} holds no segmenter or detector; `tokamix train --task segment` makes one")
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"{folder} holds no model.safetensors; has the run finished its first evaluation?")
    model = create_dense(config)
    fresh = load_weights(model, folder)
    if fresh:
        raise ValueError(f"{folder}: the weights have nothing for {len(fresh)} parameters, for one {fresh[0]}")
    return model.eval(), config


@torch.no_grad()
def load_weights(model: nn.Module, source: str | Path) -> list[str]:
    """Take every weight that fits by name and shape, and return the names of those that keep their initial values."""
    state, own = unwrap(read_checkpoint(source)), model.state_dict()
    fitting = {name: value for name, value in state.items() if name in own and own[name].shape == value.shape}
    model.load_state_dict(fitting, strict=False)
    return [name for name in own if name not in fitting]
