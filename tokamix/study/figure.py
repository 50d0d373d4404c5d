"""The three panels of a comparison: accuracy against speed, accuracy against time, speed against resolution."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokamix.files import write_atomically
from tokamix.study.plan import final_rows, train_speed
from tokamix.study.rows import Row, read_all_rows, read_rows, score_of
from tokamix.study.schema import Study, load_study
from tokamix.study.statistics import contrast


def draw_figure(study: str | Study, path: str | Path, results: str | Path = "results/studies", body: str = "") -> None:
    """Draw the arms whose names start with `body`; a panel shows only what has been measured.

    Args:
        study: a study with speeds.
        path: the PNG file.
        results: folder of the study's CSV files.
        body: prefix of the arms, such as "column_"; it is left out of their labels.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ImportError("figures need matplotlib; run pip install 'tokamix[study]'") from None
    study = study if isinstance(study, Study) else load_study(study)
    rows = read_all_rows(Path(results), study.name)
    speeds = read_rows(Path(results) / f"{study.name}_speed.csv")
    arms = [name for name in study.arms if name.startswith(body) and not study.arms[name].equal_time]
    measured = [name for name in arms if final_rows(study, name, rows, speeds)]
    if not measured:
        raise ValueError(f"study {study.name} has no finished runs of arms {body}* in {results}; run it first")
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    panels = figure.subplots(1, 3)
    colours = {name: f"C{i % 10}" for i, name in enumerate(arms)}
    for name in measured:
        label, marker = name.removeprefix(body).replace("_", " "), {"color": colours[name], "marker": "o"}
        own = final_rows(study, name, rows, speeds)
        scores = [score_of(row, study.metric) for row in own if row["status"] == "finished"]
        speed = train_speed(speeds, name)
        if scores and speed:
            mean = contrast([scores], [1.0]) if len(scores) > 1 else None
            value, error = (mean.value, mean.interval()) if mean else (scores[0], None)
            panels[0].errorbar(speed, value, yerr=error, capsize=3, **marker)
            panels[0].annotate(label, (speed, value), xytext=(6, 4), textcoords="offset points", fontsize=8)
        if scores and speed:
            panels[1].plot(*mean_curve(own, speed), color=colours[name], label=label)
            _draw_equal_time(panels[1], study, name, rows, speeds, colours[name])
        times = [row for row in speeds if row["arm"] == name and row["mode"] == "infer" and row["images_per_second"]]
        if times:
            sizes, rates = zip(*((int(row["size"]), float(row["images_per_second"])) for row in times), strict=True)
            panels[2].plot(sizes, rates, label=label, **marker)
    _label(panels, study)
    write_atomically(Path(path), lambda temporary: figure.savefig(temporary, format="png", dpi=130))


def mean_curve(rows: Sequence[Row], speed: float) -> tuple[list[float], list[float]]:
    """Seconds of training alone, from the measured throughput, and the mean metric over the runs at each evaluation."""
    finished = [row for row in rows if row["status"] == "finished"]
    size = int(finished[0]["train_images"])
    points = list(zip(*(json.loads(row["curve"]) for row in finished), strict=True))
    seconds = [at[0][0] * size / speed for at in points]
    return seconds, [sum(point[2] for point in at) / len(at) for at in points]


def _draw_equal_time(
    panel: Any, study: Study, name: str, rows: Sequence[Row], speeds: Sequence[Row], colour: str
) -> None:
    """Mark the end of the runs of an arm that had as much time as another."""
    for arm in study.arms.values():
        if arm.equal_time and arm.settings == study.arms[name].settings:
            own, speed = final_rows(study, arm.name, rows, speeds), train_speed(speeds, name)
            scores = [score_of(row, study.metric) for row in own if row["status"] == "finished"]
            if len(scores) > 1 and speed:
                mean, seconds = contrast([scores], [1.0]), int(own[0]["epochs"]) * int(own[0]["train_images"]) / speed
                panel.errorbar(seconds, mean.value, yerr=mean.interval(), color=colour, marker="D", capsize=3)


def _label(panels: Any, study: Study) -> None:
    metric = {"top1": "top-1 in %", "miou": "mIoU in %", "box_ap": "box AP in %"}.get(study.metric, study.metric)
    titles = ("Accuracy against training speed", "Accuracy against time", "Speed against resolution")
    axes = (
        ("training images/s, alone", metric),
        ("seconds of training, alone", metric),
        ("image side in px", "images/s"),
    )
    for panel, title, (x, y) in zip(panels, titles, axes, strict=True):
        panel.set(title=title, xlabel=x, ylabel=y)
        panel.grid(alpha=0.3)
    panels[2].set(xscale="log", yscale="log")
    for panel in panels[1:]:
        if panel.get_legend_handles_labels()[0]:
            panel.legend(fontsize=7)
