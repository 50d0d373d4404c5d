"""Generated scenes with everything that a task may ask for: class, boxes and masks. No file is needed."""

import math
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokamix.data.annotated.datasets import AnnotatedDataset, AnnotatedImage, classes_of_pixels
from tokamix.data.decode import DataError
from tokamix.data.images.datasets import ImageDataset
from tokamix.data.rng import key

CLASSES = ("circle", "square", "triangle", "cross", "ring", "star", "crescent", "bar")
SMALL = 2  # at most so many small things besides the large one
SCENES = {"train": 512, "val": 128}
SCENE_LARGE = 3  # large things of a scene to detect or segment, at most
TRIES = 20  # to find a place for a further large thing


class Shapes(ImageDataset):
    """Flat shapes, turned and coloured at random, over a shaded and noisy ground; one is large, the others distract.

    AnnotatedImage i is a function of (seed, part, i) alone.

    Args:
        count: scenes.
        side: of the images in pixels.
        seed: of everything.
        part: of the data set; parts have nothing in common.
        large: at most so many large things, side by side; further ones change nothing else of a scene.
    """

    def __init__(self, count: int, side: int = 64, seed: int = 0, part: str = "train", large: int = 1) -> None:
        self.side, self.seed, self.part, self.large = side, seed, part, large
        # every class comes equally often, and the class of a scene is known without drawing it
        shuffled = np.random.default_rng(key("shapes", seed, part)).permutation(count)
        super().__init__(shuffled % len(CLASSES), CLASSES)

    def scene(self, i: int) -> AnnotatedImage:
        """Scene i with its boxes and masks."""
        draw = np.random.default_rng(key("shapes", self.seed, self.part, i))
        label, side = int(self.labels[i]), self.side
        x, y = np.meshgrid(*[(np.arange(side) + 0.5) / side] * 2)
        slope = draw.uniform(-60, 60, (3, 2))
        ground = draw.uniform(40, 215, 3)
        image = ground[:, None, None] + slope[:, :1, None] * (x - 0.5) + slope[:, 1:, None] * (y - 0.5)
        kinds = [(int(draw.integers(len(CLASSES))), draw.uniform(0.06, 0.1)) for _ in range(draw.integers(SMALL + 1))]
        kinds.append((label, draw.uniform(0.2, 0.32)))
        things = [_placed(kind, radius, ground, draw) for kind, radius in kinds]
        things[-1:] = [*self._further(i, things[-1], ground), things[-1]]  # the last one is in front, never hidden
        owner = np.full((side, side), -1)
        for n, thing in enumerate(things):
            (left, top), angle, radius = thing["centre"], thing["angle"], thing["radius"]
            u = ((x - left) * math.cos(angle) + (y - top) * math.sin(angle)) / radius
            v = ((y - top) * math.cos(angle) - (x - left) * math.sin(angle)) / radius
            inside = _inside(CLASSES[thing["kind"]], u, v)
            owner[inside] = n
            image[:, inside] = thing["colour"][:, None]
        image += draw.normal(0, 8, image.shape)
        masks = owner == np.arange(len(things))[:, None, None]
        seen = masks.any((1, 2))  # something small may lie behind the large one
        masks = masks[seen]
        scene = AnnotatedImage(
            image=torch.from_numpy(image.clip(0, 255).round().astype(np.uint8)),
            boxes=torch.tensor([_box(mask) for mask in masks], dtype=torch.float32),
            labels=torch.tensor([thing["kind"] for thing in things])[torch.from_numpy(seen)],
            masks=torch.from_numpy(masks),
            crowd=torch.zeros(len(masks), dtype=torch.bool),
            segmentation=None,
            image_id=i,
            name=f"scene {i}",
        )
        scene.segmentation = classes_of_pixels(scene)
        return scene

    def _further(self, i: int, first: dict[str, Any], ground: np.ndarray) -> list[dict[str, Any]]:
        """More large things, where there is room for them."""
        draw = np.random.default_rng(key("shapes", self.seed, self.part, i, "further"))
        things = [first]
        for _ in range(draw.integers(self.large)):
            for _ in range(TRIES):
                thing = _placed(int(draw.integers(len(CLASSES))), draw.uniform(0.12, 0.24), ground, draw)
                if all(math.dist(t["centre"], thing["centre"]) > t["radius"] + thing["radius"] for t in things):
                    things.append(thing)
                    break
        return things[1:]

    def picture(self, i: int, at_least: int | None = None) -> Tensor:
        """The image of scene i."""
        return self.scene(i).image

    def arrays(self) -> tuple[Tensor, Tensor]:
        """All images; drawn once."""
        return self._images, self.labels

    @cached_property
    def _images(self) -> Tensor:
        return torch.stack([self.picture(i) for i in range(len(self))])


class ShapeScenes(AnnotatedDataset):
    """Shapes for a dense task: the classes of things, or background and those; drawn once."""

    def __init__(self, shapes: Shapes, task: str) -> None:
        self.shapes = shapes
        self.classes = CLASSES if task == "detect" else ("background", *CLASSES)
        self.category_ids = tuple(range(1, 1 + len(self.classes)))
        self.drawn: dict[int, AnnotatedImage] = {}

    def __len__(self) -> int:
        return len(self.shapes)

    def scene(self, i: int, masks: bool = True) -> AnnotatedImage:
        """Scene i."""
        if i not in self.drawn:
            self.drawn[i] = self.shapes.scene(i)
        return self.drawn[i]

    def name_of(self, i: int) -> str:
        """Its number."""
        return f"scene {i}"


def open_shapes(size: str, task: str, seed: int) -> tuple[AnnotatedDataset, AnnotatedDataset]:
    """Scenes for training and for validation, of the size that stands in a source's name."""
    side = check_side(size, default=128)
    train, val = (Shapes(count, side, seed, f"{part} scenes", SCENE_LARGE) for part, count in SCENES.items())
    return ShapeScenes(train, task), ShapeScenes(val, task)


def check_side(size: str, default: int) -> int:
    """The side in pixels that stands in a source's name."""
    side = int(size) if size.isdigit() else 0 if size else default
    if side < 16:
        raise DataError(f"shapes:{size} is no size; write shapes:{default}, with at least 16 px")
    return side


def _placed(kind: int, radius: float, ground: np.ndarray, draw: np.random.Generator) -> dict[str, Any]:
    """A thing somewhere in the scene, turned somehow, in a colour unlike the ground's."""
    thing: dict[str, Any] = {"kind": kind, "radius": radius}
    thing["centre"] = draw.uniform(radius, 1 - radius, 2)
    thing["angle"] = draw.uniform(0, 2 * math.pi)
    thing["colour"] = ground + np.where(ground > 127, -1, 1) * draw.uniform(60, 120, 3) * draw.permutation([1, 1, 0.3])
    return thing


def _box(mask: np.ndarray) -> list[int]:
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]


def _inside(kind: str, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Which points belong to a shape of radius 1 around the origin."""
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
