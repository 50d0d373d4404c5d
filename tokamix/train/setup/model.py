"""Models of a recipe: from scratch, or from weights of different classes, channels or image sizes."""

import re
from pathlib import Path
from typing import Any

import torch

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
) -> tuple[Any, dict[str, Any]]:
    """Create a classifier; returns it and the arguments with which timm creates the same one again.

    Weights are initialised from the recipe's seed. A checkpoint may come from a model with different classes (its head
    is left out), channels (the first convolution is adapted) and image size (position tables are resized).

    Args:
        name: of the model; default: the one named in the checkpoint's folder, or the recipe's.
        recipe: gives image size, drop rates and further arguments.
        num_classes: of the data.
        in_chans: channels of the images.
        checkpoint: a file, a run's folder or `hf-hub:user/name` to start from.
        pretrained: start from timm's pretrained weights.
    """
    config = read_config(checkpoint) if checkpoint is not None else {}
    if "method" in config:
        raise ValueError(f"{checkpoint} is not a classifier, but {config['method']} for task {config['task']}")
    saved = read_construction(config)
    if name is None and config and saved["name"] is None:
        raise ValueError(f"{checkpoint} holds {config.get('architecture')}; create the module yourself and give it")
    name = choose_model_name(name, saved["name"], recipe, checkpoint, pretrained)
    arguments = saved["arguments"] if name == saved["name"] else {}
    arguments = {**arguments, "in_chans": in_chans, "img_size": recipe.image_size, **recipe.model_kwargs}
    rates = {"drop_rate": recipe.drop_rate or None, "drop_path_rate": DropPathSchedule.initial_rate(recipe)}
    model = None
    while model is None:
        torch.manual_seed(recipe.seed)
        try:
            model = create_model(name, pretrained=pretrained, num_classes=num_classes, **rates, **arguments)
        except TypeError as error:
            unknown = unknown_argument(error)
            if unknown != "img_size" or "img_size" not in arguments:
                raise ValueError(
                    f"{name} has no argument {unknown!r}; change the recipe, for example with --set model_kwargs={{}}"
                ) from error
            del arguments["img_size"]  # a model without a fixed image size
    if name == saved["name"]:
        apply_changes(model, saved["steps"])
    if checkpoint is not None:
        load_checkpoint(model, checkpoint)
    return model, arguments


def choose_model_name(
    name: str | None, checkpoint_name: str | None, recipe: Recipe, checkpoint: str | Path | None, pretrained: bool
) -> str:
    """The model's name: the given one, else the checkpoint's, else the recipe's."""
    name = name or checkpoint_name or recipe.model
    if name is None:
        raise ValueError(f"the recipe {recipe.name} names no model; give one with --model; `tokamix models` lists them")
    if recipe.finetune and not (checkpoint or pretrained):
        raise ValueError(
            f"the recipe {recipe.name} starts from trained weights; give them with --checkpoint, or use --pretrained"
        )
    return name


def unknown_argument(error: TypeError) -> str:
    """The name of the argument that a function does not accept; a TypeError of another kind is raised again."""
    match = re.search(r"unexpected keyword argument '(\w+)'", str(error))
    if match is None:
        raise error
    return match[1]
