"""Drawings of predictions: overlays of masks and boxes, class maps, contact sheets.

By hand rather than with torchvision's draw_* functions, which place labels over each other, do not dim the image under
masks, and have neither legends nor sheets.
"""

import contextlib
import math
from collections.abc import Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from tokamix.tasks import IGNORE_INDEX

MIN_SIDE = 480  # smaller images are enlarged by a whole factor, so that labels can be read
INK, PAPER, GREY = (33, 37, 41), (255, 255, 255), (120, 126, 133)
# colours that are easy to distinguish; further ones are computed
FIRST_COLOURS = (
    *((230, 57, 70), (29, 120, 216), (42, 157, 75), (255, 176, 0), (138, 63, 252), (0, 168, 181), (255, 112, 27)),
    *((224, 82, 178), (141, 110, 70), (110, 190, 20), (76, 95, 180), (214, 150, 150), (0, 110, 100), (170, 170, 40)),
)
NUM_COLOURS = 256
# files that Pillow looks for in the system's folders, for names that are not written in ASCII
FONTS = ("DejaVuSans.ttf", "NotoSansCJK-Regular.ttc", "wqy-zenhei.ttc", "Arial Unicode.ttf", "arialuni.ttf")
PERCEPTION = (2, 4, 3)  # squared weights of differences in red, green and blue
Colour = tuple[int, int, int]
Rectangle = tuple[float, float, float, float]  # left, top, right, bottom


class Objects(NamedTuple):
    """Detected or annotated objects of an image, in its pixels."""

    boxes: Tensor  # (n, 4) left, top, right, bottom
    labels: Tensor  # (n,)
    scores: Tensor | None = None  # (n,), of predictions
    masks: Tensor | None = None  # (n, H, W) bool


def colour(i: int) -> Colour:
    """Return colour i; they repeat after 256."""
    return _colours()[i % NUM_COLOURS]


@cache
def _colours() -> list[Colour]:
    """FIRST_COLOURS, then repeatedly the colour of a grid that is furthest from all before, from black and white."""
    steps = np.linspace(30, 240, 10)
    grid = np.stack(np.meshgrid(steps, steps, steps), -1).reshape(-1, 3).round()

    def distance(rgb: Sequence[float]) -> np.ndarray:
        return ((grid - np.array(rgb)) ** 2 * PERCEPTION).sum(1)

    colours = list(FIRST_COLOURS)
    nearest = np.min([distance(each) for each in (*colours, (0, 0, 0), PAPER)], 0)
    while len(colours) < NUM_COLOURS:
        r, g, b = grid[nearest.argmax()].astype(int).tolist()
        colours.append((r, g, b))
        nearest = np.minimum(nearest, distance((r, g, b)))
    return colours


def class_colours(classes: Sequence[str]) -> list[Colour]:
    """Return a colour for each class; a background is black."""
    background = bool(classes) and classes[0].lower() == "background"
    return [(0, 0, 0)] * background + [colour(i) for i in range(len(classes) - background)]


def draw_class_map(class_map: Tensor, classes: Sequence[str]) -> Image.Image:
    """Convert a class map (H, W) to a palette image: a pixel's value is its class, 255 means ignored.

    A palette has room for 255 classes; with more, the result is a 16-bit grey image without a value for ignored pixels.
    """
    if len(classes) > IGNORE_INDEX:
        return Image.fromarray(class_map.cpu().numpy().astype(np.uint16))
    image = Image.fromarray(class_map.to(torch.uint8).cpu().numpy(), mode="P")
    flat = [value for rgb in class_colours(classes) for value in rgb]
    image.putpalette(flat + [0] * (3 * IGNORE_INDEX - len(flat)) + list(PAPER))
    return image


def draw_segmentation(image: Tensor, class_map: Tensor, classes: Sequence[str], legend: bool = True) -> Image.Image:
    """Draw a class map (H, W) over an image (3, H, W) uint8, with a legend of the classes that occur.

    A background keeps the image's colours; ignored pixels are white.
    """
    colours = np.array([*class_colours(classes), PAPER], dtype=np.float32)
    index = class_map.cpu().numpy().astype(np.int64)
    index = np.where(index == IGNORE_INDEX, len(classes), index)
    pixels = image.permute(1, 2, 0).cpu().numpy().astype(np.float32)
    painted = 0.65 * colours[index] + 0.35 * _grey(pixels)
    if classes and classes[0].lower() == "background":
        painted = np.where((index == 0)[..., None], pixels, painted)
    edges = _edges(index)
    painted[edges] = 0.4 * painted[edges]
    overlay = _enlarge(Image.fromarray(painted.round().astype(np.uint8)))
    if not legend:
        return overlay
    counts = np.bincount(index.ravel(), minlength=len(classes) + 1)[: len(classes)]
    areas = sorted(((n / index.size, i) for i, n in enumerate(counts) if n), reverse=True)
    return _add_legend(overlay, [(classes[i], _percent(area), class_colours(classes)[i]) for area, i in areas])


def draw_objects(image: Tensor, objects: Objects, classes: Sequence[str]) -> Image.Image:
    """Draw boxes, class names, scores and masks over an image (3, H, W) uint8; each class has a colour.

    Large objects are drawn first, so that small ones stay visible. Labels do not cover each other.
    """
    boxes = objects.boxes.cpu().float()
    areas = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])
    order = areas.argsort(descending=True).tolist()
    colours = [colour(label) for label in objects.labels.tolist()]
    pixels = image.permute(1, 2, 0).cpu().numpy().astype(np.float32)
    if objects.masks is not None:
        grey = _grey(pixels)  # over the image's own colours, a mask would not have the colour of its box
        for i in order:
            mask = objects.masks[i].cpu().numpy().astype(bool)
            pixels[mask] = 0.55 * np.array(colours[i], dtype=np.float32) + 0.45 * grey[mask]
    overlay = Image.fromarray(pixels.round().astype(np.uint8))
    width, overlay = overlay.width, _enlarge(overlay)
    factor = overlay.width / width
    draw = ImageDraw.Draw(overlay)
    line = max(2, round(min(overlay.size) / 300))
    texts = [_object_text(objects, i, classes) for i in range(len(boxes))]
    font = _font(max(12, min(28, round(min(overlay.size) / 36))), texts)
    for i in order:
        left, top, right, bottom = (factor * value for value in boxes[i].tolist())
        if objects.masks is not None:
            _draw_outline(overlay, objects.masks[i], factor, colours[i])
        draw.rectangle((left, top, max(left, right - 1), max(top, bottom - 1)), outline=colours[i], width=line)
    scaled: list[Rectangle] = [(a, b, c, d) for a, b, c, d in (factor * boxes).tolist()]
    for i, place in enumerate(place_labels(scaled, [_text_size(text, font) for text in texts], overlay.size)):
        if place is not None:
            _draw_label(draw, texts[i], place, scaled[i], colours[i], font)
    return overlay


def place_labels(
    boxes: Sequence[Rectangle], sizes: Sequence[tuple[int, int]], canvas: tuple[int, int]
) -> list[Rectangle | None]:
    """Choose a place for the label of each box where it covers no other label.

    Tried in order: above the box, inside its top, below it, inside its bottom, each at its left and right; then the
    free place of the image that is nearest to the box. A label for which no place is free is left out (None). Earlier
    boxes, the ones with the best scores, choose first.

    Args:
        boxes: of the objects.
        sizes: (width, height) of the labels.
        canvas: (width, height) of the image.
    """
    taken: list[Rectangle] = []
    places: list[Rectangle | None] = []
    for (left, top, right, bottom), (width, height) in zip(boxes, sizes, strict=True):
        rows = [y for y in (top - height, top, bottom, bottom - height) if 0 <= y <= canvas[1] - height]
        near = [(x, y) for y in rows for x in (left, right - width)]
        grid = [
            (x, y) for y in range(0, canvas[1] - height + 1, height) for x in range(0, canvas[0], max(8, width // 4))
        ]
        grid.sort(key=lambda corner: (corner[0] - left) ** 2 + (corner[1] - top) ** 2)
        place = None
        for x, y in (*near, *grid):
            x = max(0, min(x, canvas[0] - width))
            candidate = (x, y, x + width, y + height)
            if not any(_overlap(candidate, other) for other in taken):
                place = candidate
                taken.append(candidate)
                break
        places.append(place)
    return places


def contact_sheet(
    rows: Sequence[Sequence[Image.Image]],
    titles: Sequence[str],
    legend: Sequence[tuple[str, Colour]] = (),
    side: int = 256,
) -> Image.Image:
    """Arrange images in rows, with a title above each column and a legend of colours below."""
    gap, font = 8, _font(15, [*titles, *(name for name, _ in legend)])
    header = 30
    small = [[_fit(image, side) for image in row] for row in rows]
    heights = [max(image.height for image in row) for row in small]
    width = gap + len(titles) * (side + gap)
    positions, footer = _flow(legend, width - gap, font)
    bottom = header + sum(heights) + gap * len(rows)
    sheet = Image.new("RGB", (width, bottom + footer), PAPER)
    draw = ImageDraw.Draw(sheet)
    for (left, top), (name, rgb) in zip(positions, legend, strict=True):
        draw.rectangle((gap + left, bottom + top + 3, gap + left + 13, bottom + top + 16), fill=rgb)
        draw.text((gap + left + 19, bottom + top), name, INK, font)
    for column, title in enumerate(titles):
        draw.text((gap + column * (side + gap), 6), title, INK, font)
    top = header
    for row, height in zip(small, heights, strict=True):
        for column, image in enumerate(row):
            sheet.paste(image, (gap + column * (side + gap) + (side - image.width) // 2, top))
        top += height + gap
    return sheet


def captioned_sheet(
    images: Sequence[Image.Image], captions: Sequence[Sequence[tuple[str, Colour]]], side: int = 180, title: str = ""
) -> Image.Image:
    """Arrange images in a grid, each with lines of text below it.

    Args:
        images: of any sizes; fitted into squares.
        captions: for each image, lines of text with their colours; cut to the width of the square.
        side: of a square, in pixels.
        title: above the grid.
    """
    gap, line = 10, 19
    font = _font(14, [text for caption in captions for text, _ in caption])
    large = _font(18, [title])
    columns = len(images) if len(images) <= 6 else min(range(8, 4, -1), key=lambda count: -len(images) % count)
    columns = max(1, columns)
    lines = max((len(caption) for caption in captions), default=0)
    cell = side + lines * line + gap
    header = 40 if title else gap
    width = gap + columns * (side + gap)
    if title:
        width = max(width, round(large.getlength(title)) + 2 * gap)
    sheet = Image.new("RGB", (width, header + math.ceil(len(images) / columns) * cell), PAPER)
    draw = ImageDraw.Draw(sheet)
    draw.text((gap, 9), title, INK, large)
    for i, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = gap + i % columns * (side + gap), header + i // columns * cell
        small = _fit(image.convert("RGB"), side)
        sheet.paste(small, (left + (side - small.width) // 2, top + (side - small.height) // 2))
        for n, (text, rgb) in enumerate(caption):
            draw.text((left, top + side + 2 + n * line), shorten(text, side, font), rgb, font)
    return sheet


def shorten(text: str, width: float, font: ImageFont.ImageFont) -> str:
    """Cut a text in its middle until it fits into a width; both ends stay, since names often differ at the end."""
    if font.getlength(text) <= width:
        return text
    kept = len(text) - 1
    while kept > 2 and font.getlength(_cut(text, kept)) > width:
        kept -= 1
    return _cut(text, kept)


def _cut(text: str, kept: int) -> str:
    head = (2 * kept + 2) // 3
    return f"{text[:head]}…{text[len(text) - (kept - head) :]}"


def _flow(
    legend: Sequence[tuple[str, Colour]], width: int, font: ImageFont.ImageFont
) -> tuple[list[tuple[int, int]], int]:
    """Positions of legend entries written line by line, and the height of the legend."""
    positions, left, top = [], 0, 0
    for name, _ in legend:
        needed = 19 + round(font.getlength(name)) + 18
        if left and left + needed > width:
            left, top = 0, top + 24
        positions.append((left, top))
        left += needed
    return positions, top + 28 if legend else 0


def _grey(pixels: np.ndarray) -> np.ndarray:
    return (pixels @ np.array([0.299, 0.587, 0.114], dtype=np.float32))[..., None].repeat(3, -1)


def _edges(index: np.ndarray) -> np.ndarray:
    """Pixels whose class differs from the pixel above or to the left."""
    edges = np.zeros(index.shape, dtype=bool)
    edges[1:] |= index[1:] != index[:-1]
    edges[:, 1:] |= index[:, 1:] != index[:, :-1]
    return edges


def _fit(image: Image.Image, side: int) -> Image.Image:
    factor = side / max(image.size)
    size = (max(1, round(image.width * factor)), max(1, round(image.height * factor)))
    return image.resize(size, Image.Resampling.LANCZOS if factor < 1 else Image.Resampling.NEAREST)


def _enlarge(image: Image.Image) -> Image.Image:
    factor = max(1, -(-MIN_SIDE // max(image.size)))
    size = (image.width * factor, image.height * factor)
    return image if factor == 1 else image.resize(size, Image.Resampling.NEAREST)


def _draw_outline(overlay: Image.Image, mask: Tensor, factor: float, rgb: Colour) -> None:
    """Draw a line along the border of a mask, in a lighter colour, which separates objects of one class."""
    size = overlay.size
    filled = Image.fromarray((mask.cpu().numpy() > 0).astype(np.uint8) * 255)
    padded = np.pad(np.asarray(filled.resize(size, Image.Resampling.NEAREST)) > 0, 1)
    inner = padded[:-2, 1:-1] & padded[2:, 1:-1] & padded[1:-1, :-2] & padded[1:-1, 2:]
    edge = padded[1:-1, 1:-1] & ~inner
    light = tuple((value + 2 * 255) // 3 for value in rgb)
    overlay.paste(light, (0, 0, *size), Image.fromarray(edge.astype(np.uint8) * 255))


def _object_text(objects: Objects, i: int, classes: Sequence[str]) -> str:
    label = int(objects.labels[i])
    text = classes[label] if 0 <= label < len(classes) else str(label)
    return text if objects.scores is None else f"{text} {100 * float(objects.scores[i]):.0f}"


def _text_size(text: str, font: ImageFont.ImageFont) -> tuple[int, int]:
    _, _, width, height = font.getbbox(text)
    return math.ceil(width) + 8, math.ceil(height) + 5


def _draw_label(
    draw: ImageDraw.ImageDraw, text: str, place: Rectangle, box: Rectangle, rgb: Colour, font: ImageFont.ImageFont
) -> None:
    """Draw a label; a line connects it with its box if they do not touch."""
    left, top, right, bottom = place
    if not _overlap((left - 2, top - 2, right + 2, bottom + 2), box):
        x, y = (max(box[0], min((left + right) / 2, box[2])), max(box[1], min((top + bottom) / 2, box[3])))
        draw.line(((left + right) / 2, (top + bottom) / 2, x, y), fill=rgb, width=2)
    draw.rectangle((left, top, right - 2, bottom - 2), fill=rgb)  # a gap to its neighbours
    dark = 0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] < 150
    draw.text((left + 4, top + 1), text, PAPER if dark else INK, font)


def _overlap(a: Rectangle, b: Rectangle) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def _add_legend(image: Image.Image, entries: list[tuple[str, str, Colour]]) -> Image.Image:
    """Add a legend at the right; classes that do not fit into the height are counted."""
    size = max(13, min(24, round(min(image.size) / 36)))
    font, row = _font(size, [name for name, _, _ in entries]), round(size * 1.7)
    room = max(4, (image.height - row // 2) // row)
    if len(entries) > room:
        hidden = len(entries) - room + 1
        entries = [*entries[: room - 1], (f"{hidden} more", "", PAPER)]
    measure = ImageDraw.Draw(image)
    names = max(measure.textlength(name, font) for name, _, _ in entries) if entries else 0
    numbers = measure.textlength("100 %", font)
    width = round(row + names + row + numbers + row / 2) + row // 2
    height = max(image.height, row * len(entries) + row // 2)
    whole = Image.new("RGB", (image.width + width, height), PAPER)
    whole.paste(image, (0, 0))
    draw = ImageDraw.Draw(whole)
    left, top = image.width + row // 2, row // 4
    for name, area, rgb in entries:
        draw.rectangle((left, top + row // 6, left + size, top + row // 6 + size), fill=rgb)
        draw.text((left + row, top + row // 8), name, INK, font)
        draw.text((whole.width - row // 2, top + row // 8), area, GREY, font, anchor="ra")
        top += row
    return whole


def _percent(fraction: float) -> str:
    return "< 1 %" if fraction < 0.005 else f"{100 * fraction:.0f} %"


def _font(size: int, texts: Iterable[str]) -> ImageFont.ImageFont:
    """A font with most of the characters: Pillow's own, which has little beyond ASCII, or one that is installed."""
    characters = {character for text in texts for character in text if character.isprintable()}
    if all(_has_glyph(None, character) for character in characters):
        return _load_font(None, size)
    return _load_font(max(_font_files(), key=lambda file: sum(_has_glyph(file, c) for c in characters)), size)


@cache
def _font_files() -> list[str | None]:
    """Fonts that can be loaded: Pillow's (None), DejaVu Sans, which matplotlib brings, and some with more scripts."""
    files: list[str | None] = [None]
    matplotlib = find_spec("matplotlib")
    folders = list(matplotlib.submodule_search_locations or ()) if matplotlib else []
    for file in (*(f"{folder}/mpl-data/fonts/ttf/DejaVuSans.ttf" for folder in folders), *FONTS):
        with contextlib.suppress(OSError):  # not installed
            _load_font(file, 16)
            files.append(file)
    return files


@cache
def _load_font(file: str | None, size: int) -> ImageFont.ImageFont:
    font = ImageFont.load_default(size) if file is None else ImageFont.truetype(file, size)
    return font  # type: ignore[return-value]


@cache
def _has_glyph(file: str | None, character: str) -> bool:
    """Whether a font draws a character otherwise than one that no font has."""
    font = _load_font(file, 16)
    drawn, missing = (font.getmask(text) for text in (character, "\U0010ffff"))
    return (drawn.size, bytes(drawn)) != (missing.size, bytes(missing))
