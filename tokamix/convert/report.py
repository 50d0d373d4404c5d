"""The report of a conversion: accuracy after each phase, speed and memory before and after."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tokamix.files import write_json, write_text

PHASES = {
    "original": "original",
    "swapped": "swapped, nothing else",
    "calibrated": "1. calibrated, in closed form",
    "transferred": "2. attention transfer",
    "converted": "3. fine-tuned with distillation",
}


@dataclass
class Speed:
    """Forward pass at one image size: milliseconds per image and peak memory, or why they were not measured."""

    size: int
    milliseconds: float | None = None
    memory_gb: float | None = None
    problem: str = ""


@dataclass
class Conversion:
    """The result of `tokamix.convert`.

    Attributes:
        folder: the run of the converted network; `tokamix.evaluate` and `predict` read it.
        source: the original.
        to: name of the new mixer.
        data: name of the data set.
        device: that trained and measured.
        accuracy: top-1 in percent of the "original", and of the network when "swapped", "calibrated", "transferred" and
            "converted".
        errors: squared error of each new mixer after calibration, relative to the variance of the replaced one's
            output.
        kept: attentions that were not replaced.
        epochs: passes over the training set: "transfer" and "fine-tuning".
        before: speed of the original at each size.
        after: speed of the converted network.
    """

    folder: Path
    source: str
    to: str
    data: str
    device: str
    accuracy: dict[str, float] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    kept: list[str] = field(default_factory=list)
    epochs: dict[str, int] = field(default_factory=dict)
    before: list[Speed] = field(default_factory=list)
    after: list[Speed] = field(default_factory=list)

    @property
    def break_even(self) -> int | None:
        """Image size from which on the converted network is faster; None if it is not at the sizes measured."""
        return find_break_even(self.before, self.after)

    def to_dict(self) -> dict[str, Any]:
        """All numbers, for JSON."""
        return {**asdict(self), "folder": str(self.folder), "break_even": self.break_even}

    def write(self) -> None:
        """Write conversion.json and conversion.md into the folder."""
        write_json(self.folder / "conversion.json", self.to_dict(), indent=2)
        write_text(self.folder / "conversion.md", self.to_markdown())

    @classmethod
    def read(cls, folder: Path) -> "Conversion":
        """Read conversion.json of a folder."""
        values = json.loads((folder / "conversion.json").read_text())
        values.pop("break_even")
        for key in ("before", "after"):
            values[key] = [Speed(**row) for row in values[key]]
        return cls(**values | {"folder": folder})

    def to_markdown(self) -> str:
        """The report as a page."""
        lines = [f"# {self.source} converted to {self.to}", "", f"Data: {self.data}; device: {self.device}.", ""]
        lines += ["| network | top-1 |", "|---|---:|"]
        lines += [f"| {PHASES[key]} | {value:.2f} % |" for key, value in self.accuracy.items()]
        lines += ["", f"Epochs: {', '.join(f'{value} of {key}' for key, value in self.epochs.items())}."]
        if self.kept:
            lines += ["", f"Softmax attention is kept in {', '.join(self.kept)}."]
        if self.after:
            lines += ["", *self.speed_table(), "", self.break_even_text()]
        return "\n".join(lines) + "\n"

    def speed_table(self) -> list[str]:
        """Speed and memory at each size, as lines of Markdown."""
        lines = ["| image | ms per image before | after | memory before | after |", "|---:|---:|---:|---:|---:|"]
        for one, two in zip(self.before, self.after, strict=True):
            times = (f"{row.milliseconds:.2f}" if row.milliseconds else row.problem for row in (one, two))
            memory = (f"{row.memory_gb:.2f} GB" if row.memory_gb is not None else "" for row in (one, two))
            lines.append(f"| {one.size} px | {' | '.join((*times, *memory))} |")
        return lines

    def break_even_text(self) -> str:
        """The break-even size as a sentence."""
        sizes = [row.size for row in self.after if row.milliseconds]
        if self.break_even is None:
            return f"Not faster than the original up to {max(sizes, default=0)} px."
        if sizes and self.break_even <= min(sizes):
            return f"Faster than the original at all measured sizes: {', '.join(map(str, sizes))} px."
        return f"Faster than the original from about {self.break_even} px on."


def find_break_even(before: Sequence[Speed], after: Sequence[Speed]) -> int | None:
    """The image size from which on `after` is faster, interpolated between sizes; a size that only it fits counts."""
    logs: list[tuple[int, float]] = []  # size, and logarithm of the time ratio: below 0 is faster
    for one, two in zip(before, after, strict=True):
        if two.milliseconds:
            logs.append((one.size, math.log(two.milliseconds / one.milliseconds) if one.milliseconds else -math.inf))
    result = None
    for index in range(len(logs) - 1, -1, -1):  # from the largest size down to the first that is slower
        size, ratio = logs[index]
        if ratio >= 0:
            if result is not None and not math.isinf(following := logs[index + 1][1]):
                share = ratio / (ratio - following)
                result = round(size * (result / size) ** share)
            break
        result = size
    return result
