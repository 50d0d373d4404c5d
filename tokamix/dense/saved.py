"""Segmenters and detectors saved in a run's folder: config.json describes the model, model.safetensors holds it."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokamix.checkpoint import read_checkpoint, unwrap
from tokamix.dense._detector import Detector
from tokamix.dense.create import create_detector, create_segmenter
from tokamix.dense.segmenter import Segmenter

Config = dict[str, Any]


def load_config(source: str | Path) -> Config:
    """Read config.json in a folder, or beside a file, of any model of ours or timm's; {} if there is none."""
    source = Path(source)
    path = (source.parent if source.is_file() else source) / "config.json"
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    return config if isinstance(config, dict) else {}


def load_dense_config(source: str | Path) -> Config | None:
    """Read config.json of a segmenter or detector; None if the folder holds neither."""
    config = load_config(source)
    return config if "method" in config else None


def create_dense_model(config: Config, **backbone_kwargs: Any) -> Segmenter | Detector:
    """Create the model that a config describes, with initial weights.

    Args:
        config: has `task`, `method`, `neck`, `backbone`, `num_classes`, `method_args` and `backbone_args`.
        backbone_kwargs: further arguments of the backbone, such as `checkpoint`, `pretrained` and `drop_path`.
    """
    create = create_segmenter if config["task"] == "segment" else create_detector
    kwargs = {**config["method_args"], **config["backbone_args"], **backbone_kwargs}
    return create(config["method"], config["backbone"], config["num_classes"], neck=config["neck"], **kwargs)


def load_dense_model(folder: str | Path) -> tuple[Any, Config]:
    """Load the segmenter or detector of a run's folder with its best weights, in evaluation mode, and its config."""
    folder = Path(folder)
    if folder.is_file():
        raise ValueError(f"{folder} is a file; give the run's folder, {folder.parent}")
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no run {folder}")
    config = load_dense_config(folder)
    if config is None:
        raise ValueError(f"{folder} holds no segmenter or detector; `tokamix train --task segment` makes one")
    if not (folder / "model.safetensors").is_file():
        raise FileNotFoundError(f"{folder} holds no model.safetensors; has the run finished its first evaluation?")
    model = create_dense_model(config)
    if missing := load_matching_weights(model, folder):
        raise ValueError(f"{folder}: the checkpoint lacks {len(missing)} parameters, for example {missing[0]}")
    return model.eval(), config


@torch.no_grad()
def load_matching_weights(model: nn.Module, source: str | Path) -> list[str]:
    """Load every weight that matches by name and shape; return the names of those that keep their initial values."""
    state, own = unwrap(read_checkpoint(source)), model.state_dict()
    matching = {name: value for name, value in state.items() if name in own and own[name].shape == value.shape}
    model.load_state_dict(matching, strict=False)
    return [name for name in own if name not in matching]
