"""Figures of publication quality from answers and statistics, in light and dark, as PNG, SVG and PDF.

All functions return a matplotlib `Figure`. Colours are safe for colour-blind readers: magma and PuOr for values,
Okabe and Ito's palette for categories.
"""

import re
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tokamix.explain import active_token, super_token
from tokamix.explain.capture import CapturedLayer
from tokamix.explain.explainer import POSITION, Explanation
from tokamix.explain.questions import QUESTIONS, Answer
from tokamix.explain.statistics import BINS, Statistics
from tokamix.files import write_atomically

if TYPE_CHECKING:
    from collections.abc import Iterator

    from matplotlib.figure import Figure

FORMATS = ("png", "svg", "pdf")
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")  # Okabe and Ito
PANEL = 1.55  # inches of a square panel
VEIL = 0.35  # how far the photo below a heat map is mixed with the background
HEAT_ALPHA = 0.72
CIRCLE = 80  # largest area of a circle in square points
MARK = "#56B4E9"


@dataclass(frozen=True)
class Theme:
    """Colours of paper and ink."""

    paper: str
    ink: str
    soft: str
    line: str


THEMES = {
    "light": Theme("#ffffff", "#1d2129", "#5d6573", "#d9d6ce"),
    "dark": Theme("#1c1f26", "#eceae4", "#a0a7b4", "#3a3f49"),
}


@contextmanager
def drawing(theme: str = "light") -> "Iterator[Theme]":
    """Draw in a theme; matplotlib's own settings return afterwards."""
    try:
        import matplotlib
    except ImportError:
        raise ImportError("figures need matplotlib: pip install 'tokamix[explain]'") from None
    if theme not in THEMES:
        raise ValueError(f"there is no theme {theme!r}: choose one of {', '.join(THEMES)}")
    colours = THEMES[theme]
    settings: dict[str, Any] = {
        "font.family": "DejaVu Sans",
        "font.size": 8,
        "axes.titlesize": 8,
        "axes.labelsize": 8,
        "figure.facecolor": colours.paper,
        "savefig.facecolor": colours.paper,
        "axes.facecolor": colours.paper,
        "text.color": colours.ink,
        "axes.titlecolor": colours.ink,
        "axes.labelcolor": colours.soft,
        "axes.edgecolor": colours.line,
        "xtick.color": colours.soft,
        "ytick.color": colours.soft,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": colours.line,
        "grid.linewidth": 0.5,
        "legend.frameon": False,
        "text.parse_math": False,  # a class may be called $1_to_$5
        "svg.hashsalt": "tokamix",  # the same figure gives the same file
        "pdf.fonttype": 42,
    }
    with matplotlib.rc_context(settings):
        yield colours


def save_figure(figure: "Figure", path: Path, formats: Sequence[str] = ("png",)) -> list[Path]:
    """Write a figure to path.png, path.svg or path.pdf; returns the files."""
    written = []
    for form in formats:
        if form not in FORMATS:
            raise ValueError(f"figures are written as {', '.join(FORMATS)}, not as {form!r}")
        target = path.with_name(f"{path.name}.{form}")
        metadata: dict[str, Any] = {"Date": None} if form == "svg" else {"CreationDate": None} if form == "pdf" else {}
        write_atomically(
            target,
            lambda temporary, form=form, metadata=metadata: figure.savefig(  # type: ignore[misc]
                temporary, format=form, dpi=200, bbox_inches="tight", pad_inches=0.06, metadata=metadata
            ),
        )
        written.append(target)
    return written


def draw_maps(
    rows: Sequence[Explanation],
    question: str,
    layers: Sequence[int] | None = None,
    position: tuple[float, float] = POSITION,
    heads: Sequence[int | None] = (None,),
    theme: str = "light",
) -> "Figure":
    """Draw the answers to one question over the photo: a row for each model, a column for each layer, head and panel.

    Args:
        rows: explanations of the same image by one or more models.
        question: a key of `QUESTIONS` that gives maps.
        layers: indices of layers; None: three or four from the first to the last of each model.
        position: of the token, in fractions of height and width.
        heads: indices of heads; None: the mean.
        theme: "light" or "dark".
    """
    uses = QUESTIONS[question].uses
    answers: list[list[Answer]] = []
    for explanation in rows:
        count = 3 if question == "query_key_norms" else 4
        chosen = layers or [layer.layer.index for layer in spread_layers(explanation, question, count)]
        chosen = chosen if "layer" in uses else chosen[-1:]
        answers.append([explanation.ask(question, layer, position, head) for layer in chosen for head in heads])
    with drawing(theme) as colours:
        columns = max(sum(len(answer.panels) for answer in row) for row in answers)
        figure, axes = _grid(len(rows), 1 + columns, rows[0])
        for explanation, name, row, line in zip(rows, short_names(rows), answers, axes, strict=True):
            _photo(line[0], explanation, position if "token" in uses else None)
            line[0].set_title(name)
            cells = [(answer, i) for answer in row for i in range(len(answer.panels))]
            for axis, (answer, i) in zip(line[1:], cells, strict=False):
                draw_map(axis, explanation, answer, i, colours)
                axis.set_title(_caption(explanation, answer, i))
            for axis in line[1 + len(cells) :]:
                axis.set_visible(False)
        return figure


def draw_map(axis: Any, explanation: Explanation, answer: Answer, panel: int, colours: Theme) -> None:
    """Draw one panel of an answer over the photo, or on its own if it is no map of the image."""
    if answer.style == "regions":
        _regions(axis, explanation, answer.values[panel].astype(int))
        return
    scaled, cmap = scale_values(answer, panel)
    options: dict[str, Any] = {"cmap": cmap, "vmin": 0, "vmax": 1, "interpolation": "nearest"}
    if not answer.over_image:
        axis.imshow(scaled, **options)
        return
    axis.imshow(_veiled(explanation, colours), extent=_extent(explanation))
    axis.imshow(scaled, alpha=HEAT_ALPHA, extent=_extent(explanation), **options)
    if answer.token is not None and answer.grid is not None:
        _mark(axis, explanation, answer.token, answer.grid)


def scale_values(answer: Answer, panel: int) -> tuple[np.ndarray, str]:
    """One panel's values from 0 to 1, and the name of matplotlib's colour map for them."""
    values = answer.values[panel]
    low, high, cmap = 0.0, float(values.max()) or 1.0, "magma"
    if not answer.over_image:  # one scale for all panels
        high = float(np.abs(answer.values).max()) or 1.0
        low, cmap = -high, "PuOr"
    elif answer.style == "signed" and values.min() < 0:
        high = float(np.quantile(np.abs(values), 0.99)) or 1.0
        low, cmap = -high, "PuOr"
    elif answer.style == "range":
        low = float(values.min())
    elif answer.style == "root":  # the few pixels of the token's own patch would leave all others dark
        values, high = np.sqrt(np.clip(values / (np.quantile(values, 0.98) or 1), 0, 1)), 1.0
    return np.clip((values - low) / (high - low or 1), 0, 1), cmap


def draw_samples(
    explanation: Explanation,
    layers: Sequence[int] | None = None,
    position: tuple[float, float] = POSITION,
    theme: str = "light",
) -> "Figure":
    """Draw where an active token samples (figure 5 of the paper): circles along its row and its column.

    The opacity of a circle is the number of samples there, relative to the most frequent position.

    Args:
        explanation: of a model with active tokens.
        layers: indices; None: up to six from first to last.
        position: of the token, in fractions of height and width.
        theme: "light" or "dark".
    """
    chosen = [explanation.layer_for("sampled_positions", i) for i in layers] if layers else spread_layers(explanation)
    with drawing(theme) as colours:
        figure, axes = _grid(1, len(chosen), explanation)
        for axis, layer in zip(axes[0], chosen, strict=True):
            axis.imshow(_veiled(explanation, colours), extent=_extent(explanation))
            token = layer.token_at(*position)
            counts = active_token.sampled_positions(layer, token)[0].cpu().numpy()
            down, right = layer.stride
            size = min((0.8 * min(down, right) * PANEL * 72 / max(explanation.rgb.shape[:2])) ** 2, CIRCLE)
            for direction, colour in zip(counts, (PALETTE[5], PALETTE[0]), strict=False):
                rows, columns = np.nonzero(direction > 0)
                alpha = np.sqrt(direction[rows, columns] / max(direction.max(), 1e-9))
                axis.scatter((columns + 0.5) * right, (rows + 0.5) * down, s=size, c=colour, alpha=alpha, lw=0)
            axis.scatter((token[1] + 0.5) * right, (token[0] + 0.5) * down, s=size, c="#000000", lw=1, ec="#ffffff")
            axis.set_title(layer.layer.label)
        labels = (("horizontal samples", PALETTE[5]), ("vertical samples", PALETTE[0]), ("token", "#000000"))
        _legend(figure, labels, marker="o")
        return figure


def draw_offsets(statistics: Statistics, theme: str = "light") -> "Figure":
    """Draw histograms of the middle token's offsets by layer (figures 3, 6 and 7 of the paper).

    The horizontal axis is the possible range. Bars beyond its ends are counted in the outermost bins.
    """
    layers = [layer for layer in statistics.layers if layer.across is not None]
    if not layers:
        raise ValueError("no layer has sampling offsets; choose a model with active tokens")
    columns = min(4, len(layers))
    rows = -(-len(layers) // columns)
    with drawing(theme):
        figure = _figure(columns * 1.9, rows * 1.5 + 0.3)
        for number, layer in enumerate(layers):
            axis = figure.add_subplot(rows, columns, number + 1)
            for counts, colour in ((layer.across, PALETTE[5]), (layer.down, PALETTE[0])):
                assert counts is not None
                places = np.arange(len(counts)) - len(counts) // 2
                axis.stairs(counts / counts.sum(), np.append(places, places[-1] + 1) - 0.5, color=colour, lw=1)
                axis.stairs(
                    counts / counts.sum(), np.append(places, places[-1] + 1) - 0.5, color=colour, alpha=0.2, fill=True
                )
            spread = np.mean(layer.offset_spread)
            axis.set_title(f"{layer.layer.label} (spread {100 * spread:.0f} %)")
            axis.set_yticks([])
            axis.grid(False)
            if number >= len(layers) - columns:
                axis.set_xlabel("offset in tokens")
        _legend(figure, (("horizontal", PALETTE[5]), ("vertical", PALETTE[0])))
        return figure


def draw_super_tokens(
    explanation: Explanation,
    position: tuple[float, float] = POSITION,
    iterations: Sequence[int] = (1, 2, 3),
    theme: str = "light",
) -> "Figure":
    """Draw super tokens of up to three layers: regions by iterations, one association, and its attention.

    Args:
        explanation: of a model with super tokens.
        position: of a token whose super token is shown, in fractions of height and width.
        iterations: numbers of sampling iterations; the model's own is marked.
        theme: "light" or "dark".
    """
    if "super_token_regions" not in explanation.questions():
        raise ValueError(f"{explanation.name} has no super tokens other than its tokens")
    able = spread_layers(explanation, "super_token_regions", 3)
    with drawing(theme) as colours:
        figure, axes = _grid(len(able), 1 + len(iterations) + 2, explanation)
        for line, layer in zip(axes, able, strict=True):
            index = layer.layer.index
            _photo(line[0], explanation, position)
            line[0].set_title(layer.layer.label)
            for axis, n in zip(line[1:], iterations, strict=False):
                _regions(axis, explanation, super_token.super_token_regions(layer, n)[0].cpu().numpy())
                own = " (own)" if n == layer.mixer.n_iter else ""
                axis.set_title(f"{n} iteration{'s' if n > 1 else ''}{own}")
            for axis, key, title in zip(
                line[1 + len(iterations) :],
                ("super_token_association", "super_token_attention"),
                ("association", "attention"),
                strict=True,
            ):
                if not QUESTIONS[key].applies(layer):
                    axis.set_visible(False)
                    continue
                draw_map(axis, explanation, explanation.ask(key, index, position), 0, colours)
                axis.set_title(title)
        return figure


def draw_bank(explanation: Explanation, theme: str = "light") -> "Figure":
    """Draw weight banks of a shallow, a medium and a deep layer: first six entries and mean (AMixer, figure 2)."""
    able = [layer for layer in explanation.capture if QUESTIONS["weight_bank"].applies(layer)]
    if not able:
        raise ValueError(f"{explanation.name} has no weight banks")
    chosen = [able[i] for i in sorted({0, len(able) // 2, len(able) - 1})]
    answers = [explanation.ask("weight_bank", layer.layer.index) for layer in chosen]
    with drawing(theme) as colours:
        columns = max(len(answer.panels) for answer in answers)
        figure = _figure(columns * 1.05, len(chosen) * 1.25)
        for row, (layer, answer) in enumerate(zip(chosen, answers, strict=True)):
            for panel, name in enumerate(answer.panels):
                place = columns - 1 if name == "mean" else panel
                axis = figure.add_subplot(len(chosen), columns, row * columns + place + 1)
                draw_map(axis, explanation, answer, panel, colours)
                axis.set(xticks=[], yticks=[])
                axis.grid(False)
                axis.set_title(name if name == "mean" else f"entry {name}")
                if panel == 0:
                    axis.set_ylabel(layer.layer.label)
        return figure


def draw_curves(rows: Sequence[Explanation], questions: Sequence[str] = (), theme: str = "light") -> "Figure":
    """Draw quantities by depth: one panel for each question, one line for each model, dots for heads of a single one.

    Args:
        rows: explanations of the same image by one or more models.
        questions: keys of `QUESTIONS` that give curves; (): all that apply.
        theme: "light" or "dark".
    """
    keys = questions or [
        key for key in QUESTIONS if QUESTIONS[key].style == "curve" and any(key in e.questions() for e in rows)
    ]
    with drawing(theme):
        figure = _figure(2.4 * len(keys), 2.1)
        for number, key in enumerate(keys):
            axis = figure.add_subplot(1, len(keys), number + 1)
            for colour, explanation in zip(PALETTE, rows, strict=False):
                if key in explanation.questions():
                    _curve(axis, explanation.ask(key), colour, heads=len(rows) == 1)
            unit = next((e.ask(key).unit for e in rows if key in e.questions()), "")
            axis.set_title(QUESTIONS[key].title + (f" ({unit})" if unit else ""))
            _block_axis(axis)
        if len(rows) > 1:
            _legend(figure, list(zip(short_names(rows), PALETTE, strict=False)))
        return figure


def draw_distances(statistics: Statistics, theme: str = "light") -> "Figure":
    """Draw the mean mixing distance of each head by layer over a data set (AMixer's supplement, figure 1)."""
    with drawing(theme):
        figure = _figure(4.2, 2.4)
        axis = figure.add_subplot()
        means = []
        for number, layer in enumerate(statistics.layers):
            heads = layer.distance.numpy()
            means.append(heads.mean())
            axis.scatter([number + 1] * len(heads), heads, s=14, color=PALETTE[0], alpha=0.6, lw=0)
        axis.plot(range(1, len(means) + 1), means, color=PALETTE[5], lw=1.2)
        _block_axis(axis)
        axis.set_ylabel("mean mixing distance (px)")
        axis.set_ylim(bottom=0)
        _legend(figure, (("heads", PALETTE[0]), ("mean", PALETTE[5])), marker="o")
        return figure


def draw_entropies(statistics: dict[str, Statistics], theme: str = "light") -> "Figure":
    """Draw densities of the attention entropy by layer over a data set: a colour for each model, thin lines for heads.

    Args:
        statistics: of models with softmax attention, by name, such as with and without context broadcasting.
        theme: "light" or "dark".
    """
    able = {name: [x for x in s.layers if x.entropies is not None] for name, s in statistics.items()}
    if not any(able.values()):
        raise ValueError("no model has softmax attention; entropies need one")
    count = max(map(len, able.values()))
    with drawing(theme) as colours:
        figure = _figure(4.6, 0.42 * count + 0.7)
        axis = figure.add_subplot()
        for colour, layers in zip(PALETTE, able.values(), strict=False):
            for number, layer in enumerate(layers):
                assert layer.entropies is not None
                heads = layer.entropies.double()
                density, places, base = heads.sum(0), (np.arange(BINS) + 0.5) / BINS, count - 1 - number
                height = (density / density.max() * 0.85).numpy()
                axis.fill_between(places, base, base + height, color=colour, alpha=0.35, lw=0)
                axis.plot(places, base + height, color=colour, lw=1.1)
                for head in heads if len(heads) > 1 else ():
                    axis.plot(places, base + (head / density.max() * 0.85).numpy(), color=colour, lw=0.5, alpha=0.7)
        first = max(able.values(), key=len)
        axis.set_yticks(range(count), [layer.layer.label for layer in first][::-1])
        seen = sum(
            layer.entropies.sum(0) for layers in able.values() for layer in layers if layer.entropies is not None
        )
        lowest = int((torch.as_tensor(seen) > 0).nonzero()[0]) / BINS
        axis.set(xlabel="entropy / entropy of uniform attention", xlim=(max(0, lowest - 0.02), 1))
        axis.tick_params(axis="y", length=0)
        axis.grid(axis="x", visible=False)
        axis.spines["left"].set_color(colours.paper)
        _legend(figure, list(zip(_strip_common(list(able)), PALETTE, strict=False)))
        return figure


def draw_comparison(
    rows: Sequence[Explanation],
    position: tuple[float, float] = POSITION,
    layer: int | None = None,
    theme: str = "light",
    questions: Sequence[str] | None = None,
    head: int | None = None,
) -> "Figure":
    """Draw the same questions about several models in one figure, below the photo and the prediction.

    A column for each model. A question that a model or its layer cannot be asked leaves its place empty.

    Args:
        rows: explanations of the same image.
        position: of the token, in fractions of height and width.
        layer: index of the layer of all models; None: the last with a grid worth a picture.
        theme: "light" or "dark".
        questions: keys of `QUESTIONS` that give maps; None: receptive field, mixing weights and saliency, if all models
            can be asked.
        head: index; None: the mean over heads.
    """
    titles = {"receptive_field": "receptive field", "mixing_row": "mixing weights", "saliency": "saliency"}
    keys = [key for key in titles if all(key in e.questions() for e in rows)] if questions is None else questions
    answers = {key: [_ask(e, key, layer, position, head) for e in rows] for key in keys}
    panels = [(key, i) for key in keys for i in range(max(len(a.panels) if a else 0 for a in answers[key]))]
    places: dict[tuple[str, int], str] = {}  # layers of the first model
    with drawing(theme) as colours:
        figure, axes = _grid(1 + len(panels), len(rows), rows[0])
        for number, (explanation, name) in enumerate(zip(rows, short_names(rows), strict=True)):
            _photo(axes[0, number], explanation, position)
            axes[0, number].set_title(f"{name}\n{_prediction(explanation)}".strip())
            for axis, (key, panel) in zip(axes[1:, number], panels, strict=True):
                answer = answers[key][number]
                if answer is None:
                    axis.set_visible(False)
                    continue
                draw_map(axis, explanation, answer, panel, colours)
                place = explanation.capture[answer.layer].layer.label if answer.layer else ""
                if (key, panel) not in places:
                    title = titles.get(key, QUESTIONS[key].title.lower())
                    axis.set_ylabel("\n".join(filter(None, (title, answer.panels[panel], place))), color=colours.ink)
                    places[key, panel] = place
                elif place != places[key, panel]:
                    axis.set_title(place)
        return figure


def _ask(explanation: Explanation, key: str, layer: int | None, *about: Any) -> Answer | None:
    """The answer, or None if the model or this layer or head of it cannot be asked."""
    if key not in explanation.questions():
        return None
    try:
        return explanation.ask(key, layer if "layer" in QUESTIONS[key].uses else None, *about)
    except ValueError:
        return None


def spread_layers(explanation: Explanation, question: str = "sampled_positions", count: int = 6) -> list[CapturedLayer]:
    """Up to `count` layers that can answer a question and whose grid is worth a picture, from first to last."""
    able = [x for x in explanation.capture if QUESTIONS[question].applies(x) and min(x.grid) > 2]
    able = able or [explanation.layer_for(question)]
    places = np.linspace(0, len(able) - 1, min(count, len(able))).round().astype(int)
    return [able[i] for i in places]


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure  # not pyplot: no global state, no window

    return Figure(figsize=(width, height), layout="constrained")


def _grid(rows: int, columns: int, explanation: Explanation) -> "tuple[Figure, Any]":
    """A figure of square panels without ticks, with the aspect ratio of the photo."""
    height, width = explanation.rgb.shape[:2]
    side = PANEL / max(height, width)
    figure = _figure(columns * (width * side + 0.08), rows * (height * side + 0.28))
    axes = figure.subplots(rows, columns, squeeze=False)
    for axis in axes.flat:
        axis.set(xticks=[], yticks=[])
        axis.grid(False)
        axis.spines[:].set_visible(False)
    return figure, axes


def _extent(explanation: Explanation) -> tuple[float, float, float, float]:
    height, width = explanation.rgb.shape[:2]
    return 0, width, height, 0


def _photo(axis: Any, explanation: Explanation, position: tuple[float, float] | None) -> None:
    axis.imshow(explanation.rgb.numpy(), extent=_extent(explanation), interpolation="antialiased")
    if position is not None:
        layer = explanation.layer_for("mixing_row")
        _mark(axis, explanation, layer.token_at(*position), layer.grid)


def _mark(axis: Any, explanation: Explanation, token: tuple[int, int], grid: tuple[int, int]) -> None:
    """Frame a token."""
    from matplotlib.patches import Rectangle

    height, width = explanation.rgb.shape[:2]
    down, right = height / grid[0], width / grid[1]
    for colour, line in (("#000000", 2.2), (MARK, 1.2)):
        place = (token[1] * right, token[0] * down)
        axis.add_patch(Rectangle(place, right, down, fill=False, ec=colour, lw=line))


def _veiled(explanation: Explanation, colours: Theme) -> np.ndarray:
    """The photo in grey, mixed with the background."""
    from matplotlib.colors import to_rgb

    grey = explanation.rgb.numpy() @ np.array([0.299, 0.587, 0.114])
    return (1 - VEIL) * np.repeat(grey[..., None], 3, -1) + VEIL * np.array(to_rgb(colours.paper))


def _regions(axis: Any, explanation: Explanation, regions: np.ndarray) -> None:
    """Fill each region with its mean colour and a tint, and draw the borders."""
    from matplotlib.colors import to_rgb

    height, width = explanation.rgb.shape[:2]
    rows, columns = (np.arange(n) * m // n for n, m in zip((height, width), regions.shape, strict=True))
    large = regions[rows[:, None], columns]
    tints = np.array([to_rgb(colour) for colour in PALETTE[:7]])
    _, index = np.unique(large, return_inverse=True)
    shape = large.shape
    index = index.reshape(shape)
    flat = explanation.rgb.numpy().reshape(-1, 3)
    sums = np.stack([np.bincount(index.ravel(), flat[:, c]) for c in range(3)], -1)
    means = sums / np.bincount(index.ravel())[:, None]
    tint = tints[(large * 5) % 7]  # neighbours differ
    axis.imshow(0.45 * explanation.rgb.numpy() + 0.3 * means[index] + 0.25 * tint, extent=_extent(explanation))
    for line in region_borders(regions, height / regions.shape[0], width / regions.shape[1]):
        axis.plot(*line, color="#ffffff", lw=0.7, solid_capstyle="round")


def region_borders(regions: np.ndarray, down: float, right: float) -> list[tuple[list[float], list[float]]]:
    """Lines (x, y) between tokens of different regions; `down` and `right` are the sides of a token."""
    lines = []
    for r, c in zip(*np.nonzero(regions[:, 1:] != regions[:, :-1]), strict=True):
        lines.append(([(c + 1) * right] * 2, [r * down, (r + 1) * down]))
    for r, c in zip(*np.nonzero(regions[1:] != regions[:-1]), strict=True):
        lines.append(([c * right, (c + 1) * right], [(r + 1) * down] * 2))
    return lines


def _block_axis(axis: Any) -> None:
    axis.set_xlabel("block")
    axis.xaxis.get_major_locator().set_params(integer=True)


def _curve(axis: Any, answer: Answer, colour: str, heads: bool) -> None:
    blocks = np.arange(1, answer.values.shape[1] + 1)
    if heads:
        for line in answer.values[1:]:
            axis.scatter(blocks, line, s=10, color=colour, alpha=0.45, lw=0)
    axis.plot(blocks, answer.values[0], color=colour, lw=1.3, marker="o", ms=2.5)


def _legend(figure: "Figure", entries: Sequence[tuple[str, str]], marker: str = "s") -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], ls="", marker=marker, ms=5, color=colour, label=label) for label, colour in entries]
    widest = 0.35 + 0.07 * max(len(label) for label, _ in entries)  # inches
    columns = max(1, min(len(handles), int(figure.get_size_inches()[0] / widest)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, handletextpad=0.1)


def short_names(rows: Sequence[Explanation]) -> list[str]:
    """The names of several models without what all have in common; the name of a single one, shortened."""
    return _strip_common([explanation.name for explanation in rows])


def _strip_common(names: Sequence[str]) -> list[str]:
    words = [re.split(r"(?<=[._/])", name) for name in names]  # each with the separator after it
    bare = [[word.rstrip("._/") for word in row] for row in words]
    front, back = (_count_common(rows) for rows in (bare, [row[::-1] for row in bare]))
    while front + back >= min(map(len, words)):  # every name keeps a word
        front, back = (front - 1, back) if front else (front, back - 1)
    return [_shorten("".join(row[front : len(row) - back]).rstrip("._/")) for row in words]


def _count_common(rows: Sequence[Sequence[str]]) -> int:
    """Number of first words that all rows share; 0 for a single row."""
    columns = zip(*rows, strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns)) if len(rows) > 1 else 0


def _shorten(name: str, length: int = 24) -> str:
    return name if len(name) <= length else f"{name[: length // 2]}…{name[len(name) - length // 2 + 1 :]}"


def _prediction(explanation: Explanation) -> str:
    if not explanation.classes:
        return ""
    name = explanation.classes[explanation.target].split(",")[0]
    return f"{_shorten(name, 18)} {100 * float(explanation.probabilities.max()):.0f} %"


def _caption(explanation: Explanation, answer: Answer, panel: int) -> str:
    place = explanation.capture[answer.layer].layer.label if answer.layer else ""
    head = f"head {answer.head + 1}" if answer.head is not None else ""
    return "\n".join(filter(None, (place, ", ".join(filter(None, (answer.panels[panel], head))))))
