"""Recipes: how a model is trained, as data."""

from tokamix.recipes.load import FOLDER, list_recipes, load_overrides, load_recipe, recipe_rows
from tokamix.recipes.schema import ClassifyRecipe, DetectRecipe, DinoRecipe, Recipe, SegmentRecipe, create_recipe

__all__ = [
    "FOLDER",
    "ClassifyRecipe",
    "DetectRecipe",
    "DinoRecipe",
    "Recipe",
    "SegmentRecipe",
    "create_recipe",
    "list_recipes",
    "load_overrides",
    "load_recipe",
    "recipe_rows",
]
