"""Models for a recipe and a data set: from scratch, or from weights made for other classes, channels or sizes."""

import json
import re
from pathlib import Path
from typing import Any

import torch
from timm.data import resolve_model_data_config
from torch import nn

from tokamix.checkpoint import load_checkpoint
from tokamix.evaluate.accuracy import statistics
from tokamix.recipes import Recipe
from tokamix.registry import create_model
from tokamix.train.optim import DropPathSchedule


def build_model(
    name: str | None,
    recipe: Recipe,
    num_classes: int,
    channels: int = 3,
    checkpoint: str | Path | None = None,
    pretrained: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """A model, and the arguments with which timm makes the same one again.

    Weights are initialised from the recipe's seed. A checkpoint brings its own where they fit: the classifier of other
    classes is left out, the first convolution fitted to the channels, tables of positions to the image size.

    Args:
        name: of the model; default: the recipe's, or the one that the checkpoint's folder names.
        recipe: gives image size, drop rates and further arguments.
        num_classes: of the data.
        channels: of the images.
        checkpoint: a file, a run's folder or `hf-hub:user/name` to start from.
        pretrained: start from timm's pretrained weights.
    """
    told: dict[str, Any] = {}
    if (config := Path(str(checkpoint)) / "config.json").is_file():  # a folder of ours or timm's says what it holds
        told = json.loads(config.read_text())
    name = name or told.get("architecture") or recipe.model
    if name is None:
        raise ValueError(
            f"the recipe {recipe.name} names no model; give one with --model ; `tokamix models` lists them"
        )
    if recipe.finetune and not (checkpoint or pretrained):
        raise ValueError(
            f"the recipe {recipe.name} starts from trained weights; give them with --checkpoint, or --pretrained"
        )
    arguments = told.get("model_args", {}) if name == told.get("architecture") else {}
    arguments = {**arguments, "in_chans": channels, "img_size": recipe.image_size, **recipe.model_kwargs}
    drops = {"drop_rate": recipe.drop_rate or None, "drop_path_rate": DropPathSchedule.build_rate(recipe)}
    torch.manual_seed(recipe.seed)
    model = _create(name, pretrained, num_classes, arguments, drops)
    if checkpoint is not None:
        load_checkpoint(model, checkpoint)
    return model, arguments


def _create(name: str, pretrained: bool, num_classes: int, arguments: dict[str, Any], drops: dict[str, Any]) -> Any:
    try:
        return create_model(name, pretrained=pretrained, num_classes=num_classes, **drops, **arguments)
    except TypeError as error:
        unknown = re.search(r"unexpected keyword argument '(\w+)'", str(error))
        if unknown is None:
            raise
        if unknown[1] == "img_size":  # a network that takes every size
            del arguments["img_size"]
            return _create(name, pretrained, num_classes, arguments, drops)
        raise ValueError(
            f"{name} takes no argument {unknown[1]!r}; change the recipe, as by --set model_kwargs={{}}"
        ) from error


def data_config(model: nn.Module, recipe: Recipe, channels: int) -> dict[str, Any]:
    """Size, normalisation and crop of the model's images: its own, with what recipe and data say."""
    config = dict(resolve_model_data_config(model))
    config["input_size"] = (channels, recipe.image_size, recipe.image_size)
    config["interpolation"] = recipe.interpolation
    if recipe.crop_pct is not None:
        config["crop_pct"] = recipe.crop_pct
    stated = statistics(config)
    return config | {"mean": stated["mean"], "std": stated["std"]}


def timm_config(
    model: Any, arguments: dict[str, Any], config: dict[str, Any], classes: tuple[str, ...]
) -> dict[str, Any]:
    """What timm and the Hub need beside the weights to make and feed the model again: the content of config.json."""
    dropped = {"url", "file", "source", "hf_hub_id", "hf_hub_filename", "state_dict", "tag", "architecture", "notes"}
    cfg = {
        k: v for k, v in (getattr(model, "pretrained_cfg", None) or {}).items() if v is not None and k not in dropped
    }
    cfg |= {key: config[key] for key in ("input_size", "mean", "std", "interpolation", "crop_pct")}
    cfg |= {"num_classes": len(classes)}
    return {
        "architecture": (getattr(model, "pretrained_cfg", None) or {}).get("architecture", type(model).__name__),
        "num_classes": len(classes),
        "num_features": getattr(model, "num_features", None),
        "label_names": list(classes),
        "model_args": arguments,
        "pretrained_cfg": cfg,
    }
