"""The choice of the model, alike for all tasks."""

import re
from pathlib import Path

from tokamix.recipes import Recipe


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
