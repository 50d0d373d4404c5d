"""Models for a recipe and a data set: from scratch, or from weights made for other classes, channels or sizes."""

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokamix.checkpoint import load_checkpoint, read_checkpoint, unwrap
from tokamix.data.annotated.datasets import DatasetSplits
from tokamix.dense.saved import create_dense_model, load_matching_weights
from tokamix.inference import InferenceConfig, read_config
from tokamix.models._registry import create_model
from tokamix.recipes import Recipe
from tokamix.train.loop.optim import DropPathSchedule

_log = logging.getLogger("tokamix")
# values of a recipe that also decide how a trained segmenter or detector is used
INFERENCE = ("scale", "interpolation", "window", "window_stride", "test_scales", "test_flip")


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
    told = read_config(checkpoint) if checkpoint is not None else {}
    if "method" in told:
        raise ValueError(f"{checkpoint} holds no classifier, but {told['method']} for the task {told['task']}")
    name = _name(name, told.get("architecture"), recipe, checkpoint, pretrained)
    arguments = told.get("model_args", {}) if name == told.get("architecture") else {}
    arguments = {**arguments, "in_chans": channels, "img_size": recipe.image_size, **recipe.model_kwargs}
    drops = {"drop_rate": recipe.drop_rate or None, "drop_path_rate": DropPathSchedule.build_rate(recipe)}
    torch.manual_seed(recipe.seed)
    model = _create(name, pretrained, num_classes, arguments, drops)
    if checkpoint is not None:
        load_checkpoint(model, checkpoint)
    return model, arguments


def build_dense(
    model: str | nn.Module | None,
    recipe: Recipe,
    data: DatasetSplits,
    checkpoint: str | Path | None = None,
    pretrained: bool = False,
) -> tuple[Any, dict[str, Any]]:
    """A segmenter or detector, and what config.json says of it.

    Weights are initialised from the recipe's seed. The checkpoint of a classifier brings the backbone's. That of a
    segmenter or detector brings all that fit where the method is the same, otherwise the backbone's.

    Args:
        model: name of the backbone; default: the recipe's, or the one that the checkpoint's folder names.
        recipe: gives method, neck, stochastic depth and further arguments.
        data: gives the classes.
        checkpoint: a file, a run's folder or `hf-hub:user/name` to start from.
        pretrained: start from timm's pretrained weights of the backbone.
    """
    if isinstance(model, nn.Module):
        raise ValueError(f"task {recipe.task} builds its model itself; give the name of a backbone")
    told = read_config(checkpoint) if checkpoint is not None else {}
    same = told.get("method") == recipe.method
    name = _name(model, told.get("architecture") or told.get("backbone"), recipe, checkpoint, pretrained)
    known: dict[str, Any] = told.get("model_args") or told.get("backbone_args") or {}
    own = known if name == told.get("architecture", told.get("backbone")) else {}
    config: dict[str, Any] = {
        "task": recipe.task,
        "method": recipe.method,
        "neck": recipe.neck,
        "backbone": name,
        "num_classes": len(data.classes),
        "label_names": list(data.classes),
        "method_args": dict(recipe.method_kwargs),
        "backbone_args": {**own, **recipe.model_kwargs},
    }
    torch.manual_seed(recipe.seed)
    body = unwrap(read_checkpoint(checkpoint)) if checkpoint is not None and not same else None
    if body and "method" not in told and any(parameter.startswith("backbone.body.") for parameter in body):
        _log.warning("%s says nothing of its method: the backbone alone is taken; give the run's folder", checkpoint)
    start = {"pretrained": pretrained, "checkpoint": body}
    try:
        network = create_dense_model(config, drop_path=DropPathSchedule.build_rate(recipe), **start)
    except TypeError as error:
        raise ValueError(
            f"neither {recipe.method} nor {name} takes an argument {_unknown(error)!r}; change the recipe's"
            " method_kwargs, model_kwargs or drop_path"
        ) from error
    if same and checkpoint is not None:
        fresh = load_matching_weights(network, checkpoint)
        if lost := [parameter for parameter in fresh if parameter.startswith("backbone.")]:
            raise ValueError(f"{checkpoint} does not fit {name}: it has nothing for {len(lost)} weights as {lost[0]}")
        for parameter in fresh:
            _log.warning("%s keeps its initial values: the checkpoint has none of that shape", parameter)
    inference = InferenceConfig.from_model(
        network.backbone.body,
        data.classes,
        task=recipe.task,
        category_ids=tuple(data.train.category_ids),
        **{key: getattr(recipe, key) for key in INFERENCE},
    )
    return network, config | {"inference": inference.to_dict()}


def _unknown(error: TypeError) -> str:
    """The argument that a function does not take; other errors are raised again."""
    found = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if found is None:
        raise error
    return found[1]


def _name(given: str | None, told: str | None, recipe: Recipe, checkpoint: str | Path | None, pretrained: bool) -> str:
    """The model's name: the one that is given, else the checkpoint's, else the recipe's."""
    name = given or told or recipe.model
    if name is None:
        raise ValueError(
            f"the recipe {recipe.name} names no model; give one with --model ; `tokamix models` lists them"
        )
    if recipe.finetune and not (checkpoint or pretrained):
        raise ValueError(
            f"the recipe {recipe.name} starts from trained weights; give them with --checkpoint, or --pretrained"
        )
    return name


def _create(name: str, pretrained: bool, num_classes: int, arguments: dict[str, Any], drops: dict[str, Any]) -> Any:
    try:
        return create_model(name, pretrained=pretrained, num_classes=num_classes, **drops, **arguments)
    except TypeError as error:
        unknown = _unknown(error)
        if unknown == "img_size":  # a network that takes every size
            del arguments["img_size"]
            return _create(name, pretrained, num_classes, arguments, drops)
        raise ValueError(
            f"{name} takes no argument {unknown!r}; change the recipe, as by --set model_kwargs={{}}"
        ) from error


def inference_config(model: nn.Module, recipe: Recipe, channels: int, classes: tuple[str, ...]) -> InferenceConfig:
    """Preprocessing of a classifier: the model's own, replaced by the recipe's values."""
    options: dict[str, Any] = {"image_size": recipe.image_size, "interpolation": recipe.interpolation}
    if recipe.crop_pct is not None:
        options["crop_pct"] = recipe.crop_pct
    return InferenceConfig.from_model(model, classes, in_chans=channels, **options)


def timm_config(model: Any, arguments: dict[str, Any], config: InferenceConfig) -> dict[str, Any]:
    """What timm and the Hub need beside the weights to make and feed the model again: the content of config.json."""
    dropped = {"url", "file", "source", "hf_hub_id", "hf_hub_filename", "state_dict", "tag", "architecture", "notes"}
    cfg = {
        k: v for k, v in (getattr(model, "pretrained_cfg", None) or {}).items() if v is not None and k not in dropped
    }
    cfg |= {key: getattr(config, key) for key in ("mean", "std", "interpolation", "crop_pct", "num_classes")}
    cfg |= {"input_size": (config.in_chans, config.image_size, config.image_size)}
    return {
        "architecture": (getattr(model, "pretrained_cfg", None) or {}).get("architecture", type(model).__name__),
        "num_classes": config.num_classes,
        "num_features": getattr(model, "num_features", None),
        "label_names": list(config.class_names),
        "model_args": arguments,
        "pretrained_cfg": cfg,
        "inference": config.to_dict(),
    }
