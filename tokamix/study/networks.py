"""Check the networks of a study before it is planned or run."""

import json

import torch

from tokamix.dense.saved import create_dense_model
from tokamix.recipes import Recipe, create_recipe
from tokamix.study.schema import Study
from tokamix.train.setup.model import create_classifier, unknown_argument


def check_networks(study: Study, only: str = "*") -> None:
    """Refuse an arm whose network cannot be created; without memory or initial values, so it takes milliseconds."""
    seen = set()
    for arm in study.select(only):
        recipe = create_recipe({"name": arm.name, **arm.settings})
        key = json.dumps([recipe.task, recipe.model, recipe.model_kwargs], sort_keys=True)
        if recipe.model is None or recipe.task == "vqa" or key in seen:
            continue
        seen.add(key)
        try:
            with torch.device("meta"):
                _create(recipe)
        except (ValueError, RuntimeError, TypeError) as error:
            raise ValueError(f"study {study.name}: arm {arm.name}: {error}") from error


def _create(recipe: Recipe) -> None:
    if recipe.task in ("classify", "dino"):
        create_classifier(None, recipe, num_classes=2)
        return
    keys = {key: getattr(recipe, key) for key in ("task", "method", "neck")}
    arguments = {"backbone": recipe.model, "backbone_args": recipe.model_kwargs, "method_args": recipe.method_kwargs}
    try:
        create_dense_model({**keys, **arguments, "num_classes": 2})
    except TypeError as error:
        raise ValueError(f"neither {recipe.method} nor {recipe.model} has {unknown_argument(error)!r}") from error
