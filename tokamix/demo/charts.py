"""Drawing without a drawing library: line charts as SVG, small images as PNG, both inside the page."""

import base64
import io
from collections.abc import Sequence
from html import escape
from statistics import mean
from typing import NamedTuple

import torch
from PIL import Image
from torch import Tensor

# 400 units wide, so that letters keep a readable size on a phone
WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 400, 270, 40, 12, 390, 238


class Axis(NamedTuple):
    """The range of an axis, what is written along it, and its name."""

    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    title: str = ""

    def share(self, value: float) -> float:
        """Where a value lies, from 0 to 1."""
        return (min(max(value, self.low), self.high) - self.low) / ((self.high - self.low) or 1)


class Line(NamedTuple):
    """A line of a chart: its colour's name, what it shows, and its heights; with several rows, a band around it."""

    key: str
    title: str
    rows: Sequence[Sequence[float]]


def chart(lines: Sequence[Line], xs: Sequence[float], across: Axis, up: Axis) -> str:
    """An SVG: each line is the mean of its rows at `xs`, its band their range."""

    def x(value: float) -> float:
        return LEFT + (RIGHT - LEFT) * across.share(value)

    def y(value: float) -> float:
        return BOTTOM - (BOTTOM - TOP) * up.share(value)

    def path(heights: Sequence[float]) -> list[str]:
        return [f"{x(place):.1f} {y(height):.1f}" for place, height in zip(xs, heights, strict=True)]

    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for value, text in up.ticks:
        parts.append(f'<path class="grid" d="M{LEFT} {y(value):.1f}H{RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(value) + 4:.1f}" text-anchor="end">{escape(text)}</text>')
    for value, text in across.ticks:
        parts.append(f'<text x="{x(value):.1f}" y="{BOTTOM + 18}" text-anchor="middle">{escape(text)}</text>')
    middle = (LEFT + RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 1}" text-anchor="middle">{escape(across.title)}</text>')
    for line in lines:
        columns = list(zip(*line.rows, strict=True))
        means = [mean(column) for column in columns]
        parts.append(f'<g class="{escape(line.key)}"><title>{escape(line.title)}</title>')
        if len(line.rows) > 1:
            band = path([max(column) for column in columns]) + path([min(column) for column in columns])[::-1]
            parts.append(f'<path class="band" d="M{"L".join(band)}Z"/>')
        parts.append(f'<path class="line" d="M{"L".join(path(means))}"/>')
        parts.append(f'<circle cx="{x(xs[-1]):.1f}" cy="{y(means[-1]):.1f}" r="3"/></g>')
    return "".join(parts) + "</svg>"


def png(values: Tensor, ramp: Sequence[tuple[int, int, int]]) -> str:
    """An image (H, W) of values in 0..1, coloured along a ramp, as a data address."""
    colours = torch.tensor(ramp, dtype=torch.float32)
    position = values.detach().float().cpu().clamp(0, 1) * (len(ramp) - 1)
    below = position.floor().clamp_max(len(ramp) - 2).long()
    rgb = torch.lerp(colours[below], colours[below + 1], (position - below)[..., None])
    file = io.BytesIO()
    Image.fromarray(rgb.round().to(torch.uint8).numpy()).save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
