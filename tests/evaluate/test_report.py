"""Reports of classifiers: numbers of the tables, files, few and many classes."""

import csv
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from tokamix.data import ArrayDataset
from tokamix.evaluate import report
from tokamix.evaluate.report import MISTAKES, draw_confusion, write_report
from tokamix.inference import InferenceConfig


class Lookup(nn.Module):
    """Returns prepared logits in the order of the images; the first pixel of an image is its number."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__()
        self.logits = nn.Parameter(logits)

    def forward(self, images: Tensor) -> Tensor:
        return self.logits[(images[:, 0, 0, 0] * 255).round().long()]


def setup(labels: list[int], predictions: list[int], confidence: Tensor, names: list[str]) -> tuple:
    images = torch.arange(len(labels), dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 6, 6)
    logits = torch.zeros(len(labels), len(names))
    logits[torch.arange(len(labels)), torch.tensor(predictions)] = confidence
    plain = {"mean": (0.0,) * 3, "std": (1.0,) * 3, "image_size": 6, "crop_pct": 1.0}
    config = InferenceConfig(task="classify", class_names=tuple(names), **plain)
    return Lookup(logits), ArrayDataset(images.contiguous(), labels, names), config


def read(path: Path) -> list[list[str]]:
    return list(csv.reader(path.open()))


def test_tables(tmp_path: Path) -> None:
    """Rows are the ground truth; a class without images has no accuracy."""
    model, data, config = setup([0, 0, 0, 1, 1], [0, 2, 2, 1, 0], torch.ones(5), ["cat", "a, b", "dog"])
    files = write_report(tmp_path / "report", model.train(), data, config, batch_size=2)
    assert model.training
    names = ["confusion_matrix.csv", "per_class.csv", "confusion_matrix.png", "mistakes.png"]
    assert [file.name for file in files] == names
    assert read(tmp_path / "report" / "confusion_matrix.csv") == [
        ["ground truth \\ prediction", "cat", "a, b", "dog"],
        ["cat", "1", "0", "2"],
        ["a, b", "1", "1", "0"],
        ["dog", "0", "0", "0"],
    ]
    assert read(tmp_path / "report" / "per_class.csv") == [
        ["class", "images", "correct", "accuracy"],
        ["cat", "3", "1", "33.33"],
        ["a, b", "2", "1", "50.00"],
        ["dog", "0", "0", ""],
    ]


def test_the_most_confident_mistakes_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    captions: list = []
    images: list = []

    def record(drawn: list, texts: list, title: str) -> Image.Image:
        images.extend(drawn)
        captions.extend(texts)
        captions.append(title)
        return Image.new("RGB", (8, 8))

    monkeypatch.setattr(report, "captioned_sheet", record)
    count = MISTAKES + 20
    confidence = torch.linspace(0.5, 5, count)[torch.randperm(count)]
    labels = [i % 2 for i in range(count)]
    predictions = [1 - label if i >= 10 else label for i, label in enumerate(labels)]  # the first ten are correct
    write_report(tmp_path, *setup(labels, predictions, confidence, ["cat", "dog"]), batch_size=7)
    assert captions.pop() == f"{MISTAKES} of {count - 10} mistakes in {count} images, most confident first"
    best = sorted(range(10, count), key=lambda i: -confidence[i])[:MISTAKES]
    assert [image.getpixel((0, 0))[0] for image in images] == best
    for i, lines in zip(best, captions, strict=True):
        texts = [text for text, _ in lines]
        assert texts[:2] == [f"label: {['cat', 'dog'][labels[i]]}", f"predicted: {['cat', 'dog'][predictions[i]]}"]
        percent = 100 * torch.tensor([float(confidence[i]), 0.0]).softmax(0)[0]
        assert texts[2] == f"confidence {percent:.0f} %"


def test_mistakes_of_equal_confidence(tmp_path: Path) -> None:
    """Confidences saturate at 1; more than a sheet of them, after less confident ones, are no error."""
    confidence = torch.cat([torch.linspace(0.5, 1, MISTAKES), torch.full((40,), 50.0)])
    count = len(confidence)
    write_report(tmp_path, *setup([0] * count, [1] * count, confidence, ["cat", "dog"]))
    assert read(tmp_path / "per_class.csv")[1] == ["cat", str(count), "0", "0.00"]


@pytest.mark.parametrize("classes", [1, 30, 130])
def test_any_number_of_classes(tmp_path: Path, classes: int) -> None:
    names = [f"class {i} with a name that is longer than a tick label" for i in range(classes)]
    labels = [i % classes for i in range(40)]
    write_report(tmp_path, *setup(labels, [0] * 40, torch.ones(40), names))
    for name in ("confusion_matrix.png", "mistakes.png"):
        with Image.open(tmp_path / name) as image:
            assert 200 < image.width < 2400


def test_names_that_matplotlib_would_read_as_formulas(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    """They are drawn as they are; characters that the font lacks give no warning on the console."""
    draw_confusion(torch.tensor([[1, 0], [1, 2]]), ["$100_$50", "a $^$ \u65e5\u672c"], tmp_path / "confusion.png")
    assert (tmp_path / "confusion.png").stat().st_size > 0
    assert not recwarn.list


def test_other_channels(tmp_path: Path) -> None:
    """One channel is shown in grey, and a perfect classifier has an empty sheet."""
    data = ArrayDataset(torch.zeros(2, 1, 6, 6, dtype=torch.uint8), [0, 1], ["a", "b"])
    config = InferenceConfig(
        task="classify", class_names=("a", "b"), mean=(0.0,), std=(1.0,), image_size=6, crop_pct=1.0
    )
    write_report(tmp_path, Lookup(torch.tensor([[1.0, 0], [1, 0]])), data, config)
    model, perfect, config = setup([0, 1], [0, 1], torch.ones(2), ["a", "b"])
    write_report(tmp_path, model, perfect, config)
    assert (tmp_path / "mistakes.png").is_file()
