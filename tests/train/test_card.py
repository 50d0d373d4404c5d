"""Model cards: metadata that the Hub reads, and the facts for people."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import ModelCard
from torch import nn

import tokamix
from tests.train.tiny import TINY, run, tiny_data
from tokamix.data import DatasetSplits
from tokamix.train import train


def metadata(text: str) -> Any:
    """The card's metadata, as the Hub's library reads it."""
    return ModelCard(text).data


def test_the_card(tmp_path: Path) -> None:
    data = replace(tiny_data(), name="/home/somebody/data/stripes")
    result = run(tmp_path / "a", data, epochs=4, ema=0.9, network="columnar_tiny_sima", lr=2e-2)
    text = (tmp_path / "a" / "README.md").read_text()
    card = metadata(text)
    assert (card.license, card.library_name) == ("unknown", "timm")
    assert card.pipeline_tag == "image-classification"
    best, last = card.eval_results
    assert (best.metric_type, best.dataset_name, best.dataset_split) == ("accuracy", "stripes", "validation")
    assert best.metric_value == pytest.approx(result.top1, abs=1e-3)
    assert last.metric_value == pytest.approx(result.epochs[-1]["ema_top1"], abs=1e-3)
    assert last.metric_name == "top-1 (last: epoch 4, averaged weights)"
    assert "| classes | 4: class 0, class 1, class 2, class 3 |" in text
    assert "80 for training, 37 for validation" in text
    parameters = sum(parameter.numel() for parameter in result.load().parameters())
    assert f"| parameters | {parameters:,} |" in text
    assert "| training | CPU, " in text
    assert "SimA: Simple Softmax-free Attention for Vision Transformers https://arxiv.org/abs/2206.08898" in text
    assert "/home/somebody" not in text
    assert "| top1 | " in text
    assert "top5" not in text, "of four classes it is always 100 %"


def test_last_and_best(tmp_path: Path) -> None:
    """The last evaluation stands beside the best one; with `select: last` it is the only one."""
    result = run(tmp_path / "a", epochs=3, lr=2e-2)
    assert result.last == {key: result.epochs[-1].get(key, False) for key in result.best}
    assert result.top1 == max(row["top1"] for row in result.epochs)
    text = (tmp_path / "a" / "README.md").read_text()
    assert "weights of the best epoch. It was chosen on the validation images" in text
    result = run(tmp_path / "b", epochs=3, lr=2e-2, select="last", ema=0.9)
    assert result.best == result.last
    assert result.last["averaged"]
    text = (tmp_path / "b" / "README.md").read_text()
    assert len(metadata(text).eval_results) == 1
    assert "weights of the last epoch, which were not chosen by their results" in text


def test_own_modules(tmp_path: Path) -> None:
    """The example of the card is the way that loads this model."""
    model = tokamix.create_model("columnar_tiny_softmax", num_classes=4, img_size=8, **TINY.model_kwargs)
    model.norm = nn.LayerNorm(16, eps=1e-2)
    train(model, tiny_data(), TINY.replace(epochs=1, warmup_epochs=0), tmp_path / "own", device="cpu", quiet=True)
    text = (tmp_path / "own" / "README.md").read_text()
    assert 'tokamix.load_checkpoint(model, "PATH' in text
    assert metadata(text).library_name == "tokamix"


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("digits", "digits"),
        ("/home/me/photos", "photos"),
        ("/home/me/photos/", "photos"),
        ("hf:uoft-cs/cifar10", "hf:uoft-cs/cifar10"),
        ("wds:/data/in1k/train-{0000..0127}.tar", "wds:train-{0000..0127}.tar"),
        ("coco:/data/images,/data/instances.json?x=1", "coco:images,instances.json"),
        ("shapes:200", "shapes:200"),
    ],
)
def test_names_of_data_sets(name: str, title: str) -> None:
    assert DatasetSplits(name, None, None, ()).title == title
