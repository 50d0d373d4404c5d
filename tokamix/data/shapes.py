"""Generated images of shapes with class, boxes and masks; no files are needed."""

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokamix.data.annotated.datasets import AnnotatedDataset, AnnotatedImage, semantic_mask
from tokamix.data.decode import DataError
from tokamix.data.images.datasets import ImageDataset
from tokamix.data.rng import key

CLASSES = ("circle", "square", "triangle", "cross", "ring", "star", "crescent", "bar")
MAX_SMALL = 2  # small shapes beside the large one
COUNTS = {"train": 512, "val": 128}  # images for detection and segmentation ...
MAX_LARGE = 3  # ... and their large shapes
TRIES = 20  # to place one more large shape


class Shapes(ImageDataset):
    """Flat shapes, rotated and coloured at random, over a shaded and noisy background.

    The label is the class of the large shape in front; small shapes distract. Image i is a function of (seed, part, i)
    alone.

    Args:
        count: number of images.
        side: of the images in pixels.
        seed: of all images.
        part: name of the split; splits have no images in common.
        large: largest number of large shapes, side by side; further ones change nothing else of an image.
    """

    def __init__(self, count: int, side: int = 64, seed: int = 0, part: str = "train", large: int = 1) -> None:
        self.side, self.seed, self.part, self.large = side, seed, part, large
        # classes are balanced, and labels are known without drawing
        shuffled = np.random.default_rng(key("shapes", seed, part)).permutation(count)
        super().__init__(shuffled % len(CLASSES), CLASSES)

    def sample(self, i: int) -> AnnotatedImage:
        """Draw image i with its boxes and masks."""
        rng = np.random.default_rng(key("shapes", self.seed, self.part, i))
        label, side = int(self.labels[i]), self.side
        x, y = np.meshgrid(*[(np.arange(side) + 0.5) / side] * 2)
        slope = rng.uniform(-60, 60, (3, 2))
        background = rng.uniform(40, 215, 3)
        image = background[:, None, None] + slope[:, :1, None] * (x - 0.5) + slope[:, 1:, None] * (y - 0.5)
        kinds = [(int(rng.integers(len(CLASSES))), rng.uniform(0.06, 0.1)) for _ in range(rng.integers(MAX_SMALL + 1))]
        kinds.append((label, rng.uniform(0.2, 0.32)))
        shapes = [_place(kind, radius, background, rng) for kind, radius in kinds]
        shapes[-1:] = [*self._more_large(i, shapes[-1], background), shapes[-1]]  # the last is in front, never hidden
        owner = np.full((side, side), -1)
        for n, shape in enumerate(shapes):
            (left, top), angle, radius = shape["centre"], shape["angle"], shape["radius"]
            u = ((x - left) * math.cos(angle) + (y - top) * math.sin(angle)) / radius
            v = ((y - top) * math.cos(angle) - (x - left) * math.sin(angle)) / radius
            inside = _inside(CLASSES[shape["kind"]], u, v)
            owner[inside] = n
            image[:, inside] = shape["colour"][:, None]
        image += rng.normal(0, 8, image.shape)
        masks = owner == np.arange(len(shapes))[:, None, None]
        visible = masks.any((1, 2))  # a small shape may be hidden
        masks = masks[visible]
        sample = AnnotatedImage(
            image=torch.from_numpy(image.clip(0, 255).round().astype(np.uint8)),
            boxes=torch.tensor([_box(mask) for mask in masks], dtype=torch.float32),
            labels=torch.tensor([shape["kind"] for shape in shapes])[torch.from_numpy(visible)],
            masks=torch.from_numpy(masks),
            crowd=torch.zeros(len(masks), dtype=torch.bool),
            segmentation=None,
            image_id=i,
            name=self.name_of(i),
        )
        sample.segmentation = semantic_mask(sample)
        return sample

    def _more_large(self, i: int, first: dict[str, Any], background: np.ndarray) -> list[dict[str, Any]]:
        """Further large shapes, where there is room for them."""
        rng = np.random.default_rng(key("shapes", self.seed, self.part, i, "further"))
        shapes = [first]
        for _ in range(rng.integers(self.large)):
            for _ in range(TRIES):
                shape = _place(int(rng.integers(len(CLASSES))), rng.uniform(0.12, 0.24), background, rng)
                if all(math.dist(s["centre"], shape["centre"]) > s["radius"] + shape["radius"] for s in shapes):
                    shapes.append(shape)
                    break
        return shapes[1:]

    def image(self, i: int, min_size: int | None = None) -> Tensor:
        """Draw image i."""
        return self.sample(i).image

    def arrays(self) -> tuple[Tensor, Tensor]:
        """All images, drawn once."""
        return self._images, self.labels

    @cached_property
    def _images(self) -> Tensor:
        return torch.stack([self.image(i) for i in range(len(self))])


class AnnotatedShapes(AnnotatedDataset):
    """Shapes for segmentation or detection, drawn once."""

    def __init__(self, shapes: Shapes, task: str) -> None:
        self.shapes = shapes
        self.classes = CLASSES if task == "detect" else ("background", *CLASSES)
        self.category_ids = tuple(range(1, 1 + len(self.classes)))
        self.drawn: dict[int, AnnotatedImage] = {}

    def __len__(self) -> int:
        return len(self.shapes)

    def sample(self, i: int, masks: bool = True) -> AnnotatedImage:
        """Sample i; its masks are always included."""
        if i not in self.drawn:
            self.drawn[i] = self.shapes.sample(i)
        return self.drawn[i]

    def name_of(self, i: int) -> str:
        """Number of the image."""
        return self.shapes.name_of(i)


def open_shapes(size: str, task: str, seed: int) -> tuple[AnnotatedDataset, AnnotatedDataset]:
    """Open the splits of `shapes:SIZE` for segmentation or detection."""
    side = check_side(size, default=128)
    train, val = (Shapes(count, side, seed, f"{part} scenes", MAX_LARGE) for part, count in COUNTS.items())
    return AnnotatedShapes(train, task), AnnotatedShapes(val, task)


def check_side(size: str, default: int) -> int:
    """The side in pixels of `shapes:SIZE`."""
    side = int(size) if size.isdigit() else 0 if size else default
    if side < 16:
        raise DataError(f"shapes:{size} has no valid size; use a side of at least 16 px, such as shapes:{default}")
    return side


def _place(kind: int, radius: float, background: np.ndarray, rng: np.random.Generator) -> dict[str, Any]:
    """A shape at a random position and angle, in a colour unlike the background."""
    shape: dict[str, Any] = {"kind": kind, "radius": radius}
    shape["centre"] = rng.uniform(radius, 1 - radius, 2)
    shape["angle"] = rng.uniform(0, 2 * math.pi)
    contrast = np.where(background > 127, -1, 1) * rng.uniform(60, 120, 3) * rng.permutation([1, 1, 0.3])
    return shape | {"colour": background + contrast}


def _box(mask: np.ndarray) -> list[int]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


def _inside(kind: str, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Which points are inside a shape of radius 1 around the origin."""
    r = np.hypot(u, v)
    match kind:
        case "circle":
            return r <= 0.85
        case "square":
            return np.maximum(abs(u), abs(v)) <= 0.7
        case "triangle":
            return (v >= -0.5) & (v + math.sqrt(3) * abs(u) <= 1)
        case "cross":
            return (np.minimum(abs(u), abs(v)) <= 0.28) & (np.maximum(abs(u), abs(v)) <= 0.95)
        case "ring":
            return (r <= 0.95) & (r >= 0.55)
        case "star":
            turn = np.mod(np.arctan2(u, v), 2 * math.pi / 5) - math.pi / 5
            inner, outer = 0.42, 1.0  # of the five dents and the five points, joined by straight lines
            a, b = outer * math.sin(math.pi / 5), outer * math.cos(math.pi / 5) - inner
            return r * (np.cos(turn) * a + abs(np.sin(turn)) * -b) <= inner * a
        case "crescent":
            return (r <= 0.95) & (np.hypot(u - 0.45, v) > 0.75)
        case "bar":
            return (abs(u) <= 0.95) & (abs(v) <= 0.25)
    raise ValueError(f"there is no shape {kind}")
