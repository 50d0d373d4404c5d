"""Tables and curves of results/conversion.csv for docs/guides/convert.md: `python -m benchmarks.convert table`."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path

from tokamix.study.rows import Row
from tokamix.study.statistics import contrast

DATA = {"cifar100": "CIFAR-100", "imagenette": "Imagenette"}
MIXERS = {"sima": "SimA", "super_token": "super tokens", "weight_mixing": "weight mixing"}
ARMS = {
    "full": "full conversion",
    "calibrated": "calibrated, fine-tuned",
    "naive": "swapped, fine-tuned",
    "scratch": "from scratch",
}
COLORS = {"full": "#d1495b", "calibrated": "#edae49", "naive": "#00798c", "scratch": "#8d6a9f"}
PHASES = {"swapped": "swapped", "calibrated": "calibrated", "transferred": "transferred", "top1": "converted"}
SHOWN = 20  # points below the original that the curves show
START, END = "<!-- conversion -->\n", "<!-- end -->"


def write_report(rows: Sequence[Row], speeds: Sequence[Row], page: Path, picture: Path) -> str:
    """Draw the curves, write the tables between the marks of the page, and return them."""
    if not rows:
        raise ValueError("there are no rows of conversions yet; `python -m benchmarks.convert run` adds them")
    draw_curves(rows, picture)
    text = "\n".join([*summary(rows), "", *accuracy_table(rows), "", *phase_table(rows), "", *speed_table(speeds)])
    text += f"\n\n![top-1 against training steps, by arm](../{picture.name})\n"
    before, start, rest = page.read_text().partition(START)
    _, end, after = rest.partition(END)
    if not (start and end):
        raise ValueError(f"{page} has no {START.strip()} and {END}")
    page.write_text(f"{before}{start}\n{text}\n{end}{after}")
    return text


def select(rows: Sequence[Row], data: str, to: str, arm: str) -> list[Row]:
    """The runs of one arm."""
    return [row for row in rows if (row["data"], row["to"], row["arm"]) == (data, to, arm)]


def _original(rows: Sequence[Row], data: str) -> float | None:
    """Top-1 of the original: each conversion has measured it."""
    found = [float(row["original"]) for row in rows if row["data"] == data and row["original"]]
    return statistics.mean(found) if found else None


def _scores(found: Sequence[Row]) -> list[float]:
    return [float(row["top1"]) for row in found]


def _pairs(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Data and mixers that have conversions."""
    return [(data, to) for data in DATA for to in MIXERS if any(select(rows, data, to, arm) for arm in ARMS)]


def summary(rows: Sequence[Row]) -> list[str]:
    """The bar: full conversion to SimA within 1.0 point of its original, in a quarter of the steps."""
    lines = []
    for data, name in DATA.items():
        found, original = select(rows, data, "sima", "full"), _original(rows, data)
        if found and original:
            share = statistics.mean(float(row["steps"]) / float(row["original_steps"]) for row in found)
            gaps = [score - original for score in _scores(found)]
            mean, low, high = statistics.mean(gaps), min(gaps), max(gaps)
            verdict = "within" if mean >= -1 else "not within"
            lines.append(
                f"- {name}, SimA: full conversion in {100 * share:.0f} % of the original's steps changes top-1 by"
                f" {mean:+.2f} points ({len(gaps)} seeds, {low:+.2f} to {high:+.2f}): {verdict} the target of 1 point."
            )
    return lines


def _table(rows: Sequence[Row], heads: Sequence[str], cells: Callable[[str, str], list[str]]) -> list[str]:
    """A table with a line for each data set and mixer."""
    lines = [f"| data | mixer | {' | '.join(heads)} |", f"|---|---|{'---:|' * len(heads)}"]
    return lines + [f"| {DATA[data]} | {MIXERS[to]} | {' | '.join(cells(data, to))} |" for data, to in _pairs(rows)]


def accuracy_table(rows: Sequence[Row]) -> list[str]:
    """Top-1 of the original; mean top-1 of each arm with its 95 % interval, its difference, and the number of seeds."""

    def cells(data: str, to: str) -> list[str]:
        original = _original(rows, data)
        texts = [f"{original:.2f}" if original else ""]
        for scores in (_scores(select(rows, data, to, arm)) for arm in ARMS):
            mean = statistics.mean(scores) if scores else 0.0
            gap = f" ({mean - original:+.2f})" if original else ""
            spread = f" ± {contrast([scores], [1]).interval():.2f}" if len(scores) > 1 else ""
            texts.append(f"{mean:.2f}{spread}{gap}, n = {len(scores)}" if scores else "")
        return texts

    return _table(rows, ["original", *ARMS.values()], cells)


def phase_table(rows: Sequence[Row]) -> list[str]:
    """Mean top-1 of full conversions after each phase."""

    def cells(data: str, to: str) -> list[str]:
        found = select(rows, data, to, "full")
        scores = [[float(row[phase]) for row in found if row[phase]] for phase in PHASES]
        return [f"{statistics.mean(values):.2f}" if values else "" for values in scores]

    return _table(rows, list(PHASES.values()), cells)


def speed_table(speeds: Sequence[Row]) -> list[str]:
    """Milliseconds per image and memory at each size, and the break-even size."""
    if not speeds:
        return []
    sizes = sorted({int(row["size"]) for row in speeds})
    lines = [f"| data | network | {' | '.join(f'{size} px' for size in sizes)} | faster from |"]
    lines.append(f"|---|---|{'---:|' * (len(sizes) + 1)}")
    for data, to in dict.fromkeys((row["data"], row["to"]) for row in speeds):
        own = {int(row["size"]): row for row in speeds if (row["data"], row["to"]) == (data, to)}
        cells = [_speed(own[size]) if size in own else "" for size in sizes]
        even = next(iter(own.values()))["break_even"]
        last = "" if to == "softmax" else f"{even} px" if even else "not up to the largest"
        lines.append(f"| {DATA[data]} | {MIXERS.get(to, 'original')} | {' | '.join(cells)} | {last} |")
    return [*lines, "", f"Milliseconds per image, peak memory; {speeds[0]['gpu']}, torch {speeds[0]['torch']}."]


def _speed(row: Row) -> str:
    if not row["milliseconds"]:
        return row["problem"]
    return f"{float(row['milliseconds']):.2f} ms, {float(row['memory_gb']):.1f} GB"


def mean_curve(found: Sequence[Row]) -> list[tuple[float, float]]:
    """Points (steps as a share of the original's, in percent; mean top-1) of the runs of one arm."""
    points: dict[float, list[float]] = {}
    for row in found:
        curve = json.loads(row["curve"])
        epochs = float(row["epochs"])
        unit = 100 * float(row["steps"]) / float(row["original_steps"]) / epochs  # of one epoch
        transfer = epochs - curve[-1][0]  # epochs of attention transfer precede the fine-tuning
        starts = [(0.0, row["calibrated"] or row["swapped"]), (transfer, row["transferred"])]
        curve = [[epoch, float(value)] for epoch, value in starts if value] + [[e + transfer, y] for e, y in curve]
        for epoch, value in curve:
            points.setdefault(round(epoch * unit, 3), []).append(value)
    return [(x, statistics.mean(values)) for x, values in sorted(points.items())]


def draw_curves(rows: Sequence[Row], picture: Path) -> None:
    """Top-1 against steps: a panel for each data set and mixer, a line for each arm, the original dashed.

    The start of a line is the accuracy before any training, and often below the panel.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    pairs = _pairs(rows)
    names = [[data for data in DATA if data in dict(pairs)], [to for to in MIXERS if to in {to for _, to in pairs}]]
    height, width = len(names[0]), len(names[1])
    size = (3.4 * width + 1, 2.7 * height + 0.8)
    figure, axes = plt.subplots(height, width, figsize=size, layout="constrained", squeeze=False)
    for line, data in zip(axes, names[0], strict=True):
        level = _original(rows, data)
        for axis, to in zip(line, names[1], strict=True):
            if level:
                axis.axhline(level, color="#444444", ls="--", lw=1.2, label="original")
                axis.set_ylim(level - SHOWN, level + 2)
            for arm, label in ARMS.items():
                if found := select(rows, data, to, arm):
                    axis.plot(*zip(*mean_curve(found), strict=True), "o-", color=COLORS[arm], ms=3, lw=1.4, label=label)
            axis.set_title(f"{DATA[data]}, {MIXERS[to]}", fontsize=10)
            axis.set_xlim(0)
            axis.grid(alpha=0.25, lw=0.5)
            axis.spines[["top", "right"]].set_visible(False)
        line[0].set_ylabel("top-1, %")
    for axis in axes[-1]:
        axis.set_xlabel("training steps, % of the original's")
    handles = {text: line for axis in axes.flat for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(picture, dpi=130)
    plt.close(figure)
