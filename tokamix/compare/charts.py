"""Line charts as SVG and small images as PNG, both embedded in the page.

Not drawn by matplotlib: these charts take their colours from the page, in its light and dark theme, and highlight a
line when its name is pointed at.
"""

import base64
import io
from collections.abc import Sequence
from html import escape
from statistics import mean
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

# 400 units wide, so that text keeps a readable size on a phone
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 400, 270, 40, 12, 390, 238


class Axis(NamedTuple):
    """The range of an axis, its tick labels and its title."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    title: str = ""

    def position(self, value: float) -> float:
        """Position of a value on the axis, from 0 to 1."""
        return (min(max(value, self.low), self.high) - self.low) / ((self.high - self.low) or 1)


class Line(NamedTuple):
    """A line of a chart: CSS class, title, and one row of values per seed."""

    css_class: str
    title: str
    rows: Sequence[Sequence[float]]


def draw_chart(lines: Sequence[Line], xs: Sequence[float], x_axis: Axis, y_axis: Axis) -> str:
    """Draw an SVG chart: each line is the mean of its rows at `xs`, with a band for their range."""

    def x(value: float) -> float:
        return LEFT + (RIGHT - LEFT) * x_axis.position(value)

    def y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * y_axis.position(value)

    def points(values: Sequence[float]) -> list[str]:
        return [f"{x(at):.1f} {y(value):.1f}" for at, value in zip(xs, values, strict=True)]

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for value, text in y_axis.ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y(value):.1f}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for value, text in x_axis.ticks:
        parts.append(f'<text x="{x(value):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{escape(text)}</text>')
    middle = (LEFT + RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 1}" text-anchor="middle">{escape(x_axis.title)}</text>')
    for line in lines:
        columns = list(zip(*line.rows, strict=True))
        means = [mean(column) for column in columns]
        parts.append(f'<g class="{escape(line.css_class)}"><title>{escape(line.title)}</title>')
        if len(line.rows) > 1:
            band = points([max(column) for column in columns]) + points([min(column) for column in columns])[::-1]
            parts.append(f'<path class="band" d="M{"L".join(band)}Z"/>')
        parts.append(f'<path class="line" d="M{"L".join(points(means))}"/>')
        parts.append(f'<circle cx="{x(xs[-1]):.1f}" cy="{y(means[-1]):.1f}" r="3"/></g>')
    return "".join(parts) + "</svg>"


def heat_map(values: Tensor, colours: Sequence[tuple[int, int, int]]) -> str:
    """Colour values (H, W) from 0 to 1 along a list of RGB colours; return a PNG as a data URL."""
    table = torch.tensor(colours, dtype=torch.float32)
    position = values.detach().float().cpu().clamp(0, 1) * (len(colours) - 1)
    below = position.floor().clamp_max(len(colours) - 2).long()
    return png(torch.lerp(table[below], table[below + 1], (position - below)[..., None]) / 255)


def png(image: Tensor) -> str:
    """Encode an RGB image (H, W, 3) with values from 0 to 1 as a PNG data URL."""
    file = io.BytesIO()
    Image.fromarray((255 * image).round().to(torch.uint8).numpy()).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
