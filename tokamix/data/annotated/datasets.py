"""Images with annotations, for segmentation and detection; `open_annotated` opens every source."""

import difflib
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from tokamix.data.decode import DataError
from tokamix.data.rng import generator
from tokamix.data.splits import DatasetSplits
from tokamix.tasks import IGNORE_INDEX

HELD_OUT = 0.2  # where nothing says what is for validation
Task = Literal["segment", "detect"]


@dataclass
class AnnotatedImage:
    """One picture with its things and, for segmentation, the class of each pixel."""

    image: Tensor  # (3, H, W) uint8
    boxes: Tensor  # (n, 4) float32: left, top, right, bottom in pixels
    labels: Tensor  # (n,) int64, from 0
    masks: Tensor | None  # (n, H, W) bool
    crowd: Tensor  # (n,) bool: many things of the class in one, which are not told apart
    segmentation: Tensor | None  # (H, W) uint8; 255: counts for nothing
    image_id: int
    name: str

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image.shape[-2], self.image.shape[-1]

    @property
    def label(self) -> int:
        """The class of its largest thing."""
        if not len(self.labels):
            raise ValueError(f"{self.name} has nothing in it")
        sides = self.boxes[:, 2:] - self.boxes[:, :2]
        return int(self.labels[(sides.prod(1) if self.masks is None else self.masks.sum((1, 2))).argmax()])


class AnnotatedDataset(ABC):
    """Scenes with random access; `classes` are those of things, or those of pixels, as the task asks."""

    classes: tuple[str, ...]
    category_ids: tuple[int, ...]  # what each class is called in COCO's files
    has_masks: bool = True

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def scene(self, i: int, masks: bool = True) -> AnnotatedImage:
        """Scene i, decoded; the masks of its things may be left out, which saves time."""

    @abstractmethod
    def name_of(self, i: int) -> str:
        """What to call scene i in messages."""

    def image_id(self, i: int) -> int:
        """What scene i is called in COCO's files."""
        return i

    def has_things(self) -> bool:
        """Whether there is anything to find; crowds do not count."""
        return True

    def coco_dict(self) -> dict[str, Any]:
        """All things in the form of COCO's annotation files, for the reference tools."""
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for i in range(len(self)):
            scene = self.scene(i)
            height, width = scene.size
            images.append({"id": scene.image_id, "file_name": scene.name, "height": height, "width": width})
            for n, (left, top, right, bottom) in enumerate(scene.boxes.tolist()):
                area = (right - left) * (bottom - top)
                thing: dict[str, Any] = {"bbox": [left, top, right - left, bottom - top]}
                if scene.masks is not None:
                    thing["segmentation"] = rle(scene.masks[n])
                    area = int(scene.masks[n].sum())
                thing |= {"id": len(annotations) + 1, "image_id": scene.image_id, "area": area}
                thing |= {"category_id": self.category_ids[scene.labels[n]], "iscrowd": int(scene.crowd[n])}
                annotations.append(thing)
        categories = [{"id": n, "name": name} for n, name in zip(self.category_ids, self.classes, strict=True)]
        return {"images": images, "annotations": annotations, "categories": categories}


def open_annotated(source: str, task: Task, seed: int = 0) -> DatasetSplits:
    """Open a data set for segmentation or detection, by name or path.

    - `shapes`, `shapes:256`: generated scenes of 128 (256) px.
    - `coco:PATH`: COCO's annotations: a folder with annotations/instances_train*.json and instances_val*.json, one
      .json file, of whose images a fifth is held out, or two, separated by a comma. The pictures are found beside it.
    - `masks:PATH`: pictures with a class for each pixel, as VOC, ADE20K and many others lay them out.
    - a folder or .json file alone: whichever of both it is.

    Options follow a question mark, joined by &: see `coco.py` and `mask_folder.py` beside this file.

    Args:
        source: see above.
        task: "segment" or "detect"; the things of COCO's files are drawn one over the other to serve the first.
        seed: of what `shapes` shows; what is held out does not depend on it.
    """
    train, val = _parts(source, task, seed)
    if task == "segment" and len(train.classes) > IGNORE_INDEX:
        raise DataError(f"{source} has {len(train.classes)} classes; a pixel has room for {IGNORE_INDEX}")
    return DatasetSplits(source, train, val, train.classes, task)


def _parts(source: str, task: Task, seed: int) -> tuple[AnnotatedDataset, AnnotatedDataset]:
    """What is for training, and what for validation."""
    kind, colon, rest = source.partition(":")
    if kind == "shapes":
        from tokamix.data.shapes import open_shapes

        return open_shapes(rest, task, seed)
    if not colon or kind not in ("coco", "masks"):
        kind, rest = _kind(source), source
    path, _, text = rest.partition("?")
    options = dict(part.partition("=")[::2] for part in text.split("&") if part)
    if kind == "coco":
        from tokamix.data.annotated.coco import open_coco

        return open_coco(path, task, options)
    if task == "detect":
        raise DataError(f"{source} has classes of pixels, but no things to detect; give it COCO's annotations")
    from tokamix.data.annotated.mask_folder import open_masks

    return open_masks(path, options)


def _kind(source: str) -> str:
    """Which of both a path is."""
    first = source.partition("?")[0].split(",")[0]
    path = Path(first).expanduser()
    if first.endswith(".json"):
        return "coco"
    if path.is_dir():
        return "coco" if any(path.glob("annotations/*.json")) or any(path.glob("*/_annotations.coco.json")) else "masks"
    near = difflib.get_close_matches(source.partition(":")[0], ["shapes", "coco:", "masks:"], n=1)
    hint = f"did you mean {near[0]}?" if near else "known are shapes, coco:PATH, masks:PATH, a folder and a .json file"
    raise DataError(f"there are no scenes {source!r}: it is neither a folder nor a known name; {hint}")


def check_options(source: str, options: dict[str, str], known: dict[str, tuple[str, ...]]) -> None:
    """Raise where an option is not known, or not its value; any value will do where none are listed."""
    for name, value in options.items():
        if name not in known:
            raise DataError(f"{source} has no option {name!r}; there are {', '.join(known)}")
        if known[name] and value not in known[name]:
            raise DataError(f"{source}: {name} is {value!r}, but must be {' or '.join(known[name])}")


def held_out(count: int, source: Path) -> tuple[list[int], list[int]]:
    """Which of so many scenes are for training, and which for validation: always the same."""
    if count < 2:
        raise DataError(f"{source} has one picture alone; nothing could be held out of it for validation")
    order = torch.randperm(count, generator=generator("split")).tolist()
    share = max(round(count * HELD_OUT), 1)
    return sorted(order[share:]), sorted(order[:share])


def rle(mask: Tensor) -> dict[str, Any]:
    """A mask (H, W) as COCO's run lengths, column by column; the first run is of zeros."""
    flat = mask.t().flatten().numpy()
    ends = np.append(np.flatnonzero(np.diff(flat)) + 1, flat.size)
    counts = np.diff(ends, prepend=0).tolist()
    return {"size": list(mask.shape), "counts": [0, *counts] if flat.size and flat[0] else counts}


def classes_of_pixels(scene: AnnotatedImage) -> Tensor:
    """Classes of pixels (H, W) from things: 0 is background, class + 1 elsewhere, and 255 in a crowd.

    Small things are drawn over large ones, and all of them over crowds, whose outlines are rough.
    """
    if scene.masks is None:
        raise DataError(f"{scene.name} has boxes, but no masks to segment by")
    drawn = torch.zeros(scene.size, dtype=torch.uint8)
    areas = scene.masks.sum((1, 2)).tolist()
    for n in sorted(range(len(areas)), key=lambda n: (not scene.crowd[n], -areas[n])):
        drawn[scene.masks[n]] = IGNORE_INDEX if scene.crowd[n] else int(scene.labels[n]) + 1
    return drawn
