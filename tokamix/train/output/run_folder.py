"""The folder of a run: everything needed to resume it, to inspect it, and to use the model elsewhere.

config.json         the model as timm and the Hub describe it: timm.create_model("local-dir:RUN", pretrained=True)
model.safetensors   the best weights so far; last.safetensors: the latest
state/              the training state that a run resumes from
recipe.yaml         every setting, usable as --recipe; environment.json: versions, device, command
metrics.jsonl       one line per report and per epoch; metrics.csv: the epochs; curves.png; tensorboard/
predictions/        predictions of segmenters and detectors on a few validation images, of the best and latest epochs
per_class.csv, confusion_matrix.csv and .png, mistakes.png: a report on a classifier's best weights
README.md           a model card
"""

import csv
import io
import json
import platform
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from tokamix.files import WriteError, write_atomically, write_json, write_tensors, write_text
from tokamix.recipes import Recipe
from tokamix.train.loop.state import Tensors, read_header
from tokamix.train.output.card import Facts, create_card
from tokamix.train.output.curves import draw_curves
from tokamix.train.output.lock import LockedError, is_locked, lock_folder

Row = dict[str, Any]
RUNS = Path("runs")
LATEST_DRAWINGS = 3  # kept besides the best epoch's
PACKAGES = ("tokamix", "torch", "torchvision", "timm", "accelerate", "safetensors", "numpy")
REPORT = ("per_class.csv", "confusion_matrix.csv", "confusion_matrix.png", "mistakes.png")
OUTPUTS = ("metrics.jsonl", "metrics.csv", "curves.png", "model.safetensors", "last.safetensors", *REPORT)


class RunFolder:
    """Reads and writes a run's files; in a distributed run, rank 0 alone writes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.state = self.path / "state" / "state.safetensors"
        self.epochs: list[Row] = []

    def begin(self, recipe_yaml: str, config: Row, settings: Row, accelerator: Any, steps: int) -> None:
        """Write everything that is known before the first step; `steps` are those of an epoch."""
        write_text(self.path / "recipe.yaml", recipe_yaml)
        write_json(self.path / "config.json", config, indent=2)
        environment = describe_environment(accelerator) | {"steps": steps, "settings": settings}
        write_json(self.path / "environment.json", environment, indent=2)

    def clear(self, start_over: bool) -> None:
        """Remove the outputs of an earlier run, before a new one starts, or starts over."""
        # a kill before the first state was complete leaves its folder
        if not start_over and (self.path / "last.safetensors").exists() and not self.state.parent.exists():
            raise ValueError(
                f"{self.path} holds the weights of a run whose {self.state.parent.name}/ was removed, so it cannot be"
                " resumed; use another --output, or start over with --no-resume, which deletes the weights"
            )
        if (self.path / "model.safetensors").exists() and not (self.path / "metrics.jsonl").exists():
            raise ValueError(f"{self.path} holds a model that is not of a tokamix run; use another --output")
        for name in OUTPUTS:
            (self.path / name).unlink(missing_ok=True)
        for drawing in self.drawings():
            drawing.unlink()
        self.state.unlink(missing_ok=True)

    def truncate(self, epochs: int, update: int) -> None:
        """Remove the lines written after this many epochs and steps: they will be written again."""
        # an epoch's line follows its last step
        kept = [row for row in self.rows() if (row["epoch"] <= epochs or row["event"] == "train")]
        kept = [row for row in kept if row["update"] <= update]
        self.epochs = [row for row in kept if row["event"] == "epoch"]
        write_text(self.path / "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in kept))

    def rows(self) -> list[Row]:
        """The lines of metrics.jsonl, up to one that a kill has cut off."""
        path = self.path / "metrics.jsonl"
        rows = []
        for line in path.read_text().splitlines() if path.is_file() else ():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break
        return rows

    def add(self, row: Row) -> None:
        """Append a row to metrics.jsonl, and an epoch's to metrics.csv."""
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

    def drawings(self) -> list[Path]:
        """The drawings of predictions, oldest first."""
        return sorted((self.path / "predictions").glob("epoch_*.png"))

    def add_drawing(self, epoch: int, drawing: Image, best: int) -> None:
        """Write an epoch's drawing; keep the latest ones and that of the best epoch."""
        path = self.path / "predictions" / f"epoch_{epoch:04}.png"
        write_atomically(path, lambda temporary: drawing.save(temporary, format="png"))
        kept = {f"epoch_{number:04}" for number in (best, *range(epoch - LATEST_DRAWINGS + 1, epoch + 1))}
        for other in self.drawings():
            if other.stem not in kept:
                other.unlink()

    def publish(self, config: Row, recipe: Recipe, best: Row | None, facts: Facts) -> None:
        """Write the files for people: curves and model card."""
        names = facts.metrics
        if self.epochs and find_spec("matplotlib"):  # an extra; metrics.csv has the same numbers
            write_atomically(self.path / "curves.png", lambda temporary: draw_curves(self.epochs, temporary, names))
        results = {"best": best, "last": self.last_evaluation(best)} if best else {}
        if recipe.select == "last":
            results.pop("best", None)
        card = create_card(self.path.name, config, recipe, facts, results, self._describe_training())
        write_text(self.path / "README.md", card)

    def last_evaluation(self, best: Row) -> Row:
        """The last evaluation, of the averaged weights if there are any, with the keys of the best one."""
        keys = [key for key in best if key not in ("epoch", "averaged")]
        row = next((row for row in reversed(self.epochs) if keys[0] in row), None)
        if row is None:  # metrics.jsonl was removed
            return {}
        prefix = "ema_" if f"ema_{keys[0]}" in row else ""
        return {key: row[prefix + key] for key in keys} | {"epoch": row["epoch"], "averaged": bool(prefix)}

    def _describe_training(self) -> str:
        """Hardware, time and versions, in words."""
        environment = json.loads((self.path / "environment.json").read_text())
        processes = f"{environment['processes']} x " if environment["processes"] > 1 else ""
        device = environment["device"].replace("cpu", "CPU")
        seconds = sum(row["seconds"] for row in self.epochs)
        spent = f"{seconds / 3600:.1f} h" if seconds >= 3600 else f"{seconds:.0f} s"
        versions = ", ".join(f"{name} {environment[name]}" for name in ("tokamix", "torch", "timm"))
        return f"{processes}{device}, {len(self.epochs)} epochs in {spent} (evaluation not counted); {versions}"

    def can_resume(self, settings: Row) -> bool:
        """Whether this is an unfinished run with these settings."""
        try:
            if self.state.is_file():
                header = read_header(self.state)
                return not header["finished"] and not changed_settings(header["settings"], settings)
            # stopped before the first save
            started = json.loads((self.path / "environment.json").read_text())["settings"]
            return not (self.path / "model.safetensors").exists() and not changed_settings(started, settings)
        except (OSError, ValueError, KeyError, TypeError):
            return False

    def _write_csv(self) -> None:
        columns = list(dict.fromkeys(key for row in self.epochs for key in row if key != "event"))
        text = io.StringIO()
        writer = csv.DictWriter(text, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(self.epochs)
        (self.path / "metrics.csv").write_text(text.getvalue())


@contextmanager
def lock_run_folder(output: str | Path | None, settings: Row, new: bool = False) -> Iterator[Path]:
    """Lock the run's folder and give its path.

    Args:
        output: the folder; default: the unfinished run with these settings, else the first free folder of runs/train,
            runs/train-2, ... that no other job uses.
        settings: recipe, model and data of the run.
        new: do not resume a run.
    """
    if output is not None:
        with lock_folder(Path(output)):
            yield Path(output)
        return
    for path in (RUNS / ("train" if number == 1 else f"train-{number}") for number in count(1)):
        free = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        if not free and (new or is_locked(path) or not RunFolder(path).can_resume(settings)):
            continue
        with ExitStack() as stack:
            try:
                stack.enter_context(lock_folder(path))
            except LockedError:  # by another job at this moment
                continue
            yield path
            return


def changed_settings(before: Row, now: Row) -> str:
    """The settings that differ, in words; empty if none do."""
    changed = [key for key in {**before, **now} if before.get(key) != _as_json(now.get(key))]
    return ", ".join(f"{key} was {before.get(key)!r} and is {now.get(key)!r}" for key in changed)


def _as_json(value: Any) -> Any:
    """A value after a round trip through JSON: keys are strings, tuples are lists."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def describe_environment(accelerator: Any) -> Row:
    """Versions, device and command."""
    device = accelerator.device
    values: Row = {"python": platform.python_version(), "platform": platform.platform()}
    for package in PACKAGES:
        try:
            values[package] = version(package)
        except PackageNotFoundError:
            values[package] = None
    values["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    values["processes"] = accelerator.num_processes
    values["threads"] = torch.get_num_threads()
    values["command"] = sys.argv
    values["started"] = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    return values
