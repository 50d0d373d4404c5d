"""Drawings: places and colours of masks, boxes and labels; contact sheets."""

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont

from tokamix.predict.draw import (
    Objects,
    captioned_sheet,
    class_colours,
    colour,
    draw_class_map,
    draw_objects,
    draw_segmentation,
    place_labels,
    shorten,
)

CLASSES = ("background", "cat", "dog")


def overlap(a: tuple, b: tuple) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def test_segmentation() -> None:
    """Classes have their colours, a background keeps the image's; small images are enlarged."""
    image = torch.full((3, 40, 60), 128, dtype=torch.uint8)
    class_map = torch.zeros(40, 60, dtype=torch.int64)
    class_map[10:30, 20:40], class_map[:5] = 2, 255
    overlay = draw_segmentation(image, class_map, CLASSES, legend=False)
    factor = overlay.width // 60
    assert overlay.size == (60 * factor, 40 * factor)
    assert overlay.width >= 480
    assert overlay.getpixel((5 * factor, 35 * factor)) == (128, 128, 128)
    expected = [round(0.65 * value + 0.35 * 128) for value in class_colours(CLASSES)[2]]
    assert list(overlay.getpixel((30 * factor, 20 * factor))) == pytest.approx(expected, abs=1)
    assert draw_segmentation(image, class_map, CLASSES).width > overlay.width  # the legend
    palette = draw_class_map(class_map, CLASSES)
    assert (palette.getpixel((30, 20)), palette.getpixel((30, 0))) == (2, 255)


def test_objects() -> None:
    """A box has the colour of its class, whatever its place in the list."""
    image = torch.full((3, 40, 60), 128, dtype=torch.uint8)
    mask = torch.zeros(1, 40, 60, dtype=torch.bool)
    mask[0, 10:30, 20:40] = True
    objects = Objects(torch.tensor([[20.0, 10, 40, 30]]), torch.tensor([1]), torch.tensor([0.75]), mask)
    overlay = draw_objects(image, objects, CLASSES)
    factor = overlay.width // 60
    assert overlay.getpixel((20 * factor, 20 * factor)) == colour(1)
    assert overlay.getpixel((5 * factor, 35 * factor)) == (128, 128, 128)
    both = Objects(torch.tensor([[2.0, 20, 12, 38], [20, 10, 40, 30]]), torch.tensor([2, 1]))
    overlay = draw_objects(image, both, CLASSES)
    assert overlay.getpixel((2 * factor, 36 * factor)) == colour(2)
    assert overlay.getpixel((20 * factor, 28 * factor)) == colour(1)
    nothing = Objects(torch.zeros(0, 4), torch.zeros(0, dtype=torch.int64), torch.zeros(0), mask[:0])
    assert draw_objects(image, nothing, CLASSES).getpixel((0, 0)) == (128, 128, 128)


def test_labels_do_not_cover_each_other() -> None:
    """Twelve objects nearly on top of each other, at all borders of the image."""
    for x, y in ((0, 0), (150, 100), (290, 190)):
        boxes = [(x + i, y + 2 * i, x + 20 + i, y + 20 + 2 * i) for i in range(12)]
        places = place_labels(boxes, [(60, 16)] * 12, (320, 240))
        assert None not in places
        for i, place in enumerate(places):
            assert 0 <= place[0] < place[2] <= 320
            assert 0 <= place[1] < place[3] <= 240
            assert not any(overlap(place, other) for other in places[:i])
    assert place_labels([(50, 50, 90, 90)], [(30, 10)], (320, 240)) == [(50, 40, 80, 50)]  # above its box
    crowded = place_labels([(0, 0, 9, 9)] * 9, [(40, 20)] * 9, (80, 40))
    assert sum(place is not None for place in crowded) == 4  # no more fit


def test_colours_differ() -> None:
    assert len({colour(i) for i in range(200)}) == 200
    first = torch.tensor([colour(i) for i in range(21)], dtype=torch.float32)
    assert torch.pdist(first).min() > 50
    assert class_colours(CLASSES)[0] == (0, 0, 0)


def test_class_map_of_many_classes() -> None:
    """More classes than a palette has give a 16-bit image."""
    class_map = torch.tensor([[0, 255, 256], [3, 365, 1]])
    image = draw_class_map(class_map, [str(i) for i in range(366)])
    assert image.mode == "I;16"
    assert np.array_equal(np.array(image), class_map.numpy())
    assert draw_class_map(class_map.clamp(max=254), [str(i) for i in range(255)]).mode == "P"


def test_captions_are_shortened() -> None:
    font = ImageFont.load_default(14)
    name = "a very long class name that differs only at its end: 17"
    short = shorten(name, 180, font)
    assert font.getlength(short) <= 180
    assert short.startswith("a very long")
    assert short.endswith(" 17")
    assert "…" in short
    assert shorten("cat", 180, font) == "cat"
    images = [Image.new("RGB", (20 + i, 30)) for i in range(7)]
    sheet = captioned_sheet(images, [[(name, (0, 0, 0))]] * 7, title="seven")
    assert sheet.width < 1600
    assert captioned_sheet([], [], title="none").width > 10


def test_names_beyond_ascii_are_drawn() -> None:
    """Not as boxes: words whose letters Pillow's own font lacks look different from each other."""
    pytest.importorskip("matplotlib")
    images = [Image.new("RGB", (40, 40), "white")]
    words = ("\u043a\u043e\u0442", "\u043f\u0451\u0441", "\u00fc\u00df\u00e9")
    sheets = [captioned_sheet(images, [[(word, (0, 0, 0))]]) for word in words]
    assert len({sheet.tobytes() for sheet in sheets}) == len(words)
    objects = Objects(torch.tensor([[8.0, 30, 50, 50]]), torch.tensor([0]))
    drawings = [draw_objects(torch.zeros(3, 64, 64, dtype=torch.uint8), objects, [word]) for word in words]
    assert len({drawing.tobytes() for drawing in drawings}) == len(words)
    maps = torch.zeros(64, 64, dtype=torch.uint8)
    overlays = [draw_segmentation(torch.zeros(3, 64, 64, dtype=torch.uint8), maps, [word]) for word in words]
    assert len({overlay.tobytes() for overlay in overlays}) == len(words)
