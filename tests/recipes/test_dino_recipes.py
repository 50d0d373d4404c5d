"""Recipes of DINO."""

import pytest

import tokamix
from tokamix.recipes import DinoRecipe, list_recipes, load_recipe

NAMES = [name for name in list_recipes() if load_recipe(name).task == "dino"]


def test_the_papers_row() -> None:
    """SimA, section 4.3 and Table 4; the rest as in DINO's code."""
    recipe = load_recipe("dino_xcit_small_12_p16_sima")
    assert isinstance(recipe, DinoRecipe)
    assert (recipe.epochs, recipe.batch_size, recipe.peak_lr, recipe.optimizer) == (100, 256, 2.5e-4, "adamw")
    assert (recipe.weight_decay, recipe.weight_decay_end) == (0.04, 0.4)
    assert recipe.printed == {"linear": 75.5, "knn": 71.2}
    assert (recipe.image_size, recipe.local_size, recipe.local_crops) == (224, 96, 8)
    assert (recipe.out_dim, recipe.clip_grad, recipe.clip_per_parameter) == (65536, 3.0, True)
    baseline = load_recipe("dino_xcit_small_12_p16")
    assert baseline.replace(name="", source="", printed={}, model=None) == recipe.replace(
        name="", source="", printed={}, model=None
    )


@pytest.mark.parametrize("name", NAMES)
def test_models_exist_and_take_the_arguments(name: str) -> None:
    recipe = load_recipe(name)
    assert recipe.select == "last"
    for mixer in ("softmax", "xca", "sima") if name == "imagenette_dino" else ():
        tokamix.create_model(f"pyramid_tiny_{mixer}", num_classes=0, img_size=96, device="meta", **recipe.model_kwargs)
    if recipe.model:
        tokamix.create_model(recipe.model, num_classes=0, device="meta", **recipe.model_kwargs)


def test_schedules_scale_with_the_epochs() -> None:
    recipe = load_recipe("small_dino", ["epochs=10"])
    assert (recipe.warmup_epochs, recipe.teacher_temp_warmup) == (1.0, 5.0)
