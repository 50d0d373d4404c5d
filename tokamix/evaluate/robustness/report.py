"""Table, CSV file and plot of a `RobustnessResult`.

results.csv      accuracy under each condition with its 95 % interval, and the difference to the first model
robustness.png   curves of all models, accuracy by corruption, and confidence against accuracy
"""

import csv
import io
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokamix.evaluate.robustness.conditions import CLEAN, Condition
from tokamix.evaluate.robustness.corruptions import CORRUPTIONS
from tokamix.evaluate.robustness.result import ModelRobustness, RobustnessResult
from tokamix.evaluate.robustness.statistics import difference_interval, mean_interval
from tokamix.files import write_text

CURVES = {  # test: title and title of the x axis
    "occlusion": ("Centre occlusion", "hidden area (%)"),
    "patch_drop": ("Patch drop", "dropped patches (%)"),
    "fgsm": ("FGSM", "epsilon (1/255)"),
    "pgd": ("PGD", "epsilon (1/255)"),
    "corruptions": ("Corruptions", "severity, mean of 15 corruptions"),
}
LEVELS = {
    "occlusion": "{:g} %",
    "patch_drop": "{:g} %",
    "fgsm": "{:g}/255",
    "pgd": "{:g}/255",
    "corruptions": "severity {:g}",
}
HEADER = ("model", "test", "kind", "level", "images", "accuracy", "low", "high")
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # Okabe and Ito


class Row(NamedTuple):
    """A row of the table: a label, and mean, low and high of each model in percent."""

    label: str
    values: list[tuple[float, float, float]]


def summarize(result: RobustnessResult) -> list[Row]:
    """Rows of the table: every point of the curves, with corruptions averaged over their kinds, and ImageNet's sets."""

    groups = group_conditions(list(result.models[0].scores))
    return [
        Row(label, [mean_interval(mean_scores(model, chosen)) for model in result.models])
        for label, chosen in groups.items()
    ]


def group_conditions(conditions: Sequence[Condition]) -> dict[str, list[Condition]]:
    """The conditions of each row of the table, by its label."""
    groups = {"clean": [CLEAN]}
    for test, (title, _) in CURVES.items():
        for level in _levels(conditions, test):
            label = f"{title} {LEVELS[test].format(level)}"
            groups[label] = [condition for condition in conditions if condition[:2] == (test, level)]
    corruptions = [condition for condition in conditions if condition.test == "corruptions"]
    if len(_levels(conditions, "corruptions")) > 1:
        groups["Corruptions, all severities"] = corruptions
    return groups | {condition.kind: [condition] for condition in conditions if condition.test == "imagenet"}


def mean_scores(model: ModelRobustness, conditions: Sequence[Condition]) -> Tensor:
    """Mean score of each image over some conditions."""
    return torch.stack([model.scores[condition].double() for condition in conditions]).mean(0)


def write_csv(result: RobustnessResult, folder: Path) -> None:
    """Write results.csv."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*HEADER, "difference", "difference_low", "difference_high"))
    for model in result.models:
        for condition, scores in model.scores.items():
            values = [*mean_interval(scores), *difference_interval(scores, result.models[0].scores[condition])]
            start = (model.title, condition.test, condition.kind, f"{condition.level:g}", len(scores))
            writer.writerow((*start, *(f"{value:.3f}" for value in values)))
        if model.calibration is not None:
            writer.writerow((model.title, "ece", "", "0", result.num_images, f"{model.calibration.ece:.3f}", *[""] * 5))
    write_text(folder / "results.csv", text.getvalue())


def draw_robustness(result: RobustnessResult, path: Path) -> None:
    """Draw one panel for each test, with a line for each model; bands are 95 % intervals over the images."""
    from matplotlib.figure import Figure

    first = result.models[0].scores
    panels: list[Any] = [(_draw_curve, test) for test in CURVES if _levels(first, test)]
    if _levels(first, "corruptions"):
        panels.append((_draw_kinds, ""))
    if result.models[0].calibration is not None:
        panels.append((_draw_calibration, ""))
    columns = min(4, max(2, len(panels)))
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(3.6 * columns, 3.5 * lines + 0.7), dpi=110, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False).flatten()
    for (draw, test), panel in zip(panels, axes, strict=False):
        draw(panel, result, test)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25)
    for panel in axes[len(panels) :]:
        panel.set_axis_off()
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=min(4, len(labels)), frameon=False)
    figure.supxlabel(f"{result.num_images:,} images of {Path(result.data).name}; bands: 95 % intervals", fontsize=9)
    figure.savefig(path, format="png")


def _draw_curve(panel: Any, result: RobustnessResult, test: str) -> None:
    for number, model in enumerate(result.models):
        levels = [0.0, *(level for level in _levels(model.scores, test) if level)]
        values = [mean_interval(scores) for scores in _curve(model, test, levels)]
        mean, low, high = zip(*values, strict=True)
        places = range(len(levels)) if test in ("fgsm", "pgd") else levels  # epsilons double: equal distances
        colour = COLOURS[number % len(COLOURS)]
        panel.plot(places, mean, marker="o", markersize=3, color=colour, label=model.title)
        panel.fill_between(places, low, high, color=colour, alpha=0.15, linewidth=0)
        panel.set_xticks(list(places), [f"{level:g}" for level in levels])
    title, axis = CURVES[test]
    panel.set(title=title, xlabel=axis, ylabel="accuracy (%)", ylim=(0, 101))


def _draw_kinds(panel: Any, result: RobustnessResult, test: str) -> None:
    height = 0.7 / len(result.models)
    for number, model in enumerate(result.models):
        for place, kind in enumerate(CORRUPTIONS):
            chosen = [c for c in model.scores if c.test == "corruptions" and c.kind == kind]
            mean, low, high = mean_interval(mean_scores(model, chosen))
            at = place - 0.35 + (number + 0.5) * height
            colour = COLOURS[number % len(COLOURS)]
            panel.plot([low, high], [at, at], color=colour, alpha=0.5, linewidth=1.5)
            panel.plot(mean, at, marker="o", markersize=3, color=colour)
    panel.set_yticks(range(len(CORRUPTIONS)), [kind.replace("_", " ") for kind in CORRUPTIONS], fontsize=7)
    panel.invert_yaxis()
    panel.set(title="By corruption", xlabel="accuracy (%), mean over severities")


def _draw_calibration(panel: Any, result: RobustnessResult, test: str) -> None:
    panel.plot([0, 100], [0, 100], color="#888888", linewidth=1, linestyle="--")
    for number, model in enumerate(result.models):
        calibration = model.calibration
        assert calibration is not None
        shown = calibration.images >= max(10, result.num_images / 1000)  # the accuracy of a few images is noise
        label, colour = f"ECE {calibration.ece:.1f} %", COLOURS[number % len(COLOURS)]
        confidence, accuracy = (values[shown].tolist() for values in (calibration.confidence, calibration.accuracy))
        panel.plot(confidence, accuracy, marker="o", markersize=3, color=colour, label=label)
    panel.legend(fontsize=7, frameon=False, loc="upper left")
    panel.set(title="Calibration", xlabel="confidence (%)", ylabel="accuracy (%)", xlim=(0, 100), ylim=(0, 100))


def _levels(conditions: Iterable[Condition], test: str) -> list[float]:
    return sorted({condition.level for condition in conditions if condition.test == test})


def _curve(model: ModelRobustness, test: str, levels: Sequence[float]) -> Iterator[Tensor]:
    """Scores at each level; level 0 is the unchanged image."""
    for level in levels:
        chosen = [condition for condition in model.scores if condition[:2] == (test, level)]
        yield mean_scores(model, chosen or [CLEAN])
