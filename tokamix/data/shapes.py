"""Generated scenes with everything that a task may ask for: class, boxes and masks. No file is needed."""

import math
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from tokamix.data.keyed import key
from tokamix.data.sets import Dataset

CLASSES = ("circle", "square", "triangle", "cross", "ring", "star", "crescent", "bar")
SMALL = 2  # at most so many small things besides the large one


class Scene(NamedTuple):
    """One scene; `label` is the class of its largest thing."""

    image: Tensor  # (3, H, W) uint8
    label: int
    boxes: Tensor  # (n, 4) left, top, right, bottom in pixels, around what is visible
    labels: Tensor  # (n,)
    masks: Tensor  # (n, H, W) bool, what is visible of each

    @property
    def segmentation(self) -> Tensor:
        """Classes of pixels (H, W): 0 is background, 1 + class elsewhere."""
        return (self.masks * (1 + self.labels)[:, None, None]).sum(0)


class Shapes(Dataset):
    """Flat shapes, turned and coloured at random, over a shaded and noisy ground; one is large, the others distract.

    Scene i is a function of (seed, part, i) alone.
    """

    def __init__(self, count: int, side: int = 64, seed: int = 0, part: str = "train") -> None:
        self.side, self.seed, self.part = side, seed, part
        # every class comes equally often, and the class of a scene is known without drawing it
        shuffled = np.random.default_rng(key("shapes", seed, part)).permutation(count)
        super().__init__(shuffled % len(CLASSES), CLASSES)

    def scene(self, i: int) -> Scene:
        """Scene i with its boxes and masks."""
        draw = np.random.default_rng(key("shapes", self.seed, self.part, i))
        label, side = int(self.labels[i]), self.side
        x, y = np.meshgrid(*[(np.arange(side) + 0.5) / side] * 2)
        slope = draw.uniform(-60, 60, (3, 2))
        ground = draw.uniform(40, 215, 3)
        image = ground[:, None, None] + slope[:, :1, None] * (x - 0.5) + slope[:, 1:, None] * (y - 0.5)
        things = [(int(draw.integers(len(CLASSES))), draw.uniform(0.06, 0.1)) for _ in range(draw.integers(SMALL + 1))]
        things.append((label, draw.uniform(0.2, 0.32)))  # the last one is in front, never hidden
        owner = np.full((side, side), -1)
        for n, (kind, radius) in enumerate(things):
            centre = draw.uniform(radius, 1 - radius, 2)
            angle = draw.uniform(0, 2 * math.pi)
            u = ((x - centre[0]) * math.cos(angle) + (y - centre[1]) * math.sin(angle)) / radius
            v = ((y - centre[1]) * math.cos(angle) - (x - centre[0]) * math.sin(angle)) / radius
            colour = ground + np.where(ground > 127, -1, 1) * draw.uniform(60, 120, 3) * draw.permutation([1, 1, 0.3])
            inside = _inside(CLASSES[kind], u, v)
            owner[inside] = n
            image[:, inside] = colour[:, None]
        image += draw.normal(0, 8, image.shape)
        masks = owner == np.arange(len(things))[:, None, None]
        seen = masks.any((1, 2))  # something small may lie behind the large one
        masks = masks[seen]
        return Scene(
            torch.from_numpy(image.clip(0, 255).round().astype(np.uint8)),
            label,
            torch.tensor([_box(mask) for mask in masks], dtype=torch.float32),
            torch.tensor([kind for kind, _ in things])[torch.from_numpy(seen)],
            torch.from_numpy(masks),
        )

    def picture(self, i: int, at_least: int | None = None) -> Tensor:
        """The image of scene i."""
        return self.scene(i).image

    def arrays(self) -> tuple[Tensor, Tensor]:
        """All images; drawn once."""
        return self._images, self.labels

    @cached_property
    def _images(self) -> Tensor:
        return torch.stack([self.picture(i) for i in range(len(self))])


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
