"""Weights that come with the package: each can be loaded, is the network of its table, and is small enough to ship."""

import json
import shlex
from pathlib import Path

import pytest
import timm
import torch
from safetensors import safe_open
from timm.data import resolve_model_data_config

import tokamix
from tokamix._construction import read_record
from tokamix.cost import count_exp, count_macs
from tokamix.models.shipped import DEFAULT, FOLDER, model_card, shipped_weights
from tokamix.recipes import create_recipe, load_recipe
from tokamix.study.rows import read_rows

STUDIES = Path(__file__).parents[2] / "results" / "studies"


@pytest.mark.parametrize("name", shipped_weights())
def test_every_tag_loads(name: str) -> None:
    row = shipped_weights()[name]
    model = timm.create_model(name, pretrained=True).eval()
    assert sum(p.numel() for p in model.parameters()) == row["parameters"] <= 2e6
    with safe_open(FOLDER / f"{name}.safetensors", "pt") as file:
        assert all(torch.equal(tensor.half(), file.get_tensor(key)) for key, tensor in model.state_dict().items())
    size = row["data"]["image_size"]
    assert resolve_model_data_config(model)["input_size"] == (3, size, size)
    assert (count_macs(model, size), count_exp(model, size).total()) == (row["macs"], row["exps"])
    with torch.no_grad():
        assert model(torch.zeros(1, 3, size, size)).shape == (1, len(row["data"]["classes"]))


@pytest.mark.parametrize("name", shipped_weights())
def test_model_cards_follow_from_the_rows_of_their_training(name: str) -> None:
    """Accuracy with n, recipe, time, commit and licence; results/studies/shipped.csv has the run."""
    card, (architecture, _, tag) = model_card(name), name.partition(".")
    data = tag.removeprefix("cb_")
    arm = f"{data}_{architecture.removeprefix('pyramid_nano_')}{'_cb' if tag != data else ''}"
    (run,) = (row for row in read_rows(STUDIES / "shipped.csv") if row["arm"] == arm)
    seconds = round(float(run["train_seconds"]))
    images = {"imagenette": "3,925 validation images", "cifar100": "10,000 test images"}[data]
    assert f"top-1 {float(run['score']):.2f} % on {images}; one run (n = 1)" in card
    command, _, rest = card.partition("tokamix train ")[2].partition("; ")
    assert rest.startswith(f"{run['epochs']} epochs, {seconds} s on one H200 with six runs at a time")
    words = shlex.split(command)
    assert words[:4] == ["--recipe", f"{data}_nano", "--model", architecture]
    recipe = load_recipe(words[1], words[5::2]).replace(model=architecture, seed=0, data=None)
    trained = {**json.loads(run["settings"]), "name": recipe.name, "data": None, "source": "ours"}
    assert recipe == create_recipe(trained)
    assert (int(run["processes"]), run["gpu"]) == (6, "NVIDIA H200")
    assert f"**Commit**: {run['commit']};" in card
    assert f"{int(run['parameters']) / 1e6:.2f} M parameters" in card
    assert "**Licence of the data**: " in card


def test_a_tag_stands_for_the_arguments_of_its_network() -> None:
    """Also in the record by which a trained network is created again."""
    for create in (timm.create_model, tokamix.create_model):
        model = create("pyramid_nano_softmax.cb_cifar100")
        assert read_record(model)["arguments"] == shipped_weights()["pyramid_nano_softmax.cb_cifar100"]["arguments"]
    assert timm.create_model("pyramid_nano_softmax").pretrained_cfg["tag"] == "imagenette"  # the default tag
    assert timm.create_model("pyramid_nano_softmax", img_size=64).stages[0].pos_embed.table.shape[-2] == 16 * 16


def test_the_package_stays_small() -> None:
    files = list(FOLDER.glob("*.safetensors"))
    assert {file.stem for file in files} == set(shipped_weights())
    assert sum(file.stat().st_size for file in files) < 30e6
    assert DEFAULT in shipped_weights()
