"""How long a run still takes, estimated from its first steps."""

import math
import time
from bisect import bisect_right
from collections.abc import Callable

from tokamix.recipes import Recipe

MEASURED = 15.0  # seconds of the run, after which it says how long it takes
LONG = 3 * 3600.0  # seconds, from which on a run on a CPU also says what makes it shorter
SLOWEST = 1e9  # MACs per second that any CPU reaches
FORWARD = 1 / 3  # time of an image in evaluation, as a fraction of that in training, until one is measured


class Duration:
    """The time left of a run: its training steps at the speed measured so far, and its evaluations.

    A step on smaller images, of a run whose images grow, counts by their area. The first step of the process is not
    measured: it warms up, or compiles.

    Args:
        recipe: of the run.
        steps: of an epoch.
        val_images: images of an evaluation.
    """

    def __init__(self, recipe: Recipe, steps: int, val_images: int) -> None:
        self.recipe, self.steps, self.total = recipe, steps, steps * recipe.num_epochs
        self.grows = getattr(recipe, "start_size", None) is not None
        self.evaluated = [epoch for epoch in range(1, recipe.num_epochs + 1) if recipe.evaluates_after(epoch)]
        self.evaluation: float | None = None  # measured seconds
        self.least_step = 0.0  # seconds of a step on images of full size, at least; see `expect`
        passes = 2 if recipe.ema_decay else 1
        self.evaluation_work = FORWARD * passes * val_images / recipe.batch_size
        self.seconds, self.work, self.count = 0.0, 0.0, 0  # of the measured steps
        self.begun: float | None = None
        self.warm, self.at = False, 0.0

    def expect(self, macs: float, speed: Callable[[], float]) -> None:
        """Set the least time of a step before one is measured.

        Args:
            macs: of the forward pass of a step; the backward pass has twice as many.
            speed: measures MACs per second; called for runs that may take hours only.
        """
        if math.isfinite(macs) and 3 * macs * self.total > LONG * SLOWEST:
            self.least_step = 3 * macs / speed()

    def begin(self) -> None:
        """Start the clock before the steps of an epoch."""
        self.at = time.monotonic()
        self.begun = self.at if self.begun is None else self.begun

    def step(self, update: int) -> None:
        """Measure a step; `update` counts the finished ones."""
        before, self.at = self.at, time.monotonic()
        if self.warm:
            self.seconds, self.count = self.seconds + self.at - before, self.count + 1
            self.work += self._work(update - 1)
        self.warm = True

    @property
    def is_settled(self) -> bool:
        """Whether enough was measured to tell it."""
        return bool(self.count) and self.begun is not None and self.at - self.begun >= MEASURED

    def left(self, update: int) -> float | None:
        """Seconds left after this many steps, evaluations included; None before anything was measured."""
        if not self.count:
            return None
        full_step = self.seconds / self.work
        evaluation = full_step * self.evaluation_work if self.evaluation is None else self.evaluation
        return full_step * self._work_left(update) + evaluation * self._evaluations_left(update)

    def describe(self, update: int) -> str:
        """The time left and what it consists of, in words."""
        evaluations, per_step = self._evaluations_left(update), self.seconds / self.count
        return (
            f"about {format_duration(self.left(update) or 0.0)} left: {self.total - update:,} steps, now of"
            f" {per_step:.2g} s, and {evaluations} evaluation{'s' * (evaluations != 1)}"
        )

    def advice(self, update: int) -> str | None:
        """What makes a run on a CPU shorter that takes many hours; None for others.

        Before anything was measured, only a run that takes many hours at least.
        """
        measured = self.left(update)
        left = self.least_step * self._work_left(update) if measured is None else measured
        if left < LONG:
            return None
        key = "iterations" if self.recipe.iterations else "epochs"
        number, whole = getattr(self.recipe, key), left * self.total / max(1, self.total - update)
        fewer, about = max(1, int(number * LONG / whole)), "at least" if measured is None else "about"
        shorter = f"{about} {format_duration(whole * fewer / number)}"
        sizes = ", smaller images (--set image_size=...)" if hasattr(self.recipe, "image_size") else ""
        return (
            f"at the CPU's present speed this run takes {about} {format_duration(left)}; it is shorter with"
            f" --set {key}={fewer} ({shorter}), a smaller --model{sizes}, or on a GPU"
        )

    def _evaluations_left(self, update: int) -> int:
        return len(self.evaluated) - bisect_right(self.evaluated, (update - 1) // self.steps)

    def _work(self, update: float) -> float:
        """A step's work as a fraction of that on images of full size."""
        return (self.recipe.size_at(update / self.total) / self.recipe.image_size) ** 2 if self.grows else 1.0

    def _work_left(self, update: int) -> float:
        left, points = self.total - update, 50
        if not self.grows:
            return left
        return left * sum(self._work(update + left * (i + 0.5) / points) for i in range(points)) / points


def format_duration(seconds: float) -> str:
    """A duration in one unit: 42 s, 25 min, 3.4 h, 5.2 days."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 48 * 3600 else f"{seconds / 86400:.1f} days"
