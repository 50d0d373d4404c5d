"""The demo's report: what was measured, and one HTML page that needs nothing but itself."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import mean
from string import Template
from typing import NamedTuple

from torch import Tensor

from tokamix.demo.charts import Axis, Line, chart, png

TEMPLATE = Path(__file__).with_name("report.html")
HEAT = ((8, 12, 28), (44, 30, 100), (140, 40, 120), (226, 88, 80), (252, 170, 74), (255, 246, 190))  # from 0 to 1
GAPS = (0, 50, 80, 90, 95, 98, 99, 99.5)  # accuracies and losses that get a line in the pictures
BRIGHTEST = 0.02  # share of a field's pixels that get the brightest colour
LOSSES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


@dataclass(frozen=True)
class Course:
    """One training: the mean loss on the training images and the accuracy on the others, in %, after each epoch."""

    loss: tuple[float, ...]
    accuracy: tuple[float, ...]


class Growth(NamedTuple):
    """The cost of one image of so many tokens."""

    tokens: int
    macs: int
    exps: int


@dataclass(frozen=True)
class Result:
    """What was measured of one mixer."""

    key: str  # also its colour's name in the page
    title: str
    how: str
    link: str
    courses: tuple[Course, ...]  # one for each seed
    parameters: int
    growth: tuple[Growth, ...]  # the first is at the size of training
    latency_ms: float
    seconds: float  # for one training
    before: Tensor  # (H, W) receptive fields of one token, untrained and trained
    after: Tensor

    @property
    def accuracies(self) -> list[float]:
        """After the last epoch, of each seed."""
        return [course.accuracy[-1] for course in self.courses]


class Cost(NamedTuple):
    """What a mixer of the library costs in the demo's body, untrained."""

    mixer: str
    parameters: int
    macs: int
    exps: int
    latency_ms: float

    def cells(self) -> tuple[str, str, str, str]:
        """The numbers as they are shown."""
        return amount(self.parameters), amount(self.macs), amount(self.exps), f"{self.latency_ms:.1f} ms"


@dataclass(frozen=True)
class Report:
    """Everything the page says."""

    results: Sequence[Result]
    costs: Sequence[Cost]  # of every registered mixer
    image: Tensor  # (H, W) in 0..1
    label: str
    patch: tuple[int, int, int]  # row and column of the token's first pixel, and the patch's side
    train_images: int
    test_images: int
    epochs: int
    seeds: Sequence[int]
    body: str
    recipe: str
    machine: str
    date: str
    docs: Sequence[tuple[str, str]] = field(default=())  # title and address

    @property
    def noise(self) -> float:
        """Two standard errors of an accuracy, in points: what chance alone does with so few test images."""
        rate = mean(a for r in self.results for a in r.accuracies) / 100
        rate = min(rate, 1 - 0.5 / self.test_images)
        return 200 * math.sqrt(rate * (1 - rate) / self.test_images)


def render(report: Report) -> str:
    """The page: no script, no request, readable on paper, on a phone and in the dark."""
    seeds = len(report.seeds)
    spread = "the mean over the seeds, and their range" if seeds > 1 else "of one training each"
    facts = {
        "learnt from": f"{report.train_images:,} scans",
        "tested on": f"{report.test_images:,} others",
        "training": f"{report.epochs} epochs" + (f", {seeds} seeds" if seeds > 1 else f", seed {report.seeds[0]}"),
        "network": report.body,
    }
    values = {
        "count": _word(len(report.results)),
        "facts": "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items()),
        "rows": "".join(_row(result) for result in report.results),
        "costs": "".join(_cost_row(cost) for cost in report.costs),
        "legend": "".join(f'<li class="{escape(r.key)}"><i></i>{escape(r.title)}</li>' for r in report.results),
        "accuracy_curves": _accuracy_curves(report),
        "loss_curves": _loss_curves(report),
        "mac_curves": _growth_curves(report, "macs"),
        "exp_curves": _growth_curves(report, "exps"),
        "digit": _tile(png(report.image, ((18, 20, 24), (246, 244, 238))), report),
        "fields": "".join(_fields(result, report) for result in report.results),
        "brightest": f"{100 * BRIGHTEST:g}",
        "heat": ", ".join(f"rgb{colour}" for colour in HEAT),
        "noise": f"{report.noise:.1f}",
        "spread": spread,
        "docs": "".join(f'<li><a href="{escape(to)}">{escape(title)}</a></li>' for title, to in report.docs),
    }
    texts = {name: escape(str(getattr(report, name))) for name in ("label", "body", "recipe", "machine", "date")}
    numbers = {"train_images": f"{report.train_images:,}", "test_images": f"{report.test_images:,}"}
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(values | texts | numbers)


def _word(number: int) -> str:
    words = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    return words[number] if number < len(words) else str(number)


def amount(number: float, digits: int = 3) -> str:
    """A count in a few digits: 987, 12.3 k, 1.23 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            number /= size
            return (f"{number:#.{digits}g}".rstrip(".") if digits > 1 else f"{number:.0f}") + f" {unit}"
    return f"{number:.0f}"


def accuracy_text(result: Result) -> str:
    """The accuracy, or the mean and range over the seeds."""
    values = result.accuracies
    return f"{mean(values):.1f}\u00a0%" + (f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else "")


def _row(result: Result) -> str:
    value, _, spread = accuracy_text(result).partition(" (")
    spread = f"<small>{spread[:-1]}</small>" if spread else ""
    cells = [
        value + spread,
        amount(result.parameters),
        amount(result.growth[0].macs),
        amount(result.growth[0].exps),
        f"{result.latency_ms:.1f} ms",
        f"{result.seconds:.0f} s",
    ]
    name = f'<th scope="row"><i></i><a href="{escape(result.link)}">{escape(result.title)}</a>'
    name += f"<small>{escape(result.how)}</small></th>"
    return f'<tr class="{escape(result.key)}">{name}{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _cost_row(cost: Cost) -> str:
    cells = "".join(f"<td>{cell}</td>" for cell in cost.cells())
    return f'<tr><th scope="row"><code>{escape(cost.mixer)}</code></th>{cells}</tr>'


def _accuracy_curves(report: Report) -> str:
    """Accuracy by epoch; the axis is spaced by the error's logarithm, as 98 and 99 are further apart than 80 and 81."""
    least = 100 * 0.5 / report.test_images  # no error at all counts as half an image

    def height(accuracy: float) -> float:
        return -math.log(max(100 - accuracy, least))

    lines = [_line(r, [[height(a) for a in course.accuracy] for course in r.courses]) for r in report.results]
    best = max(a for result in report.results for course in result.courses for a in course.accuracy)
    top = min((gap for gap in GAPS if gap >= best), default=100)
    ticks = [(height(gap), f"{gap:g} %") for gap in GAPS if gap <= top]
    return chart(lines, range(1, report.epochs + 1), _epochs(report), Axis(height(0), height(top), ticks))


def _loss_curves(report: Report) -> str:
    least = LOSSES[0]
    values = [max(value, least) for r in report.results for c in r.courses for value in c.loss]
    low = max(loss for loss in LOSSES if loss <= min(values))
    ticks = [(math.log(loss), f"{loss:g}") for loss in LOSSES if low <= loss <= max(values)]
    lines = [_line(r, [[math.log(max(loss, least)) for loss in c.loss] for c in r.courses]) for r in report.results]
    up = Axis(math.log(low), math.log(max(values)), ticks)
    return chart(lines, range(1, report.epochs + 1), _epochs(report), up)


def _growth_curves(report: Report, cost: str) -> str:
    """What one token costs, by the number of tokens; both axes logarithmic."""
    tokens = [growth.tokens for growth in report.results[0].growth]
    places = [math.log(n) for n in tokens]
    rows = [[max(getattr(growth, cost), 1) / growth.tokens for growth in result.growth] for result in report.results]
    low, high = 0.7 * min(map(min, rows)), 1.4 * max(map(max, rows))
    lines = [_line(r, [[math.log(n) for n in row]]) for r, row in zip(report.results, rows, strict=True)]
    across = Axis(places[0], places[-1], [(p, f"{n:,}") for p, n in zip(places, tokens, strict=True)], "tokens")
    ticks = [(math.log(n), amount(n, 1)) for n in (10.0**power for power in range(12)) if low <= n <= high]
    return chart(lines, places, across, Axis(math.log(low), math.log(high), ticks))


def _line(result: Result, rows: Sequence[Sequence[float]]) -> Line:
    return Line(result.key, result.title, rows)


def _epochs(report: Report) -> Axis:
    step = next((n for n in (1, 2, 5, 10, 20, 50) if report.epochs <= 6 * n), 100)
    ticks = (1, *range(max(step, 2), report.epochs + 1, step))
    return Axis(1, report.epochs, [(n, str(n)) for n in ticks], "epoch")


def _fields(result: Result, report: Report) -> str:
    """A mixer's two fields, and how much of each lies outside the token's own patch."""
    tiles = ""
    for when, values in (("untrained", result.before), ("trained", result.after)):
        # the token's own patch is a few pixels that would leave all others in the dark
        shown = (values / values.quantile(1 - BRIGHTEST).clamp_min(1e-30)).sqrt()
        share = f"<b>{100 * outside(values, report.patch):.0f}\u00a0%</b>"
        tiles += f"<figure>{_tile(png(shown, HEAT), report)}<figcaption>{when}<br>{share}</figcaption></figure>"
    return f'<article class="{escape(result.key)}"><h3><i></i>{escape(result.title)}</h3><div>{tiles}</div></article>'


def outside(values: Tensor, patch: tuple[int, int, int]) -> float:
    """The share of a field (H, W) that lies outside the token's own patch."""
    row, column, side = patch
    inside = values[row : row + side, column : column + side].sum()
    return float(1 - inside / values.sum().clamp_min(1e-30))


def _tile(address: str, report: Report) -> str:
    """A picture with the token's patch framed."""
    height, width = report.image.shape
    row, column, side = report.patch
    place = {"left": column / width, "top": row / height, "width": side / width, "height": side / height}
    style = ";".join(f"{name}:{100 * share:.3f}%" for name, share in place.items())
    return f'<span class="tile"><img src="{address}" alt=""><b style="{style}"></b></span>'
