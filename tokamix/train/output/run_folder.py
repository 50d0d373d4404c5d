"""The folder of a run: everything needed to go on with it, to look at it, and to use the model elsewhere.

config.json         the model as timm and the Hub describe it: timm.create_model("local-dir:RUN", pretrained=True)
model.safetensors   the best weights so far; last.safetensors the latest
state/              what the same command goes on from
recipe.yaml         every setting; environment.json: versions, device, command
metrics.jsonl       one line for each report and each epoch; metrics.csv: the epochs; curves.png; tensorboard/
pictures/           predictions on a few validation images, of the best and the latest epochs, where there are any
README.md           a model card
"""

import csv
import io
import json
import platform
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from tokamix.files import WriteError, write_atomically, write_json, write_tensors, write_text
from tokamix.train.loop.state import Tensors
from tokamix.train.output.card import model_card
from tokamix.train.output.curves import draw_curves

Row = dict[str, Any]
PICTURES = 3  # the latest ones are kept, besides the best
PACKAGES = ("tokamix", "torch", "torchvision", "timm", "accelerate", "safetensors", "numpy")


class RunFolder:
    """Reads and writes a run's files; in a run of many processes the first one alone does."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.state = self.path / "state" / "state.safetensors"
        self.epochs: list[Row] = []

    def begin(self, recipe_yaml: str, config: Row, processes: int, device: torch.device) -> None:
        """Write what is known before the first step."""
        write_text(self.path / "recipe.yaml", recipe_yaml)
        write_json(self.path / "config.json", config, indent=2)
        write_json(self.path / "environment.json", environment(processes, device), indent=2)

    def forget(self) -> None:
        """Remove what a run of before left, so that this one starts anew."""
        if (self.path / "model.safetensors").exists() and not (self.path / "metrics.jsonl").exists():
            raise ValueError(f"{self.path} holds a model that is not of a run of ours; use another --output")
        for name in ("metrics.jsonl", "metrics.csv", "curves.png", "model.safetensors", "last.safetensors"):
            (self.path / name).unlink(missing_ok=True)
        for picture in self.pictures():
            picture.unlink()
        self.state.unlink(missing_ok=True)

    def rewind(self, epoch: int, update: int) -> None:
        """Forget the lines that were written after this moment: they will be written again."""
        # an epoch's line comes after its last step
        kept = [
            row for row in self.rows() if (row["epoch"] < epoch or row["event"] == "train") and row["update"] <= update
        ]
        self.epochs = [row for row in kept if row["event"] == "epoch"]
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))

    def rows(self) -> list[Row]:
        """The lines of metrics.jsonl; one that was cut off by a kill is left out."""
        path = self.path / "metrics.jsonl"
        rows = []
        for line in path.read_text().splitlines() if path.is_file() else ():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows

    def add(self, row: Row) -> None:
        """Add a line to metrics.jsonl, and an epoch's to metrics.csv."""
        path = self.path / "metrics.jsonl"
        try:
            with path.open("a") as file:
                file.write(json.dumps(row) + "\n")
            if row["event"] == "epoch":
                self.epochs.append(row)
                self._write_csv()
        except WriteError:
            raise
        except OSError as error:
            raise WriteError(f"cannot write {path}: {error.strerror}") from error

    def write_weights(self, name: str, weights: Tensors) -> None:
        """Write model.safetensors or last.safetensors."""
        write_tensors(self.path / f"{name}.safetensors", weights)

    def pictures(self) -> list[Path]:
        """The pictures of predictions, oldest first."""
        return sorted((self.path / "pictures").glob("epoch_*.png"))

    def add_picture(self, epoch: int, picture: Image, best: int) -> None:
        """Keep an epoch's picture, those of the latest before it, and that of the best epoch."""
        path = self.path / "pictures" / f"epoch_{epoch + 1:04}.png"
        write_atomically(path, lambda beside: picture.save(beside, format="png"))
        kept = {f"epoch_{number:04}" for number in (best + 1, *range(epoch - PICTURES + 2, epoch + 2))}
        for other in self.pictures():
            if other.stem not in kept:
                other.unlink()

    def present(self, config: Row, recipe: Row, data: str, best: Row | None, shown: Mapping[str, str]) -> None:
        """Write what people look at: curves and model card."""
        if self.epochs and find_spec("matplotlib"):  # an extra: metrics.csv holds the same numbers
            write_atomically(self.path / "curves.png", lambda beside: draw_curves(self.epochs, beside, shown))
        write_text(self.path / "README.md", model_card(self.path.name, config, recipe, data, best))

    def _write_csv(self) -> None:
        columns = list(dict.fromkeys(key for row in self.epochs for key in row if key != "event"))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.epochs)
        (self.path / "metrics.csv").write_text(text.getvalue())


def environment(processes: int, device: torch.device) -> Row:
    """Versions, device and command."""
    found: Row = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    found["processes"] = processes
    found["threads"] = torch.get_num_threads()
    found["command"] = sys.argv
    found["started"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return found
