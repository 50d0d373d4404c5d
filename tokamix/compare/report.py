"""The report of a comparison: all measurements, and one self-contained HTML page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import mean
from string import Template
from typing import NamedTuple, Self

from torch import Tensor

from tokamix.compare.charts import Axis, Line, draw_chart, heat_map, png
from tokamix.explain.page import PAGE_CSS

TEMPLATE = Path(__file__).with_name("report.html")
HEAT = ((8, 12, 28), (44, 30, 100), (140, 40, 120), (226, 88, 80), (252, 170, 74), (255, 246, 190))  # from 0 to 1
ACCURACY_TICKS = (0, 50, 80, 90, 95, 98, 99, 99.5)
LOSS_TICKS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10)
BRIGHTEST = 0.02  # fraction of a receptive field's pixels that get the brightest colour
COLOURS = (  # of the mixers in order: on a light and on a dark page
    *(("#6b7280", "#a9b1bf"), ("#2f6fde", "#6ea3ff"), ("#d9482b", "#ff7a5c"), ("#0f8f7f", "#3ecbb7")),
    *(("#7d4bd0", "#b592f5"), ("#b98900", "#e8bb45"), ("#c2377f", "#f58ac0"), ("#4d7c0f", "#a3d45c")),
    *(("#0e7490", "#5cc8e0"), ("#8b5e34", "#d3a574"), ("#be123c", "#fb7b93"), ("#1e3a8a", "#93a9f5")),
)


@dataclass(frozen=True)
class Curves:
    """One training: mean training loss, and accuracy on the validation images in %, after each epoch."""

    loss: tuple[float, ...]
    accuracy: tuple[float, ...]


class CostAtSize(NamedTuple):
    """The forward cost of one image with this number of tokens."""

    tokens: int
    macs: int
    exps: int


@dataclass(frozen=True)
class Result:
    """All measurements of one mixer.

    Attributes:
        title: name on the page.
        description: one line on the page.
        link: address of the paper, or "".
        curves: one for each seed.
        parameters: number of parameters.
        costs: at several image sizes; the first is the size of training.
        latency_ms: forward pass of one image.
        seconds: duration of one training.
        before: receptive field (H, W) of one token before training; None if not computed.
        after: the same after training.
    """

    title: str
    description: str
    link: str
    curves: tuple[Curves, ...]
    parameters: int
    costs: tuple[CostAtSize, ...]
    latency_ms: float
    seconds: float
    before: Tensor | None = None
    after: Tensor | None = None

    @property
    def accuracies(self) -> list[float]:
        """Accuracy after the last epoch, for each seed."""
        return [curves.accuracy[-1] for curves in self.curves]


class Cost(NamedTuple):
    """The cost of a registered mixer in the same body, untrained."""

    mixer: str
    parameters: int
    macs: int
    exps: int
    latency_ms: float

    def cells(self) -> tuple[str, str, str, str]:
        """The numbers as text."""
        return amount(self.parameters), amount(self.macs), amount(self.exps), f"{self.latency_ms:.1f} ms"


class Example(NamedTuple):
    """The image of the receptive fields: RGB (H, W, 3) in 0..1, class, and the token's patch (row, column, side)."""

    image: Tensor
    label: str
    patch: tuple[int, int, int]
    probes: int | None = None  # random directions from which the fields are estimated; None: exact


@dataclass(frozen=True)
class Texts:
    """The sentences of the page that depend on the body and the data, as plain text.

    Attributes:
        title: the heading.
        lead: the first paragraph.
        scaling: a note on the cost curves.
        limits: a list of what the comparison does not show.
    """

    title: str
    lead: str
    scaling: str = ""
    limits: Sequence[str] = ()

    @classmethod
    def for_data(cls, data: str, body: str, recipe: str) -> Self:
        """Texts for a comparison on any data set."""
        return cls(
            title=f"{body} on {data}: token mixers compared",
            lead=(
                "A vision network cuts an image into patches, the tokens, and a token mixer lets them exchange"
                f" information. The same network was trained on {data} once for each mixer; only the mixer changed."
            ),
            limits=(
                "The numbers hold for this data set, body and training length; a different one may rank the mixers"
                " differently.",
                f"All mixers had the same recipe ({recipe}), and none was tuned on its own. If you choose a mixer by"
                " these accuracies, measure it again on images that had no part in the choice.",
                "The networks of the papers are built around their mixers; `tokamix models` lists them.",
            ),
        )


@dataclass(frozen=True)
class Report:
    """Everything on the page."""

    texts: Texts
    results: Sequence[Result]
    costs: Sequence[Cost]  # of every registered mixer
    example: Example | None  # None: no receptive fields
    train_images: int
    test_images: int
    epochs: int
    seeds: Sequence[int]
    body: str
    recipe: str
    device: str  # "CPU" or "GPU"
    machine: str
    date: str
    docs: Sequence[tuple[str, str]] = field(default=())  # title and address

    @property
    def noise(self) -> float:
        """Two standard errors of an accuracy, in points: the effect of chance with this number of test images."""
        rate = mean(a for r in self.results for a in r.accuracies) / 100
        rate = min(max(rate, 0.5 / self.test_images), 1 - 0.5 / self.test_images)
        return 200 * math.sqrt(rate * (1 - rate) / self.test_images)


def render(report: Report) -> str:
    """Create the page: no script, no request; readable on paper, on a phone and in a dark theme."""
    seeds = len(report.seeds)
    classes = [f"mixer{i}" for i in range(len(report.results))]
    facts = {
        "training images": f"{report.train_images:,}",
        "validation images": f"{report.test_images:,}",
        "training": plural(report.epochs, "epoch") + (f", {seeds} seeds" if seeds > 1 else f", seed {report.seeds[0]}"),
        "network": report.body,
    }
    legend = "".join(
        f'<li class="{css_class}"><i></i>{escape(result.title)}</li>'
        for css_class, result in zip(classes, report.results, strict=True)
    )
    values = {
        "base": PAGE_CSS.read_text(encoding="utf-8"),
        "styles": _styles(classes),
        "title": escape(report.texts.title),
        "lead": escape(report.texts.lead),
        "facts": "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items()),
        "rows": "".join(map(_row, classes, report.results)),
        "cost_rows": "".join(_cost_row(cost) for cost in report.costs),
        "legend": legend,
        "accuracy_curves": _accuracy_chart(report),
        "loss_curves": _loss_chart(report),
        "mac_curves": _cost_chart(report, "macs"),
        "exp_curves": _cost_chart(report, "exps"),
        "receptive_fields": _receptive_fields(classes, report),
        "scaling": escape(report.texts.scaling),
        "limits": "".join(f"<li>{escape(limit)}</li>" for limit in report.texts.limits),
        "noise": f"{report.noise:.1f}",
        "seeds": "the mean over the seeds, and their range" if seeds > 1 else "one training for each mixer",
        "cores": "one core" if report.device == "CPU" else "this GPU",
        "docs": "".join(f'<li><a href="{escape(to)}">{escape(title)}</a></li>' for title, to in report.docs),
        "test_images": f"{report.test_images:,}",
    }
    texts = {name: escape(str(getattr(report, name))) for name in ("recipe", "device", "machine", "date")}
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(values | texts)


def amount(number: float, digits: int = 3) -> str:
    """A count in a few digits: 987, 12.3 k, 1.23 M."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            number /= size
            return (f"{number:#.{digits}g}".rstrip(".") if digits > 1 else f"{number:.0f}") + f" {unit}"
    return f"{number:.0f}"


def plural(number: int, noun: str) -> str:
    """A number with its noun: 1 epoch, 2 epochs."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def accuracy_text(result: Result) -> str:
    """The accuracy, or the mean and range over the seeds."""
    values = result.accuracies
    return f"{mean(values):.1f}\u00a0%" + (f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else "")


def _styles(classes: Sequence[str]) -> str:
    """CSS: a colour for each mixer, and dimmed lines of the others while its name is pointed at."""
    colours = [COLOURS[i % len(COLOURS)] for i in range(len(classes))]
    light = " ".join(f".{name} {{ --c: {light} }}" for name, (light, _) in zip(classes, colours, strict=True))
    dark = " ".join(f".{name} {{ --c: {dark} }}" for name, (_, dark) in zip(classes, colours, strict=True))
    hover = ",\n".join(f"main:has(.{name}:is(tr, li):hover) svg g:not(.{name})" for name in classes)
    return f"{light}\n@media (prefers-color-scheme: dark) {{ {dark} }}\n{hover} {{ opacity: .12 }}"


def _row(css_class: str, result: Result) -> str:
    value, _, spread = accuracy_text(result).partition(" (")
    spread = f"<small>{spread[:-1]}</small>" if spread else ""
    cells = [
        value + spread,
        amount(result.parameters),
        amount(result.costs[0].macs),
        amount(result.costs[0].exps),
        f"{result.latency_ms:.1f} ms",
        f"{result.seconds:.0f} s",
    ]
    title = escape(result.title)
    name = f'<a href="{escape(result.link)}">{title}</a>' if result.link else title
    head = f'<th scope="row"><i></i>{name}<small>{escape(result.description)}</small></th>'
    return f'<tr class="{css_class}">{head}{"".join(f"<td>{cell}</td>" for cell in cells)}</tr>'


def _cost_row(cost: Cost) -> str:
    cells = "".join(f"<td>{cell}</td>" for cell in cost.cells())
    return f'<tr><th scope="row"><code>{escape(cost.mixer)}</code></th>{cells}</tr>'


def _lines(report: Report, rows: Sequence[Sequence[Sequence[float]]]) -> list[Line]:
    return [Line(f"mixer{i}", result.title, rows[i]) for i, result in enumerate(report.results)]


def _accuracy_chart(report: Report) -> str:
    """Accuracy by epoch, on an axis of the error's logarithm: 98 and 99 % are further apart than 80 and 81 %."""
    least = 100 * 0.5 / report.test_images  # no error at all counts as half an image

    def height(accuracy: float) -> float:
        return -math.log(max(100 - accuracy, least))

    rows = [[[height(a) for a in curves.accuracy] for curves in r.curves] for r in report.results]
    best = max(a for result in report.results for curves in result.curves for a in curves.accuracy)
    top = min((tick for tick in ACCURACY_TICKS if tick >= best), default=100)
    ticks = [(height(tick), f"{tick:g} %") for tick in ACCURACY_TICKS if tick <= top]
    y_axis = Axis(height(0), height(top), ticks)
    return draw_chart(_lines(report, rows), range(1, report.epochs + 1), _epoch_axis(report), y_axis)


def _loss_chart(report: Report) -> str:
    least = LOSS_TICKS[0]
    values = [max(value, least) for r in report.results for c in r.curves for value in c.loss]
    low = max(tick for tick in LOSS_TICKS if tick <= min(values))
    ticks = [(math.log(tick), f"{tick:g}") for tick in LOSS_TICKS if low <= tick <= max(values)]
    rows = [[[math.log(max(loss, least)) for loss in c.loss] for c in r.curves] for r in report.results]
    y_axis = Axis(math.log(low), math.log(max(values)), ticks)
    return draw_chart(_lines(report, rows), range(1, report.epochs + 1), _epoch_axis(report), y_axis)


def _cost_chart(report: Report, cost: str) -> str:
    """Cost per token by the number of tokens; both axes logarithmic."""
    tokens = [at.tokens for at in report.results[0].costs]
    xs = [math.log(n) for n in tokens]
    rows = [[max(getattr(at, cost), 1) / at.tokens for at in result.costs] for result in report.results]
    low, high = 0.7 * min(map(min, rows)), 1.4 * max(map(max, rows))
    x_axis = Axis(xs[0], xs[-1], [(x, f"{n:,}") for x, n in zip(xs, tokens, strict=True)], "tokens")
    lines = _lines(report, [[[math.log(n) for n in row]] for row in rows])
    return draw_chart(lines, xs, x_axis, Axis(math.log(low), math.log(high), log_ticks(low, high)))


def log_ticks(low: float, high: float) -> list[tuple[float, str]]:
    """Labels of a logarithmic axis: the powers of ten, or steps between them where these are fewer than two."""
    numbers: list[float] = []
    for steps in ((1,), (1, 2, 5), range(1, 10)):
        if len(numbers) < 2:
            numbers = [n for power in range(12) for step in steps if low <= (n := step * 10.0**power) <= high]
    return [(math.log(n), amount(n, 1)) for n in numbers]


def _epoch_axis(report: Report) -> Axis:
    step = next((n for n in (1, 2, 5, 10, 20, 50) if report.epochs <= 6 * n), 100)
    ticks = (1, *range(max(step, 2), report.epochs + 1, step))
    return Axis(1, report.epochs, [(n, str(n)) for n in ticks], "epoch")


def _receptive_fields(classes: Sequence[str], report: Report) -> str:
    """The section about receptive fields, or nothing if they were not computed."""
    if report.example is None:
        return ""
    image, label, patch, probes = report.example
    articles = ""
    for css_class, result in zip(classes, report.results, strict=True):
        tiles = ""
        for when, values in (("untrained", result.before), ("trained", result.after)):
            assert values is not None
            # the few pixels of the token's own patch would otherwise leave all others dark
            scaled = (values / values.quantile(1 - BRIGHTEST).clamp_min(1e-30)).sqrt()
            percent = f"<b>{100 * outside(values, patch):.0f}\u00a0%</b>"
            tile = _tile(heat_map(scaled, HEAT), report.example)
            tiles += f"<figure>{tile}<figcaption>{when}<br>{percent}</figcaption></figure>"
        articles += f'<article class="{css_class}"><h3><i></i>{escape(result.title)}</h3><div>{tiles}</div></article>'
    return Template(_FIELDS).substitute(
        tile=_tile(png(image), report.example),
        label=escape(label),
        brightest=f"{100 * BRIGHTEST:g}",
        heat=", ".join(f"rgb{colour}" for colour in HEAT),
        articles=articles,
        estimate=f" The norms are estimated from {probes} random directions." if probes else "",
    )


_FIELDS = """<section>
  <h2>Receptive field of one token</h2>
  <p>The frame marks one token. The maps show how strongly its output depends on each pixel: the brighter, the stronger. Before training they show the design of the mixer, after training what it learnt. The percentage is the part outside the token's own patch.</p>
  <div class="sight">
    <figure>$tile<figcaption>A validation image of class <b>$label</b>, enlarged. The frame marks the token.<span class="ramp" style="background: linear-gradient(90deg, $heat)"></span>Dark: no influence. Bright: the strongest $brightest&nbsp;% of the pixels of each map. Square root scale.</figcaption></figure>
    <div class="fields">$articles</div>
  </div>
  <p class="note">The maps show the norm of the gradient of the token's feature vector with respect to each pixel (the effective receptive field), for this one image and the first seed.$estimate They show the effect of a small change of a pixel, not what the network recognises.</p>
</section>"""  # noqa: E501


def outside(values: Tensor, patch: tuple[int, int, int]) -> float:
    """The fraction of a receptive field (H, W) that lies outside the token's own patch."""
    row, column, side = patch
    inside = values[row : row + side, column : column + side].sum()
    return float(1 - inside / values.sum().clamp_min(1e-30))


def _tile(address: str, example: Example) -> str:
    """An image with a frame around the token's patch."""
    height, width = example.image.shape[:2]
    row, column, side = example.patch
    place = {"left": column / width, "top": row / height, "width": side / width, "height": side / height}
    style = ";".join(f"{name}:{100 * fraction:.3f}%" for name, fraction in place.items())
    return f'<span class="tile"><img src="{address}" alt=""><b style="{style}"></b></span>'
