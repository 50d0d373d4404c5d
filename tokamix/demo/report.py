"""The demo's report: what was measured, and one HTML page that needs nothing but itself."""

import base64
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import mean
from string import Template

import torch
from PIL import Image
from torch import Tensor

TEMPLATE = Path(__file__).with_name("report.html")
HEAT = ((8, 12, 28), (44, 30, 100), (140, 40, 120), (226, 88, 80), (252, 170, 74), (255, 246, 190))  # from 0 to 1
GAPS = (50, 80, 90, 95, 98, 99, 99.5)  # accuracies and losses that get a line in the pictures
BRIGHTEST = 0.02  # share of a field's pixels that get the brightest colour
LOSSES = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2)


@dataclass(frozen=True)
class Course:
    """One training: the mean loss on the training images and the accuracy on the others, in %, after each epoch."""

    loss: tuple[float, ...]
    accuracy: tuple[float, ...]


@dataclass(frozen=True)
class Result:
    """What was measured of one mixer."""

    key: str  # also its colour's name in the page
    title: str
    how: str
    link: str
    courses: tuple[Course, ...]  # one for each seed
    parameters: int
    macs: int
    exps: int
    latency_ms: float
    seconds: float  # for one training
    before: Tensor  # (H, W) receptive fields of one token, untrained and trained
    after: Tensor

    @property
    def accuracies(self) -> list[float]:
        """After the last epoch, of each seed."""
        return [course.accuracy[-1] for course in self.courses]


@dataclass(frozen=True)
class Report:
    """Everything the page says."""

    results: Sequence[Result]
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
        "legend": "".join(f'<li class="{escape(r.key)}"><i></i>{escape(r.title)}</li>' for r in report.results),
        "accuracy_curves": _accuracy_curves(report),
        "loss_curves": _loss_curves(report),
        "digit": _tile(_png(report.image, ((18, 20, 24), (246, 244, 238))), report),
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


def amount(number: float) -> str:
    """A count in three digits: 987, 12.3 k, 1.23 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:#.3g}".rstrip(".") + f" {unit}"
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
        amount(result.macs),
        amount(result.exps),
        f"{result.latency_ms:.1f} ms",
        f"{result.seconds:.0f} s",
    ]
    name = f'<th scope="row"><i></i><a href="{escape(result.link)}">{escape(result.title)}</a>'
    name += f"<small>{escape(result.how)}</small></th>"
    return f'<tr class="{escape(result.key)}">{name}{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


# The curves. Pictures are 400 units wide, so that letters keep a readable size on a phone.
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 400, 270, 38, 12, 390, 238


def _accuracy_curves(report: Report) -> str:
    """Accuracy by epoch; the axis is spaced by the error's logarithm, as 98 and 99 are further apart than 80 and 81."""
    least = 100 * 0.5 / report.test_images  # no error at all counts as half an image

    def height(accuracy: float) -> float:
        return -math.log(max(100 - accuracy, least))

    best = max(a for result in report.results for course in result.courses for a in course.accuracy)
    top = min((gap for gap in GAPS if gap >= best), default=100)
    ticks = [(height(gap), f"{gap:g} %") for gap in GAPS if gap <= top]
    return _chart(report, lambda course: [height(a) for a in course.accuracy], ticks, (height(50), height(top)))


def _loss_curves(report: Report) -> str:
    least = LOSSES[0]
    values = [max(value, least) for r in report.results for c in r.courses for value in c.loss]
    low = max(loss for loss in LOSSES if loss <= min(values))
    ticks = [(math.log(loss), f"{loss:g}") for loss in LOSSES if low <= loss <= max(values)]
    limits = math.log(low), math.log(max(values))
    return _chart(report, lambda course: [math.log(max(value, least)) for value in course.loss], ticks, limits)


def _chart(
    report: Report,
    heights: Callable[[Course], list[float]],
    ticks: Sequence[tuple[float, str]],
    limits: tuple[float, float],
) -> str:
    """An SVG: a line for each mixer's mean over the seeds, a band for their range."""
    low, high = limits

    def x(epoch: float) -> float:
        return LEFT + (RIGHT - LEFT) * (epoch - 1) / max(report.epochs - 1, 1)

    def y(value: float) -> float:
        share = (min(max(value, low), high) - low) / ((high - low) or 1)
        return BOTTOM - (BOTTOM - TOP) * share

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for value, text in ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y(value):.1f}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{text}</text>')
    step = next((n for n in (1, 2, 5, 10, 20, 50) if report.epochs <= 6 * n), 100)
    for epoch in (1, *range(max(step, 2), report.epochs + 1, step)):
        parts.append(f'<text x="{x(epoch):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{epoch}</text>')
    parts.append(f'<text x="{(LEFT + RIGHT) / 2}" y="{HEIGHT - 1}" text-anchor="middle">epoch</text>')
    for result in report.results:
        by_epoch = list(zip(*(heights(course) for course in result.courses), strict=True))
        points = [(x(i), y(mean(values))) for i, values in enumerate(by_epoch, 1)]
        band = [(x(i), y(max(values))) for i, values in enumerate(by_epoch, 1)]
        band += [(x(i), y(min(values))) for i, values in reversed(list(enumerate(by_epoch, 1)))]
        parts.append(f'<g class="{escape(result.key)}"><title>{escape(result.title)}</title>')
        if len(result.courses) > 1:
            parts.append(f'<path class="band" d="M{_path(band)}Z"/>')
        end_x, end_y = points[-1]
        parts.append(f'<path class="line" d="M{_path(points)}"/>')
        parts.append(f'<circle cx="{end_x:.1f}" cy="{end_y:.1f}" r="3"/></g>')
    return "".join(parts) + "</svg>"


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _fields(result: Result, report: Report) -> str:
    """A mixer's two fields, and how much of each lies outside the token's own patch."""
    tiles = ""
    for when, values in (("untrained", result.before), ("trained", result.after)):
        # the token's own patch is a few pixels that would leave all others in the dark
        shown = (values / values.quantile(1 - BRIGHTEST).clamp_min(1e-30)).sqrt()
        share = f"<b>{100 * outside(values, report.patch):.0f}\u00a0%</b>"
        tiles += f"<figure>{_tile(_png(shown, HEAT), report)}<figcaption>{when}<br>{share}</figcaption></figure>"
    return f'<article class="{escape(result.key)}"><h3><i></i>{escape(result.title)}</h3><div>{tiles}</div></article>'


def outside(values: Tensor, patch: tuple[int, int, int]) -> float:
    """The share of a field (H, W) that lies outside the token's own patch."""
    row, column, side = patch
    inside = values[row : row + side, column : column + side].sum()
    return float(1 - inside / values.sum().clamp_min(1e-30))


def _png(values: Tensor, ramp: Sequence[tuple[int, int, int]]) -> str:
    """An image (H, W) of values in 0..1, coloured along a ramp, as a data address."""
    colours = torch.tensor(ramp, dtype=torch.float32)
    position = values.detach().float().cpu().clamp(0, 1) * (len(ramp) - 1)
    below = position.floor().clamp_max(len(ramp) - 2).long()
    rgb = torch.lerp(colours[below], colours[below + 1], (position - below)[..., None])
    file = io.BytesIO()
    Image.fromarray(rgb.round().to(torch.uint8).numpy()).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def _tile(png: str, report: Report) -> str:
    """A picture with the token's patch framed."""
    height, width = report.image.shape
    row, column, side = report.patch
    place = {"left": column / width, "top": row / height, "width": side / width, "height": side / height}
    style = ";".join(f"{name}:{100 * share:.3f}%" for name, share in place.items())
    return f'<span class="tile"><img src="{png}" alt=""><b style="{style}"></b></span>'
