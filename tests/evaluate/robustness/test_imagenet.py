"""ImageNet's further test sets: which outputs are compared, and which labels count."""

import json
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tests.train.tiny import tiny_data
from tokamix.data import DataError, DatasetSplits
from tokamix.evaluate.robustness import evaluate_robustness
from tokamix.evaluate.robustness.imagenet import open_imagenet
from tokamix.inference import InferenceConfig, imagenet_classes

IDS = [label for label, _ in imagenet_classes(1000)]
CONFIG = InferenceConfig(task="classify", class_names=tuple(name for _, name in imagenet_classes(1000)))
A = (files("timm.data") / "_info" / "imagenet_a_synsets.txt").read_text().split()
REAL = json.loads((files("timm.data") / "_info" / "imagenet_real_labels.json").read_text())


def write(path: Path, shade: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (8, 8), (shade, shade, shade)).save(path, "PNG")


class Shade(nn.Module):
    """Predicts the class 4 * shade, and as the second choice the class after it."""

    num_classes = 1000

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        cfg = InferenceConfig.from_model(self)
        shade = (255 * (x[:, 0, 4, 4] * cfg.std[0] + cfg.mean[0])).round()
        return -(torch.arange(1000) - 4 * shade[:, None] - 0.1).abs() + self.weight


def score(sets: dict[str, Path]) -> dict[str, list[bool]]:
    """Scores of `Shade` on test sets; the main data set has its classes, and a single image."""
    val = tiny_data(val=1).val
    val.classes = tuple(IDS)
    data = DatasetSplits("tiny", val, val, val.classes)
    (row,) = evaluate_robustness(Shade(), data, tests=(), imagenet=sets, device="cpu").models
    return {c.kind: scores.tolist() for c, scores in row.scores.items() if c.test == "imagenet"}


def test_imagenet_a_compares_its_200_classes(tmp_path: Path) -> None:
    """A prediction outside the 200 classes is replaced by the best one among them."""
    inside = [IDS.index(label) for label in A]
    outside = next(n for n in range(0, 1000, 4) if n not in inside and n + 1 in inside)
    write(tmp_path / IDS[outside + 1] / "a.png", outside // 4)
    assert score({"a": tmp_path}) == {"ImageNet-A": [True]}
    (test,) = open_imagenet("a", tmp_path, CONFIG)
    assert test.outputs == inside
    assert len(inside) == 200
    write(tmp_path / IDS[outside] / "a.png")
    with pytest.raises(
        DataError, match=f"is not ImageNet-A: it has the folder '{IDS[outside]}', but must have folders"
    ):
        open_imagenet("a", tmp_path, CONFIG)


def test_v2_folders_are_numbers(tmp_path: Path) -> None:
    """Class 4 is in folder 4, though 100 and 12 come before it in the order of their names."""
    for kind in ("matched-frequency", "threshold0.7", "top-images"):
        variant = f"imagenetv2-{kind}-format-val"
        for number in (0, 4, 12, 100):
            write(tmp_path / variant / str(number) / "a.png", number // 4)
    expected = [True] * 4
    names = [f"ImageNet-V2 ({name})" for name in ("matched frequency", "threshold 0.7", "top images")]
    assert score({"v2": tmp_path}) == dict.fromkeys(names, expected)
    alone = tmp_path / "imagenetv2-top-images-format-val"
    assert score({"v2": alone}) == {names[2]: expected}
    with pytest.raises(
        DataError, match=r"is not ImageNet-V2: it has neither class folders 0 to 999 nor folders such as"
    ):
        open_imagenet("v2", alone / "100", CONFIG)


def test_real_labels_are_sets(tmp_path: Path) -> None:
    """Every label of the set is correct; images with an empty one are skipped; other files are ignored."""
    several = next(i for i, labels in enumerate(REAL) if len(labels) > 1 and labels[1] % 4 == 0)
    empty = REAL.index([])
    for i, shade in ((several, REAL[several][1] // 4), (empty, 0)):
        write(tmp_path / "any" / f"ILSVRC2012_val_{i + 1:08d}.JPEG", shade)
    write(tmp_path / "other.png")
    (test,) = open_imagenet("real", tmp_path, CONFIG)
    assert (test.targets, test.skipped) == ([frozenset(REAL[several])], 1)
    assert score({"real": tmp_path}) == {"ImageNet-ReaL": [True]}
    part = InferenceConfig(task="classify", class_names=(IDS[REAL[several][0]], IDS[999]))
    assert open_imagenet("real", tmp_path, part)[0].targets == [frozenset([0])], "a model with some of the classes"


def test_sketch_and_r(tmp_path: Path) -> None:
    write(tmp_path / IDS[8] / "a.png", 2)
    assert score({"sketch": tmp_path}) == {"ImageNet-Sketch": [True]}
    assert score({"r": tmp_path}) == {"ImageNet-R": [True]}
    assert len(open_imagenet("r", tmp_path, CONFIG)[0].outputs) == 200


def test_wrong_models_and_folders(tmp_path: Path) -> None:
    ten = InferenceConfig(task="classify", class_names=("tench", "golf ball"))
    with pytest.raises(ValueError, match="ImageNet-A has 200 of ImageNet's classes, but the model lacks 200 of them"):
        open_imagenet("a", tmp_path, ten.replace(class_names=("tench",)))
    pets = ten.replace(class_names=("cat food", "tench"))
    with pytest.raises(
        ValueError, match="need a model with ImageNet's classes, but the model has the class 'cat food'"
    ):
        open_imagenet("a", tmp_path, pets)
    with pytest.raises(ValueError, match="there is no ImageNet test set 'c'; choose from a, r, sketch, v2, real"):
        open_imagenet("c", tmp_path, CONFIG)
    with pytest.raises(DataError, match=r"ImageNet-A: the folder .*nosuch does not exist"):
        open_imagenet("a", tmp_path / "nosuch", CONFIG)
    with pytest.raises(DataError, match="it has no folders, but must have folders such as n01498041"):
        open_imagenet("a", tmp_path, CONFIG)
    with pytest.raises(DataError, match="has no images of ImageNet's validation set with ReaL labels"):
        open_imagenet("real", tmp_path, CONFIG)
