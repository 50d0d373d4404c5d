"""Answers as HTML: heat maps of a few pixels that the browser lays over the photo, and lines as SVG.

Nothing is written to disk, and a click sends kilobytes.
"""

import base64
import io
from collections.abc import Iterator, Sequence
from html import escape

import matplotlib
import numpy as np
from matplotlib.colors import to_rgb
from PIL import Image

from tokamix.explain import QUESTIONS, Answer, Explanation
from tokamix.explain.explainer import is_untrained
from tokamix.explain.figures import PALETTE, region_borders, scale_values, short_names
from tokamix.studio.view import View

TOP = 3  # predicted classes that are shown
WIDTH, HEIGHT, MARGIN = 320, 150, 34  # of a chart


def render_board(explanations: Sequence[Explanation], view: View) -> str:
    """All pictures of a view: a row for each question, a column for each model."""
    rows, columns = explanations[0].layer_for("mixing_row", _layer(explanations[0], view)).grid
    names = short_names(explanations)
    parts = [_section("Photo", "What each model sees and recognises.", "", _photos(explanations, names, view))]
    for key in view.pictures:
        asked = QUESTIONS[key]
        cells = _chart(key, explanations, names) if asked.style == "curve" else _maps(key, explanations, names, view)
        parts.append(_section(asked.title, asked.sentence, _link(key), cells))
    data = f'data-y="{view.y:.4f}" data-x="{view.x:.4f}" data-rows="{rows}" data-columns="{columns}"'
    return f'<div class="board" style="--models:{len(explanations)}" {data}>{"".join(parts)}</div>'


def _section(title: str, sentence: str, link: str, cells: Iterator[str]) -> str:
    text = f"<h3>{escape(title)}</h3><p>{escape(sentence)} {link}</p>"
    return f'<section>{text}<div class="cells">{"".join(cells)}</div></section>'


def _link(key: str) -> str:
    asked = QUESTIONS[key]
    text = f"Paper, {asked.figure}" if asked.figure else "Paper"
    label = f"{text}: {asked.title}"
    return f'<a href="{asked.link}" target="_blank" rel="noopener" aria-label="{escape(label)}">{text}</a>'


def _photos(explanations: Sequence[Explanation], names: Sequence[str], view: View) -> Iterator[str]:
    for explanation, name, model in zip(explanations, names, view.models, strict=True):
        layer = explanation.layer_for("mixing_row", _layer(explanation, view))
        mark = _mark(layer.token_at(view.y, view.x), layer.grid)
        alt = f"The photo as {explanation.name} sees it, with the chosen token"
        picture = f'<img class="photo" src="{_photo(explanation)}" alt="{escape(alt)}" draggable="false">{mark}'
        note = '<p class="none">untrained: there are no weights of this name</p>' if is_untrained(model) else ""
        yield _cell(picture, f"<b>{escape(name)}</b>{note}{_predictions(explanation)}")


def _maps(key: str, explanations: Sequence[Explanation], names: Sequence[str], view: View) -> Iterator[str]:
    for explanation, name in zip(explanations, names, strict=True):
        if key not in explanation.questions():
            yield f'<p class="none">{escape(name)}: not for this mixer</p>'
            continue
        try:
            layer = _layer(explanation, view) if "layer" in QUESTIONS[key].uses else None
            answer = explanation.ask(key, layer, (view.y, view.x), view.head - 1 if view.head else None)
        except ValueError as error:  # this layer or head cannot be asked; the other pictures can
            yield f'<p class="none">{escape(name)}: {escape(str(error))}</p>'
            continue
        place = explanation.capture[answer.layer].layer.label if answer.layer else ""
        panels = ""
        for panel, title in enumerate(answer.panels):
            caption = ", ".join(filter(None, (name, place, title)))
            panels += _cell(_map(explanation, answer, panel, caption), escape(caption), answer.over_image)
        yield f'<div class="panels">{panels}</div>' if len(answer.panels) > 1 else panels


def _layer(explanation: Explanation, view: View) -> int | None:
    """Index of the chosen layer; the last one of a model with fewer layers."""
    return min(view.layer, len(explanation.capture)) - 1 if view.layer else None


def _cell(picture: str, caption: str, over_image: bool = True) -> str:
    """A picture with a caption; a click on a map of the image chooses a token."""
    kind = "stack" if over_image else "alone"
    return f'<figure><div class="{kind}">{picture}</div><figcaption>{caption}</figcaption></figure>'


def _map(explanation: Explanation, answer: Answer, panel: int, caption: str) -> str:
    """One panel over the photo, with the marked token; or alone, if it is no map of the image."""
    alt = f"{QUESTIONS[answer.question].title}, {caption}"
    lines = ""
    if answer.style == "regions":
        numbers = answer.values[panel].astype(int)
        alt += f": {len(np.unique(numbers))} regions"
        tints = np.array([to_rgb(colour) for colour in PALETTE[:7]])
        heat, kind = _png(tints[(numbers * 5) % 7]), "tint"  # neighbours differ
        borders = "".join(f"M{x[0]:g} {y[0]:g}L{x[1]:g} {y[1]:g}" for x, y in region_borders(numbers, 1.0, 1.0))
        lines = _svg(numbers.shape, f'<path class="border" d="{borders}"/>')
    else:
        scaled, cmap = scale_values(answer, panel)
        row, column = np.unravel_index(np.abs(answer.values[panel]).argmax(), scaled.shape)
        down, right = (100 * (n + 0.5) / size for n, size in zip((row, column), scaled.shape, strict=True))
        if answer.over_image:
            alt += f"; strongest {down:.0f} % from the top and {right:.0f} % from the left"
        heat, kind = _png(matplotlib.colormaps[cmap](scaled)[..., :3]), "heat" if answer.over_image else "values"
    photo = f'<img class="photo {kind}-below" src="{_photo(explanation)}" alt="">' if answer.over_image else ""
    mark = _mark(answer.token, answer.grid) if answer.token is not None and answer.grid is not None else ""
    return f'{photo}<img class="{kind}" src="{heat}" alt="{escape(alt)}" draggable="false">{lines}{mark}'


def _mark(token: tuple[int, int], grid: tuple[int, int]) -> str:
    place = f'x="{token[1]}" y="{token[0]}" width="1" height="1"'
    return _svg(grid, f'<rect class="edge" {place}/><rect class="mark" {place}/>')


def _svg(grid: tuple[int, ...], content: str) -> str:
    return f'<svg viewBox="0 0 {grid[1]} {grid[0]}" preserveAspectRatio="none" aria-hidden="true">{content}</svg>'


def _photo(explanation: Explanation) -> str:
    return _png(explanation.rgb.numpy())


def _png(rgb: np.ndarray) -> str:
    """An array (H, W, 3) from 0 to 1 as the address of an image inside of the page."""
    stream = io.BytesIO()
    Image.fromarray((rgb * 255).round().astype(np.uint8)).save(stream, "PNG", compress_level=1)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def _predictions(explanation: Explanation) -> str:
    if not explanation.classes:
        return ""
    best = explanation.probabilities.topk(min(TOP, len(explanation.classes)))
    lines = []
    for share, index in zip(best.values.tolist(), best.indices.tolist(), strict=True):
        name = escape(explanation.classes[index].split(",")[0])
        lines.append(f'<li style="--share:{share:.3f}">{name} <span>{100 * share:.0f} %</span></li>')
    return f'<ol class="predictions">{"".join(lines)}</ol>'


def _chart(key: str, explanations: Sequence[Explanation], names: Sequence[str]) -> Iterator[str]:
    """Curves by layer: a line for each model, and thin ones for its heads."""
    curves = {n: e.ask(key).values for n, e in zip(names, explanations, strict=True) if key in e.questions()}
    if not curves:
        yield '<p class="none">none of these models can be asked</p>'
        return
    unit = next(e.ask(key).unit for e in explanations if key in e.questions())
    values = np.concatenate([lines.ravel() for lines in curves.values()])
    low, high = min(0.0, float(np.nanmin(values))), float(np.nanmax(values)) or 1.0
    blocks = max(lines.shape[1] for lines in curves.values())
    right, top, bottom = WIDTH - 8, 8, HEIGHT - 22
    across = (right - MARGIN) / max(blocks - 1, 1)
    shapes = [
        f'<line x1="{MARGIN}" x2="{right}" y1="{y:g}" y2="{y:g}"/>'
        f'<text class="end" x="{MARGIN - 4}" y="{y + 3:g}">{value:.3g}</text>'
        for y, value in ((top, high), ((top + bottom) / 2, (low + high) / 2), (bottom, low))
    ]
    shapes += [f'<text x="{MARGIN + i * across:.1f}" y="{HEIGHT - 9}">{i + 1}</text>' for i in range(blocks)]
    for colour, lines in zip(PALETTE, curves.values(), strict=False):
        heights = bottom - (lines - low) / (high - low or 1) * (bottom - top)
        for number, line in enumerate(heights):
            points = " ".join(f"{MARGIN + i * across:.1f},{y:.1f}" for i, y in enumerate(line) if np.isfinite(y))
            shapes.append(f'<polyline class="{"head" if number else "mean"}" points="{points}" stroke="{colour}"/>')
    colours = zip(curves, PALETTE, strict=False)
    legend = "".join(f'<li><i style="background:{colour}"></i>{escape(name)}</li>' for name, colour in colours)
    ends = "; ".join(f"{name} from {c[0, 0]:.3g} to {c[0, -1]:.3g}" for name, c in curves.items())
    alt = escape(f"{QUESTIONS[key].title} by block: {ends}")
    chart = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{alt}">{"".join(shapes)}</svg>'
    caption = f"by block{f', in {unit}' if unit else ''}"
    yield f'<figure class="chart">{chart}<figcaption>{caption}<ul>{legend}</ul></figcaption></figure>'
