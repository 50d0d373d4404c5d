"""Weights that come with the package: each can be loaded, is the network of its table, and is small enough to ship."""

import pytest
import timm
import torch
from safetensors import safe_open
from timm.data import resolve_model_data_config

import tokamix
from tokamix._construction import read_record
from tokamix.cost import count_exp, count_macs
from tokamix.models.shipped import DEFAULT, FOLDER, shipped_weights


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
