"""A run's folder seen from outside, also while another process writes it: position, time left, curves, pictures."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

from tokamix.train.loop.state import read_header
from tokamix.train.output.lock import is_locked
from tokamix.train.output.run_folder import Row, RunFolder

METRICS = ("top1", "miou", "mask_ap", "box_ap", "knn", "vqa")  # in percent; the first that a run has is its score
PICTURES = ("mistakes.png", "confusion_matrix.png", "curves.png")
RECENT = 5  # reports whose speed predicts the time left


class Point(NamedTuple):
    """A point of a curve."""

    epoch: float
    value: float
    kind: str  # "training", "validation" or "validation, EMA"


@dataclass(frozen=True)
class RunStatus:
    """What the files of a run's folder tell about it.

    Attributes:
        folder: of the run.
        state: "running" if a process holds the folder's lock, else "finished" or "stopped".
        settings: recipe, model and data.
        rows: the lines of metrics.jsonl.
        steps: of an epoch; None if it is not known.
        best: the selected evaluation; {} before the first one.
    """

    folder: Path
    state: Literal["running", "stopped", "finished"]
    settings: Row
    rows: list[Row] = field(repr=False)
    steps: int | None
    best: Row

    @property
    def epochs(self) -> int:
        """Epochs of the whole run."""
        iterations, interval = self.settings.get("iterations"), self.settings.get("eval_every")
        return iterations // (interval or iterations) if iterations else self.settings.get("epochs", 0)

    @property
    def update(self) -> int:
        """Finished steps."""
        return self.rows[-1]["update"] if self.rows else 0

    @property
    def metric(self) -> str:
        """The metric of the run's curve; empty before the first evaluation."""
        return next((key for key in METRICS if any(key in row for row in self._epoch_rows())), "")

    def seconds_left(self) -> float | None:
        """Training time that is left at the latest speed, without evaluations; None if it is not known yet."""
        speeds = [row["images_per_second"] for row in self.rows if row.get("images_per_second")][-RECENT:]
        if self.steps is None or not speeds:
            return None
        left = max(0, self.epochs * self.steps - self.update)
        return left * self.settings["batch_size"] * len(speeds) / sum(speeds)

    def loss(self) -> list[Point]:
        """Loss over the epochs: of training at every report, of validation at every evaluation."""
        reports = [row for row in self.rows if row["event"] == "train" and self.steps]
        points = [Point(row["update"] / (self.steps or 1), row["loss"], "training") for row in reports]
        return points + self._evaluations("loss")

    def scores(self) -> list[Point]:
        """The metric over the epochs, in percent."""
        return self._evaluations(self.metric) if self.metric else []

    def pictures(self) -> list[Path]:
        """Pictures of the run: predictions, the latest first, then reports."""
        reports = (self.folder / name for name in PICTURES)
        return [*reversed(RunFolder(self.folder).drawings()), *(path for path in reports if path.is_file())]

    def _epoch_rows(self) -> list[Row]:
        return [row for row in self.rows if row["event"] == "epoch"]

    def _evaluations(self, key: str) -> list[Point]:
        kinds = {"": "validation", "ema_": "validation, EMA"}
        rows = self._epoch_rows()
        return [
            Point(row["epoch"], row[prefix + key], kind)
            for prefix, kind in kinds.items()
            for row in rows
            if prefix + key in row
        ]


def read_run(folder: str | Path) -> RunStatus:
    """Read the status of a run.

    Raises:
        ValueError: if the folder holds no run.
    """
    path = RunFolder(folder).path
    try:
        environment = json.loads((path / "environment.json").read_text())
        settings = environment["settings"]
        rows = RunFolder(path).rows()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the folder of a tokamix run") from error
    header = _read_header(path)
    ends = [row["update"] // row["epoch"] for row in rows if row["event"] == "epoch"]
    steps = environment.get("steps") or (ends[-1] if ends else None)  # runs of older versions do not tell
    state: Literal["running", "stopped", "finished"] = "finished" if header.get("finished") else "stopped"
    return RunStatus(path, "running" if is_locked(path) else state, settings, rows, steps, header.get("best") or {})


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run."""
    return (folder / "environment.json").is_file() and (folder / "recipe.yaml").is_file()


def _read_header(folder: Path) -> Row:
    """Values of the saved state; {} before the first save, or if the state is damaged."""
    state = RunFolder(folder).state
    try:
        return read_header(state) if state.is_file() else {}
    except ValueError:
        return {}
