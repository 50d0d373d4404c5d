"""Models of a recipe: from scratch, or from weights of different classes, channels or image sizes."""

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from tokamix._construction import read_record
from tokamix.checkpoint import load_checkpoint
from tokamix.inference import apply_changes, read_config, read_construction
from tokamix.models._registry import create_model
from tokamix.recipes import Recipe
from tokamix.train.loop.optim import DropPathSchedule


def create_classifier(
    name: str | None,
    recipe: Recipe,
    num_classes: int,
    in_chans: int = 3,
    checkpoint: str | Path | None = None,
    pretrained: bool = False,
    optional_arguments: Mapping[str, Any] = MappingProxyType({}),
) -> tuple[Any, dict[str, Any]]:
    """Create a classifier; returns it and the arguments with which timm creates the same one again.

    Weights are initialised from the recipe's seed. A checkpoint may come from a model with different classes (its head
    is left out), or none at all, channels (the first convolution is adapted) and image size (position tables are
    resized).

    Args:
        name: of the model; default: the one named in the checkpoint's folder, or the recipe's.
        recipe: gives image size, drop rates and further arguments.
        num_classes: of the data; 0 for a backbone without classifier.
        in_chans: channels of the images.
        checkpoint: a file, a run's folder or `hf-hub:user/name` to start from.
        pretrained: start from timm's pretrained weights.
        optional_arguments: of the model; left out if it has no such argument.
    """
    config = read_config(checkpoint) if checkpoint is not None else {}
    if "method" in config:
        raise ValueError(f"{checkpoint} is not a classifier, but {config['method']} for task {config['task']}")
    saved = read_construction(config)
    if name is None and config and saved["name"] is None:
        raise ValueError(f"{checkpoint} holds {config.get('architecture')}; create the module yourself and give it")
    name = choose_model_name(name, saved["name"], recipe)
    arguments = saved["arguments"] if name == saved["name"] else {}
    optional = {"img_size": recipe.image_size, **optional_arguments}
    arguments = {**arguments, "in_chans": in_chans, **optional, **recipe.model_kwargs}
    drop_rate = getattr(recipe, "drop_rate", None) or None
    rates = {"drop_rate": drop_rate, "drop_path_rate": DropPathSchedule.initial_rate(recipe)}
    # a backbone that was trained without labels has no classifier to load
    headless = checkpoint is not None and config.get("num_classes") == 0
    model = None
    while model is None:
        torch.manual_seed(recipe.seed)
        try:
            created = 0 if headless else num_classes
            model = create_model(name, pretrained=pretrained, num_classes=created, **rates, **arguments)
        except TypeError as error:
            unknown = unknown_argument(error)
            if unknown not in optional or unknown not in arguments or unknown in recipe.model_kwargs:
                raise ValueError(
                    f"{name} has no argument {unknown!r}; change the recipe, for example with --set model_kwargs={{}}"
                ) from error
            del arguments[unknown]  # img_size: a model without a fixed image size
    # a name with weights that come with the package stands for further arguments; a saved run must state them
    recorded = read_record(model)["arguments"] or {}
    arguments = {**{key: value for key, value in recorded.items() if key not in rates}, **arguments}
    if name == saved["name"]:
        apply_changes(model, saved["steps"])
    if checkpoint is not None:
        load_checkpoint(model, checkpoint)
    if headless and num_classes:
        model.reset_classifier(num_classes)
    return model, arguments


def choose_model_name(name: str | None, checkpoint_name: str | None, recipe: Recipe) -> str:
    """The model's name: the given one, else the checkpoint's, else the recipe's."""
    name = name or checkpoint_name or recipe.model
    if name is None:
        raise ValueError(f"the recipe {recipe.name} names no model; give one with --model; `tokamix models` lists them")
    return name


def unknown_argument(error: TypeError) -> str:
    """The name of the argument that a function does not accept; a TypeError of another kind is raised again."""
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if match is None:
        raise error
    return match[1]
