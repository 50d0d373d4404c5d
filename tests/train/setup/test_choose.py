"""The recipe of a run that names none."""

from pathlib import Path

import pytest
import torch
from timm import create_model

from tests.train.tiny import tiny_data
from tokamix.data import ArrayDataset, DatasetSplits
from tokamix.models.shipped import shipped_weights
from tokamix.recipes import load_recipe
from tokamix.train import train
from tokamix.train.setup.choose import choose_recipe, fit_batch


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
    assert choice.model is None
    chosen = load_recipe(choice.recipe, choice.settings)
    assert {key: getattr(chosen, key) for key in values} == values
    assert f"{count:,} images of about {side} px" in choice.reason


def test_batches_fit_the_number_of_images() -> None:
    """About eight steps an epoch, and never a larger batch than the recipe's."""
    assert [fit_batch(64, images) for images in (1, 10, 80, 500, 511, 512, 10_000)] == [4, 4, 8, 32, 32, 64, 64]
    assert fit_batch(2, 5) == 2


@pytest.mark.parametrize(("count", "batch"), [(30, 4), (500, 32), (2_000, 64)])
def test_few_images_start_from_weights_that_come_with_the_package(count: int, batch: int) -> None:
    choice = choose_recipe(images(count, 300), None, None, None, {})
    assert choice.model in shipped_weights()
    chosen = load_recipe(choice.recipe, choice.settings)
    assert chosen.finetune
    assert chosen.batch_size == batch
    assert f"{count:,} images of about 300 px" in choice.reason


@pytest.mark.parametrize(
    ("count", "model", "given"),
    [
        (2_001, None, {}),
        (500, "resnet18", {}),
        (500, None, {"model": "resnet18"}),
        (500, None, {"model_kwargs.dim": 8}),
    ],
)
def test_networks_that_start_from_scratch(count: int, model: str | None, given) -> None:
    choice = choose_recipe(images(count, 300), model, None, None, given)
    assert (choice.recipe, choice.model) == ("small", None)


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


def test_a_network_of_ones_own_keeps_its_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    network = create_model("columnar_tiny_softmax", patch_size=8, dim=16, depth=1, num_heads=1, num_classes=4)
    given = {"epochs": 1, "lr": 1e-12, "image_size": 8}
    result = train(network, tiny_data(), None, tmp_path / "run", overrides=given, device="cpu", quiet=True)
    assert sum(weight.numel() for weight in result.load().parameters()) == sum(w.numel() for w in network.parameters())


def test_a_run_from_shipped_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says which, and how to train without them."""
    result = train(None, tiny_data(), None, tmp_path / "run", overrides={"epochs": 1, "image_size": 8}, device="cpu")
    line = " ".join(capsys.readouterr().out.split())
    assert "from the weights pyramid_nano_softmax.cifar100, because there are 80 images of about 8 px" in line
    assert "--no-pretrained starts from scratch" in line
    assert "from the weights `pyramid_nano_softmax.cifar100`" in (result.folder / "README.md").read_text()
    weights = (
        create_model("pyramid_nano_softmax.cifar100", pretrained=True, img_size=8).stages[2].blocks[0].mlp.fc1.weight
    )
    trained = result.load().stages[2].blocks[0].mlp.fc1.weight
    assert torch.linalg.norm(trained - weights) < 0.2 * torch.linalg.norm(weights)


def test_the_choice_is_printed_and_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = {"model_kwargs": {"dims": [8, 8], "depths": [1, 1], "num_heads": [1, 1], "patch_size": 4}, "epochs": 1}
    for _ in range(2):  # the second call finds the finished run
        result = train(None, tiny_data(), None, tmp_path / "run", overrides=small, device="cpu")
    assert len(result.epochs) == 1
    line = " ".join(capsys.readouterr().out.split())
    assert "recipe small (image_size 32, batch_size 8, epochs 1), because there are 80 images of about 8 px" in line
