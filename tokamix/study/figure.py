"""The panels of a comparison: accuracy after equal epochs and equal time, and speed."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokamix.files import write_atomically
from tokamix.study.plan import equals_its_twin, final_rows, train_speed
from tokamix.study.rows import Row, read_all_rows, read_rows, score_of
from tokamix.study.schema import Study, load_study
from tokamix.study.statistics import contrast

NOT_MEASURED = "not measured"
MARKERS = ("o", "D", "s")  # of the bodies; the first is filled
METRICS = {"top1": "top-1 in %", "miou": "mIoU in %", "box_ap": "box AP in %"}


def draw_figure(study: str | Study, path: str | Path, results: str | Path = "results/studies") -> None:
    """Draw a comparison; an arm without runs says "not measured".

    The panels: accuracy after equal epochs in each of the study's bodies; accuracy against training speed, accuracy
    after equal time, and inference speed against resolution, in the first body, each if it is measured.

    Args:
        study: a comparison of arms.
        path: the PNG file.
        results: folder of the study's CSV files.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("figures need matplotlib; run pip install 'tokamix[study]'") from None
    study = study if isinstance(study, Study) else load_study(study)
    rows = read_all_rows(Path(results), study.name)
    speeds = read_rows(Path(results) / f"{study.name}_speed.csv")
    compared = [name for name, arm in study.arms.items() if not arm.equal_time]
    epochs = {name: scores_of(study, final_rows(study, name, rows, speeds)) for name in compared}
    if not any(epochs.values()):
        raise ValueError(f"study {study.name} has no finished runs in {results}; run it first")
    prefixes = [f"{body}_" for body in study.bodies] or [""]
    arms = [name for name in compared if name.startswith(prefixes[0])]
    first, colours = arms[0], {name: f"C{i % 10}" for i, name in enumerate(arms)}
    arms.sort(key=lambda name: sum(epochs[name]) / max(1, len(epochs[name])))
    mixers = {name: name.removeprefix(prefixes[0]) for name in arms}
    labels = {name: mixers[name].replace("_", " ") for name in arms}
    in_body = f" in the {study.bodies[0]}" if study.bodies else ""

    trained = {name: speed for name in arms if (speed := train_speed(speeds, name)) and epochs[name]}
    timed = {name: own for name in arms if (own := equal_time_rows(study, name, rows, speeds)) is not None}
    infer = [row for row in speeds if row["mode"] == "infer" and row["arm"] in arms]
    count = 1 + sum(map(bool, (len(trained) == len(arms), timed, infer)))
    down, across = (2, 2) if count == 4 else (1, count)
    height = 0.8 + 0.4 * max(9, len(arms))
    figure = Figure(figsize=(5.5 * across, height * down), layout="constrained")
    panels: Any = iter(figure.subplots(down, across, squeeze=False).flat)
    metric = METRICS.get(study.metric, study.metric)
    gpus = ", ".join(sorted({row["gpu"] for row in speeds if row.get("gpu")}))

    panel = next(panels)
    marks = [[epochs.get(prefix + mixers[name], []) for prefix in prefixes] for name in arms]
    _draw_scores(panel, [(labels[name], colours[name], own) for name, own in zip(arms, marks, strict=True)])
    if study.bodies:
        panel.legend(handles=[_mark(panel, place, body) for place, body in enumerate(study.bodies)], fontsize=8)
    length = study.arms[arms[0]].settings.get("epochs")
    panel.set(title=f"Accuracy after {length} epochs", xlabel=_describe(metric, [own for row in marks for own in row]))
    if len(trained) == len(arms):
        panel = next(panels)
        _draw_tradeoff(panel, [(labels[name], colours[name], epochs[name], trained[name]) for name in arms])
        panel.set(title=f"Accuracy against training speed{in_body}", xlabel=f"training on {gpus}, images/s")
        panel.set(ylabel=metric)
    if timed:
        panel = next(panels)
        texts = {name: f"{labels[name]}, {_epochs(own)}" if own else labels[name] for name, own in timed.items()}
        scores = {name: scores_of(study, own) for name, own in timed.items()}
        _draw_scores(panel, [(texts[name], colours[name], [scores[name]]) for name in timed])
        panel.set(title=f"Accuracy after equal time{in_body}", xlabel=_describe(metric, scores.values()))
    if infer:
        panel = next(panels)
        _draw_speeds(panel, [(labels[name], colours[name], name) for name in arms], infer, first)
        panel.set(title=f"Inference{in_body} on {gpus}", ylabel=f"images/s against {labels[first]}")
    write_atomically(Path(path), lambda temporary: figure.savefig(temporary, format="png", dpi=130))


def scores_of(study: Study, rows: Sequence[Row]) -> list[float]:
    """The metric of finished runs."""
    return [score_of(row, study.metric) for row in rows if row["status"] == "finished"]


def equal_time_rows(study: Study, name: str, rows: Sequence[Row], speeds: Sequence[Row]) -> list[Row] | None:
    """Runs of an arm with as much time as the reference; None for an arm without such runs in the study."""
    arm, own = study.arms[name], final_rows(study, name, rows, speeds)
    twins = [a for a in study.arms.values() if a.equal_time and a.settings == arm.settings]
    if not twins:
        return own if any(a.equal_time == name for a in study.arms.values()) else None
    if equals_its_twin(study, twins[0], speeds):
        return own
    return final_rows(study, twins[0].name, rows, speeds)


def _epochs(rows: Sequence[Row] | None) -> str:
    return f"{rows[0]['epochs']} epochs" if rows else ""


def _describe(metric: str, scores: Any) -> str:
    counts = sorted({len(values) for values in scores if values})
    if not counts:
        return metric
    n = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"
    return f"{metric}, mean and 95 % interval, n = {n}"


def _style(body: int, colour: str) -> dict[str, Any]:
    return {
        "color": colour,
        "marker": MARKERS[body % len(MARKERS)],
        "markerfacecolor": "white" if body else colour,
        "markersize": 6,
    }


def _mark(panel: Any, body: int, label: str) -> Any:
    """What the legend shows for a body."""
    return panel.plot([], [], linestyle="", label=label, **_style(body, "0.3"))[0]


def _draw_scores(panel: Any, arms: Sequence[tuple[str, str, Sequence[Sequence[float]]]]) -> None:
    """One row for each arm: its runs in each body as small marks, their mean with its interval."""
    measured = [scores for _, _, bodies in arms for scores in bodies if scores]
    for row, (_, colour, bodies) in enumerate(arms):
        for body, scores in enumerate(bodies):
            place = row + 0.17 * (len(bodies) - 1) - 0.34 * body
            if not scores:
                left = min(map(min, measured)) if measured else 0.5
                panel.annotate(NOT_MEASURED, (left, place), color="0.5", fontsize=9, va="center")
                continue
            mean = sum(scores) / len(scores)
            error = contrast([scores], [1.0]).interval() if len(scores) > 1 else None
            panel.plot(scores, [place] * len(scores), "|", color=colour, alpha=0.6, markersize=9)
            panel.errorbar(mean, place, xerr=error, capsize=3, **_style(body, colour))
            if len(bodies) == 1:
                above = {"xytext": (0, 6), "textcoords": "offset points", "ha": "center"}
                panel.annotate(f"{mean:.1f}", (mean, place), fontsize=8, **above)
    panel.set_yticks(range(len(arms)), [label for label, _, _ in arms])
    panel.set_ylim(-0.6, len(arms) - 0.3)
    if not measured:
        panel.set_xlim(0, 2)
        panel.set_xticks([])
    panel.grid(alpha=0.3, axis="x")


def _draw_tradeoff(panel: Any, arms: Sequence[tuple[str, str, Sequence[float], float]]) -> None:
    """Mean accuracy with its interval against images per second of training."""
    points = {label: (speed, sum(scores) / len(scores)) for label, _, scores, speed in arms}
    width, height = (max(axis) - min(axis) for axis in zip(*points.values(), strict=True))
    for label, colour, scores, speed in arms:
        mean = points[label][1]
        error = contrast([scores], [1.0]).interval() if len(scores) > 1 else None
        panel.errorbar(speed, mean, yerr=error, color=colour, marker="o", capsize=3)
        crowded = any(
            0 < x - speed < 0.15 * width and abs(y - mean) < 0.06 * height for x, y in points.values()
        )  # another label would stand to the right
        side = {"xytext": (-7, 0), "ha": "right"} if crowded else {"xytext": (7, 0), "ha": "left"}
        panel.annotate(label, (speed, mean), textcoords="offset points", va="center", fontsize=9, color=colour, **side)
    panel.margins(x=0.25)
    panel.xaxis.set_major_formatter("{x:,.0f}")
    panel.grid(alpha=0.3)


def _draw_speeds(panel: Any, arms: Sequence[tuple[str, str, str]], infer: Sequence[Row], reference: str) -> None:
    """Images per second, divided by those of the reference, at each side of the images.

    The ticks name the images per second of the reference. A label names the memory at the largest side where it is over
    twice the least.
    """
    sides = sorted({int(row["size"]) for row in infer})
    rows = {(row["arm"], int(row["size"])): row for row in infer}
    base = {side: _speed(rows, reference, side) for side in sides}
    least = min((float(row["peak_gb"]) for row in infer if int(row["size"]) == sides[-1] and row["peak_gb"]), default=0)
    ends = []
    for label, colour, name in arms:
        speeds = [(place, _speed(rows, name, side), base[side]) for place, side in enumerate(sides)]
        points = [(place, own / other) for place, own, other in speeds if own and other]
        panel.plot(*(zip(*points, strict=True) if points else ([], [])), color=colour, marker="o")
        last = rows.get((name, sides[-1]), {"peak_gb": "", "status": NOT_MEASURED})
        if last["status"] != "measured":
            label = f"{label}: {last['status']}"
        elif last["peak_gb"] and float(last["peak_gb"]) > 2 * least:
            label = f"{label}, {float(last['peak_gb']):.1f} GB"
        ends.append((math.log(points[-1][1]) if points else 0.0, label, colour))
    span = (max(ends)[0] - min(ends)[0]) or 1.0
    height = -math.inf
    for end, label, colour in sorted(ends):  # labels keep a distance from each other
        height = max(end, height + 0.055 * span)
        place = {"xytext": (len(sides) - 0.9, math.exp(height)), "textcoords": "data", "va": "center", "fontsize": 8}
        panel.annotate(label, (len(sides) - 1, math.exp(end)), color=colour, **place)
    title = next(label for label, _, name in arms if name == reference)
    panel.set(yscale="log", xlim=(-0.35, len(sides) - 0.05), xlabel=f"side of the images in px; images/s of {title}")
    panel.set_xticks(range(len(sides)), [f"{side}\n{base[side] or 0:,.0f}/s" for side in sides])
    low, high = panel.get_ylim()
    ticks = [tick for tick in (0.1, 0.2, 0.3, 0.5, 1, 2, 3, 5, 10) if low <= tick <= high]
    panel.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    panel.minorticks_off()
    panel.grid(alpha=0.3)


def _speed(rows: dict[tuple[str, int], Row], arm: str, side: int) -> float | None:
    speed = rows.get((arm, side), {}).get("images_per_second")
    return float(speed) if speed else None
