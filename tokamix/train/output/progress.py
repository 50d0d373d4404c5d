"""What a terminal shows of a run while it goes."""

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn


class Display:
    """A bar with time left, speed, loss, accuracy and memory; plain lines, one an epoch, where there is no terminal.

    Args:
        title: what is trained on what.
        epochs: of the run.
        steps: of an epoch.
        update: steps that are done already.
        shown: numbers of an evaluation to show, and what to call them.
        silent: show nothing.
    """

    def __init__(
        self, title: str, epochs: int, steps: int, update: int, shown: Mapping[str, str], silent: bool = False
    ) -> None:
        self.console = Console(quiet=silent)
        self.epochs, self.steps, self.shown = epochs, steps, shown
        self.accuracy: list[str] = []  # of the last evaluation
        self.last: dict[str, Any] | None = None
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[text]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(elapsed_when_finished=False),
            console=self.console,
            refresh_per_second=4,
            disable=silent or not self.console.is_terminal,
        )
        if update:
            self.console.print(f"{title}: going on after step {update} of {epochs * steps}", highlight=False)
        else:
            self.console.print(f"{title}: {epochs} epochs of {steps} steps", highlight=False)
        self.task = self.bar.add_task("", total=epochs * steps, completed=update, text="")

    def __enter__(self) -> Self:
        self.bar.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.__exit__(kind, error, trace)

    def step(self, update: int) -> None:
        """Move the bar."""
        self.bar.update(self.task, completed=update)

    def report(self, row: dict[str, Any]) -> None:
        """Show the numbers of the last steps."""
        self.last = row
        parts = [f"loss {row['loss']:.3f}", *self.accuracy, f"{row['images_per_second']:,.0f} img/s"]
        text = "  ".join([*parts, f"{row['memory_gb']:.1f} GB"])
        self.bar.update(self.task, description=f"epoch {row['epoch'] + 1}/{self.epochs}", text=text)

    def epoch(self, row: dict[str, Any], best: bool) -> None:
        """Print an epoch's line."""
        found = {key: label for key, label in self.shown.items() if key in row}
        self.accuracy = [f"{label} {row[key]:.2f}" for key, label in found.items()]
        if self.last is not None:
            self.report(self.last)
        averaged = {key: f" (averaged {row[f'ema_{key}']:.2f})" if f"ema_{key}" in row else "" for key in found}
        self.console.print(
            f"epoch {row['epoch'] + 1:>{len(str(self.epochs))}}/{self.epochs}"
            f"  train loss {row['train_loss']:.4f}"
            + (f"  loss {row['loss']:.4f}" if "loss" in row else "")
            + "".join(f"  {label} {row[key]:6.2f}{averaged[key]}" for key, label in found.items())
            + f"  {row['images_per_second']:,.0f} img/s  {row['seconds']:.1f} s"
            + ("  best" if best else ""),
            highlight=False,
            soft_wrap=True,
        )

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
