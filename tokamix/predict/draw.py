"""Pictures of segmentations and detections, for people to look at."""

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from tokamix.tasks import IGNORE_INDEX

LEAST = 480  # smaller pictures are enlarged so far, in whole steps, that one can read what is written on them
INK, PAPER, SOFT = (33, 37, 41), (255, 255, 255), (120, 126, 133)
# easy to tell apart, also from each other's neighbours; more are made as they are needed
FIRST = (
    *((230, 57, 70), (29, 120, 216), (42, 157, 75), (255, 176, 0), (138, 63, 252), (0, 168, 181), (255, 112, 27)),
    *((224, 82, 178), (141, 110, 70), (110, 190, 20), (76, 95, 180), (214, 150, 150), (0, 110, 100), (170, 170, 40)),
)
COLOURS = 256
SEEN = (2, 4, 3)  # how much the eye makes of a difference in red, green and blue, squared
Colour = tuple[int, int, int]


class Things(NamedTuple):
    """What was found in an image, or what is there: in pixels of that image."""

    boxes: Tensor  # (n, 4) left, top, right, bottom
    labels: Tensor  # (n,)
    scores: Tensor | None = None  # (n,), of predictions
    masks: Tensor | None = None  # (n, H, W) bool


def colour(i: int) -> Colour:
    """The i-th colour; after 256 they come again."""
    return _colours()[i % COLOURS]


@cache
def _colours() -> list[Colour]:
    """FIRST, and then always that colour of a grid which is furthest from all before it, from black and from white."""
    steps = np.linspace(30, 240, 10)
    grid = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(-1, 3).round()

    def distance(colour: Sequence[float]) -> np.ndarray:
        return ((grid - np.array(colour)) ** 2 * SEEN).sum(1)

    chosen = list(FIRST)
    nearest = np.min([distance(each) for each in (*chosen, (0, 0, 0), PAPER)], 0)
    while len(chosen) < COLOURS:
        r, g, b = grid[nearest.argmax()].astype(int).tolist()
        chosen.append((r, g, b))
        nearest = np.minimum(nearest, distance((r, g, b)))
    return chosen


def class_colours(classes: Sequence[str]) -> list[Colour]:
    """A colour for each class; a background is black."""
    ground = bool(classes) and classes[0].lower() == "background"
    return [(0, 0, 0)] * ground + [colour(i) for i in range(len(classes) - ground)]


def class_picture(labels: Tensor, classes: Sequence[str]) -> Image.Image:
    """Classes of pixels (H, W) as a palette picture: the pixel's value is the class, 255 stands for no class.

    A palette has room for 255 classes; more of them are a grey picture of 16 bits, in which no value is kept free.
    """
    if len(classes) > IGNORE_INDEX:
        return Image.fromarray(labels.cpu().numpy().astype(np.uint16))
    picture = Image.fromarray(labels.to(torch.uint8).cpu().numpy(), mode="P")
    flat = [value for rgb in class_colours(classes) for value in rgb]
    picture.putpalette(flat + [0] * (3 * IGNORE_INDEX - len(flat)) + list(PAPER))
    return picture


def draw_segmentation(image: Tensor, labels: Tensor, classes: Sequence[str], legend: bool = True) -> Image.Image:
    """An image (3, H, W) uint8 in the colours of its classes (H, W), with a legend of those that occur.

    A background keeps the image's own colours; what counts for nothing is white.
    """
    colours = np.array([*class_colours(classes), PAPER], dtype=np.float32)
    index = labels.cpu().numpy().astype(np.int64)
    index = np.where(index == IGNORE_INDEX, len(classes), index)
    pixels = image.permute(1, 2, 0).cpu().numpy().astype(np.float32)
    painted = 0.65 * colours[index] + 0.35 * _grey(pixels)
    if classes and classes[0].lower() == "background":
        painted = np.where((index == 0)[..., None], pixels, painted)
    border = _border(index)
    painted[border] = 0.4 * painted[border]
    picture = _enlarged(Image.fromarray(painted.round().astype(np.uint8)))
    if not legend:
        return picture
    counts = np.bincount(index.ravel(), minlength=len(classes) + 1)[: len(classes)]
    shares = sorted(((n / index.size, i) for i, n in enumerate(counts) if n), reverse=True)
    return _beside(picture, [(classes[i], _percent(share), class_colours(classes)[i]) for share, i in shares])


def draw_things(image: Tensor, things: Things, classes: Sequence[str]) -> Image.Image:
    """An image (3, H, W) uint8 with boxes, names and scores, and masks where there are some; each thing has a colour.

    Large things are drawn first, so that small ones stay visible.
    """
    boxes = things.boxes.cpu().float()
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    order = areas.argsort(descending=True).tolist()
    pixels = image.permute(1, 2, 0).cpu().numpy().astype(np.float32)
    if things.masks is not None:
        grey = _grey(pixels)  # under its own colours a thing would not have the colour of its box
        for i in order:
            mask = things.masks[i].cpu().numpy().astype(bool)
            pixels[mask] = 0.55 * np.array(colour(i), dtype=np.float32) + 0.45 * grey[mask]
    picture = Image.fromarray(pixels.round().astype(np.uint8))
    small, picture = picture.width, _enlarged(picture)
    factor = picture.width / small
    draw = ImageDraw.Draw(picture)
    line = max(2, round(min(picture.size) / 300))
    font = _font(max(12, min(28, round(min(picture.size) / 36))))
    for i in order:
        left, top, right, bottom = (factor * value for value in boxes[i].tolist())
        if things.masks is not None:
            _outline(picture, things.masks[i], factor, colour(i))
        draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colour(i), width=line)
    for i in order:  # above all boxes
        label = int(things.labels[i])
        text = classes[label] if 0 <= label < len(classes) else str(label)
        if things.scores is not None:
            text += f" {100 * float(things.scores[i]):.0f}"
        _tag(draw, text, factor * boxes[i], colour(i), font, picture.size)
    return picture


def contact_sheet(
    rows: Sequence[Sequence[Image.Image]],
    titles: Sequence[str],
    legend: Sequence[tuple[str, Colour]] = (),
    side: int = 256,
) -> Image.Image:
    """Pictures in rows under the titles of their columns, and what colours mean below."""
    gap, font = 8, _font(15)
    head = 30
    small = [[_fitted(picture, side) for picture in row] for row in rows]
    heights = [max(picture.height for picture in row) for row in small]
    width = gap + len(titles) * (side + gap)
    places, foot = _flow(legend, width - gap, font)
    below = head + sum(heights) + gap * len(rows)
    sheet = Image.new("RGB", (width, below + foot), PAPER)
    draw = ImageDraw.Draw(sheet)
    for (left, top), (name, rgb) in zip(places, legend, strict=True):
        draw.rectangle((gap + left, below + top + 3, gap + left + 13, below + top + 16), fill=rgb)
        draw.text((gap + left + 19, below + top), name, INK, font)
    for column, title in enumerate(titles):
        draw.text((gap + column * (side + gap), 6), title, INK, font)
    top = head
    for row, height in zip(small, heights, strict=True):
        for column, picture in enumerate(row):
            sheet.paste(picture, (gap + column * (side + gap) + (side - picture.width) // 2, top))
        top += height + gap
    return sheet


def _flow(
    legend: Sequence[tuple[str, Colour]], width: int, font: ImageFont.ImageFont
) -> tuple[list[tuple[int, int]], int]:
    """Where the entries of a legend stand when they are written line by line, and how high it becomes."""
    places, left, top = [], 0, 0
    for name, _ in legend:
        needed = 19 + round(font.getlength(name)) + 18
        if left and left + needed > width:
            left, top = 0, top + 24
        places.append((left, top))
        left += needed
    return places, top + 28 if legend else 0


def _grey(pixels: np.ndarray) -> np.ndarray:
    return (pixels @ np.array([0.299, 0.587, 0.114], dtype=np.float32))[..., None].repeat(3, -1)


def _border(index: np.ndarray) -> np.ndarray:
    """Where a class begins that the pixel above or to the left does not have."""
    border = np.zeros(index.shape, dtype=bool)
    border[1:] |= index[1:] != index[:-1]
    border[:, 1:] |= index[:, 1:] != index[:, :-1]
    return border


def _fitted(picture: Image.Image, side: int) -> Image.Image:
    factor = side / max(picture.size)
    size = (max(1, round(picture.width * factor)), max(1, round(picture.height * factor)))
    return picture.resize(size, Image.Resampling.LANCZOS if factor < 1 else Image.Resampling.NEAREST)


def _enlarged(picture: Image.Image) -> Image.Image:
    factor = max(1, -(-LEAST // max(picture.size)))
    size = (picture.width * factor, picture.height * factor)
    return picture if factor == 1 else picture.resize(size, Image.Resampling.NEAREST)


def _outline(picture: Image.Image, mask: Tensor, factor: float, rgb: Colour) -> None:
    """A line along the border of a mask."""
    size = picture.size
    filled = Image.fromarray((mask.cpu().numpy() > 0).astype(np.uint8) * 255)
    grown = np.pad(np.asarray(filled.resize(size, Image.Resampling.NEAREST)) > 0, 1)
    inner = grown[:-2, 1:-1] & grown[2:, 1:-1] & grown[1:-1, :-2] & grown[1:-1, 2:]
    edge = grown[1:-1, 1:-1] & ~inner
    picture.paste(rgb, (0, 0, *size), Image.fromarray(edge.astype(np.uint8) * 255))


def _tag(
    draw: ImageDraw.ImageDraw, text: str, box: Tensor, rgb: Colour, font: ImageFont.ImageFont, size: tuple[int, int]
) -> None:
    """A name at the upper left of its box: above it where there is room, within the picture in any case."""
    left, top = float(box[0]), float(box[1])
    _, _, width, height = draw.textbbox((0, 0), text, font=font)
    width, height = width + 8, height + 5
    top = top - height if top >= height else top
    left, top = max(0.0, min(left, size[0] - width)), max(0.0, min(top, size[1] - height))
    draw.rectangle((left, top, left + width, top + height), fill=rgb)
    dark = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] < 150
    draw.text((left + 4, top + 1), text, PAPER if dark else INK, font)


def _beside(picture: Image.Image, entries: list[tuple[str, str, Colour]]) -> Image.Image:
    """The picture with a legend at its right; classes that do not fit into its height are summed up."""
    size = max(13, min(24, round(min(picture.size) / 36)))
    font, row = _font(size), round(size * 1.7)
    room = max(4, (picture.height - row // 2) // row)
    if len(entries) > room:
        more = len(entries) - room + 1
        entries = [*entries[: room - 1], (f"{more} more", "", PAPER)]
    measure = ImageDraw.Draw(picture)
    names = max(measure.textlength(name, font) for name, _, _ in entries) if entries else 0
    shares = measure.textlength("100 %", font)
    width = round(row + names + row + shares + row / 2) + row // 2
    height = max(picture.height, row * len(entries) + row // 2)
    whole = Image.new("RGB", (picture.width + width, height), PAPER)
    whole.paste(picture, (0, 0))
    draw = ImageDraw.Draw(whole)
    left, top = picture.width + row // 2, row // 4
    for name, share, rgb in entries:
        draw.rectangle((left, top + row // 6, left + size, top + row // 6 + size), fill=rgb)
        draw.text((left + row, top + row // 8), name, INK, font)
        draw.text((whole.width - row // 2, top + row // 8), share, SOFT, font, anchor="ra")
        top += row
    return whole


def _percent(share: float) -> str:
    return "< 1 %" if share < 0.005 else f"{100 * share:.0f} %"


def _font(size: int) -> ImageFont.ImageFont:
    return ImageFont.load_default(size)  # type: ignore[return-value]
