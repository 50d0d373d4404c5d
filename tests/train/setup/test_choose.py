"""The recipe of a run that names none."""

from pathlib import Path

import pytest
import torch

from tests.train.tiny import tiny_data
from tokamix.data import ArrayDataset, DatasetSplits
from tokamix.recipes import load_recipe
from tokamix.train import train
from tokamix.train.setup.choose import choose_recipe


def images(count: int, side: int) -> DatasetSplits:
    part = ArrayDataset(
        torch.zeros(1, 3, side, side + 4, dtype=torch.uint8).expand(count, -1, -1, -1), [0] * count, ["a"]
    )
    return DatasetSplits("images", part, part, ("a",))


@pytest.mark.parametrize(
    ("count", "side", "recipe", "values"),
    [
        (500, 300, "small", {"image_size": 128, "batch_size": 32, "epochs": 200}),
        (9_469, 96, "small", {"image_size": 96, "batch_size": 256, "epochs": 120, "model": "pyramid_nano_softmax"}),
        (3_000, 32, "small", {"image_size": 32, "crop_padding": 4, "model_kwargs": {"patch_size": 2}}),
        (50_000, 32, "cifar100_pyramid", {"image_size": 32, "batch_size": 1024, "epochs": 120}),
        (10, 20, "small", {"image_size": 32, "batch_size": 8, "epochs": 200}),
    ],
)
def test_by_the_data(count: int, side: int, recipe: str, values) -> None:
    choice = choose_recipe(images(count, side), None, None, False, {})
    assert choice.recipe == recipe
    chosen = load_recipe(choice.recipe, choice.settings)
    assert {key: getattr(chosen, key) for key in values} == values
    assert f"{count:,} images of about {side} px" in choice.reason


def test_by_the_weights(classifier_run: Path) -> None:
    """From a run, at its image size; from timm's weights, at theirs."""
    choice = choose_recipe(images(100, 300), None, classifier_run, False, {})
    assert choice.recipe == "finetune"
    assert choice.settings["batch_size"] == 8
    assert choice.settings["image_size"] < 100
    pretrained = choose_recipe(images(600, 300), "vit_base_patch16_384", None, True, {})
    assert pretrained.settings == {"image_size": 384}
    assert choose_recipe(images(600, 300), "nonsense", None, True, {}).settings == {"image_size": 224}


def test_what_the_user_sets_wins() -> None:
    own = {"epochs": 15, "image_size": 64, "crop_padding": 2}
    choice = choose_recipe(images(600, 32), None, None, False, own)
    assert choice.settings == {"model_kwargs": {"patch_size": 2}, "batch_size": 32}
    other = choose_recipe(images(600, 32), "resnet18", None, False, {"model_kwargs.x": 1})
    assert "model_kwargs" not in other.settings


def test_the_choice_is_printed_and_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"model_kwargs": {"dims": [8, 8], "depths": [1, 1], "num_heads": [1, 1], "patch_size": 4}, "epochs": 1}
    for _ in range(2):  # the second call finds the finished run
        result = train(None, tiny_data(), None, tmp_path / "run", overrides=small, device="cpu")
    assert len(result.epochs) == 1
    line = " ".join(capsys.readouterr().out.split())
    assert "recipe small (image_size 32, batch_size 8, epochs 1), because there are 80 images of about 8 px" in line
