"""Recipes: how a model is trained, as data."""

from tokamix.recipes.schema import (
    FOLDER,
    Recipe,
    list_recipes,
    load_overrides,
    load_recipe,
    make_recipe,
    recipe_rows,
)

__all__ = [
    "FOLDER",
    "Recipe",
    "list_recipes",
    "load_overrides",
    "load_recipe",
    "make_recipe",
    "recipe_rows",
]
