"""The progress of a run on a terminal, in 80 columns."""

import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from tokamix.train.output.duration import format_duration

COLUMNS = 80
INTERVAL = 30.0  # seconds without a line, where there is no terminal


class Display:
    """A progress bar with loss, metrics, speed and time left, and one line per epoch; lines only without a terminal.

    Args:
        title: model and data.
        folder: of the run.
        epochs: of the run.
        steps: of an epoch.
        update: steps that are finished already.
        names: metrics to show, with their display names.
        quiet: show nothing.
    """

    def __init__(
        self, title: str, folder: Path, epochs: int, steps: int, update: int, names: Mapping[str, str], quiet: bool
    ) -> None:
        self.console = Console(quiet=quiet)
        self.epochs, self.steps, self.names = epochs, steps, names
        self.metrics: list[str] = []  # of the last evaluation
        self.last: dict[str, Any] | None = None
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=8),
            TaskProgressColumn(),
            TextColumn("{task.fields[text]}"),
            TextColumn("{task.fields[left]:>8} left"),
            console=self.console,
            refresh_per_second=4,
            disable=quiet or not self.console.is_terminal,
        )
        self.left = ""
        self.update, self.printed_at, self.ended = update, time.monotonic(), threading.Event()
        self.prints_lines = not quiet and not self.console.is_terminal
        if update >= epochs * steps:
            self.say(f"{title}: the run in {folder} is complete, there is nothing left to train")
        elif update:
            self.say(f"{title}: resuming {folder} after step {update} of {epochs * steps}")
        else:
            self.say(f"{title}: {_count(epochs, 'epoch')} of {_count(steps, 'step')}, in {folder}")
        self.task = self.bar.add_task("", total=epochs * steps, completed=update, text="", left="")

    def __enter__(self) -> Self:
        self.bar.__enter__()
        if self.prints_lines:
            threading.Thread(target=self._print_regularly, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ended.set()
        self.bar.__exit__(kind, error, trace)

    def step(self, update: int, left: float | None = None) -> None:
        """Move the bar; `left` is the number of seconds to the end of the run."""
        self.update, self.left = update, "" if left is None else format_duration(left)
        self.bar.update(self.task, completed=update, left=self.left)

    def report(self, row: dict[str, Any]) -> None:
        """Show the metrics of the last steps."""
        self.last = row
        description = f"epoch {row['epoch']}/{self.epochs}"
        parts = [f"loss {row['loss']:.3f}", *self.metrics[:1], f"{row['images_per_second']:,.0f} img/s"]
        # bar, percentage, time left and the spaces between them take 29 columns
        self.bar.update(self.task, description=description, text=_join(parts, COLUMNS - 29 - len(description), " "))

    def epoch(self, row: dict[str, Any], is_best: bool) -> None:
        """Print an epoch's line."""
        shown = {key: name for key, name in self.names.items() if key in row}
        self.metrics = [f"{name} {row[key]:.2f}" for key, name in shown.items()]
        if self.last is not None:
            self.report(self.last)
        parts = [f"epoch {row['epoch']:>{len(str(self.epochs))}}/{self.epochs}", f"train loss {row['train_loss']:.4f}"]
        parts += [f"val loss {row['loss']:.4f}"] if "loss" in row else []
        for key, name in shown.items():
            parts.append(f"{name} {row[key]:.2f}" + (f" (ema {row[f'ema_{key}']:.2f})" if f"ema_{key}" in row else ""))
        parts += ["best"] if is_best else []
        self.say(_join([*parts, f"{row['seconds']:.1f} s", f"{row['images_per_second']:,.0f} img/s"], COLUMNS))

    def _print_regularly(self) -> None:
        """Print a line when nothing was printed for 30 s, also during a long evaluation or compilation."""
        while not self.ended.wait(max(0.0, self.printed_at + INTERVAL - time.monotonic())):
            if time.monotonic() >= self.printed_at + INTERVAL:
                self.say(self._line())

    def _line(self) -> str:
        """The position in the run and the last metrics."""
        epoch, step = divmod(self.update, self.steps)
        if self.update and not step:
            epoch, step = epoch - 1, self.steps
        parts = [f"epoch {epoch + 1}/{self.epochs}", f"step {step}/{self.steps}"]
        parts += [f"{self.left} left"] if self.left else []
        if self.last is not None:
            parts += [f"loss {self.last['loss']:.4f}", *self.metrics[:1]]
            parts.append(f"{self.last['images_per_second']:,.0f} img/s")
        return _join(parts, COLUMNS)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.printed_at = time.monotonic()
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


def _join(parts: list[str], width: int, space: str = "  ") -> str:
    """Join parts, the last ones only as far as there is room."""
    while len(parts) > 1 and len(space.join(parts)) > width:
        parts = parts[:-1]
    return space.join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)
