"""Report of a classifier: confusion matrix, accuracy of each class, worst mistakes.

confusion_matrix.csv, .png   rows: ground truth, columns: predictions
per_class.csv                number of images and accuracy of each class
mistakes.png                 the wrong predictions with the highest confidence
"""

import csv
import heapq
import io
import itertools
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from tokamix.data.images.loader import create_eval_loader
from tokamix.files import write_atomically, write_text
from tokamix.inference import InferenceConfig, evaluation_mode
from tokamix.predict.draw import captioned_sheet

MISTAKES = 24  # images on the sheet
NUMBERED = 20  # classes up to which the matrix shows counts in its cells
NAMED = 120  # classes up to which the matrix shows all names
RED, GREEN, BLACK = (190, 40, 50), (30, 120, 60), (33, 37, 41)


@torch.no_grad()
def write_report(
    folder: str | Path, model: nn.Module, data: Any, config: InferenceConfig, *, batch_size: int = 128
) -> list[Path]:
    """Write the report of a classifier into a folder and return the files.

    Args:
        folder: created if needed.
        model: returns logits; its device is used.
        data: a data set, or an evaluation loader; one process evaluates all of it.
        config: preprocessing and class names.
        batch_size: of the loader that is created for a data set.
    """
    device = next(model.parameters()).device
    if not hasattr(data, "epoch"):
        data = create_eval_loader(data, config, batch_size=batch_size, device=device, corrupt="skip")
    folder, count = Path(folder), config.num_classes
    confusion = torch.zeros(count, count, dtype=torch.int64)
    mistakes: list[tuple[float, int, Tensor, int, int]] = []  # a heap: the least confident first
    numbers = itertools.count(step=-1)  # break ties of confidence; tensors cannot be compared
    with evaluation_mode(model):
        for images, labels in data.epoch(0):
            confidence, predicted = model(images).float().softmax(1).max(1)
            pairs = (labels * count + predicted).cpu()
            confusion += torch.bincount(pairs, minlength=count * count).view(count, count)
            for i in (labels != predicted).nonzero().flatten().tolist():
                if len(mistakes) < MISTAKES or confidence[i] > mistakes[0][0]:
                    entry = (float(confidence[i]), next(numbers), images[i].cpu(), int(labels[i]), int(predicted[i]))
                    (heapq.heappush if len(mistakes) < MISTAKES else heapq.heapreplace)(mistakes, entry)
    names = config.class_names
    written = [folder / "confusion_matrix.csv", folder / "per_class.csv"]
    rows = ([name, *counts] for name, counts in zip(names, confusion.tolist(), strict=True))
    write_text(written[0], _csv(["ground truth \\ prediction", *names], rows))
    write_text(written[1], _csv(["class", "images", "correct", "accuracy"], _per_class(names, confusion)))
    if find_spec("matplotlib"):  # an extra; the CSV file has the same numbers
        write_atomically(folder / "confusion_matrix.png", lambda path: draw_confusion(confusion, names, path))
        written.append(folder / "confusion_matrix.png")
    sheet = _draw_mistakes(sorted(mistakes, key=lambda entry: -entry[0]), int(confusion.sum()), confusion, config)
    write_atomically(folder / "mistakes.png", lambda path: sheet.save(path, format="png"))
    return [*written, folder / "mistakes.png"]


def _csv(header: Sequence[str], rows: Any) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def _per_class(names: Sequence[str], confusion: Tensor) -> list[list[Any]]:
    """Rows of per_class.csv; the accuracy of a class without images is empty."""
    totals, correct = confusion.sum(1).tolist(), confusion.diag().tolist()
    rows = zip(names, totals, correct, strict=True)
    return [[name, n, right, f"{100 * right / n:.2f}" if n else ""] for name, n, right in rows]


def draw_confusion(confusion: Tensor, names: Sequence[str], path: Path) -> None:
    """Draw a confusion matrix (ground truth, prediction); colours are percent of the row, on a square-root scale."""
    from matplotlib import rc_context

    with rc_context({"text.parse_math": False}), warnings.catch_warnings():  # a class may be called $1_to_$5
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # the CSV file has these names
        _draw_confusion(confusion, names, path)


def _draw_confusion(confusion: Tensor, names: Sequence[str], path: Path) -> None:
    from matplotlib.colors import PowerNorm
    from matplotlib.figure import Figure

    count = len(names)
    short = [name if len(name) <= 24 else f"{name[:15]}…{name[-8:]}" for name in names]
    matrix = confusion.double().numpy()
    totals = matrix.sum(1, keepdims=True)
    percent = np.divide(100 * matrix, totals, out=np.zeros_like(matrix), where=totals > 0)
    side = max(3.2, min(0.55 * count, 12.0))
    margin = 0.085 * max(map(len, short)) if count <= NAMED else 0.6
    figure = Figure(figsize=(side + margin + 1.8, side + margin + 1.1), dpi=110, layout="constrained")
    axes = figure.add_subplot()
    # on a linear scale, the few images of most confusions would be invisible
    shown = axes.imshow(percent, cmap="Blues", norm=PowerNorm(0.5, vmin=0, vmax=100), interpolation="nearest")
    figure.colorbar(shown, ax=axes, label="% of the ground truth", fraction=0.046, pad=0.03)
    correct, images = int(confusion.diag().sum()), int(confusion.sum())
    title = f"{100 * correct / max(images, 1):.1f} % of {images:,} images correct"
    axes.set_title("\n".join([title, *_top_confusions(confusion, short)]), fontsize=10, loc="left")
    axes.set(xlabel="prediction", ylabel="ground truth")
    if count <= NAMED:
        size = max(4.5, min(10.0, 72 * side / count * 0.68))
        axes.set_xticks(range(count), short, rotation=90 if count > 6 or max(map(len, short)) > 8 else 0, fontsize=size)
        axes.set_yticks(range(count), short, fontsize=size)
    else:
        axes.set_xlabel(f"prediction: class 0 to {count - 1}, names in confusion_matrix.csv")
    if count <= NUMBERED:
        for row, column in np.ndindex(count, count):
            if matrix[row, column]:
                ink = "white" if percent[row, column] > 30 else "#202428"
                axes.text(column, row, f"{int(matrix[row, column])}", ha="center", va="center", color=ink, fontsize=9)
    figure.savefig(path, format="png", bbox_inches="tight", pad_inches=0.15)


def _top_confusions(confusion: Tensor, names: Sequence[str]) -> list[str]:
    """Lines about the most frequent confusions; none for a few classes, where the matrix shows them at a glance."""
    if len(names) <= NUMBERED:
        return []
    wrong = confusion.clone().fill_diagonal_(0).flatten()
    counts, places = wrong.topk(5)
    pairs = [(divmod(place, len(names)), n) for place, n in zip(places.tolist(), counts.tolist(), strict=True) if n]
    return [f"{names[label]} predicted as {names[predicted]}: {n}" for (label, predicted), n in pairs]


def _draw_mistakes(mistakes: list[Any], total: int, confusion: Tensor, config: InferenceConfig) -> Image.Image:
    wrong = total - int(confusion.diag().sum())
    title = f"{len(mistakes)} of {wrong:,} mistakes in {total:,} images, most confident first"
    if not mistakes:
        title = f"no mistakes in {total:,} images"
    mean, std = (torch.tensor(values)[:, None, None] for values in (config.mean, config.std))
    images, captions = [], []
    for confidence, _, pixels, label, predicted in mistakes:
        bytes_ = ((pixels.float() * std + mean) * 255).round().clamp(0, 255).byte()
        grey = bytes_.shape[0] != 3  # of other channels, the first is shown
        images.append(Image.fromarray((bytes_[0] if grey else bytes_.permute(1, 2, 0)).numpy()))
        names = config.class_names
        lines = [(f"label: {names[label]}", GREEN), (f"predicted: {names[predicted]}", RED)]
        captions.append([*lines, (f"confidence {100 * confidence:.0f} %", BLACK)])
    return captioned_sheet(images, captions, title=title)
