"""Folders of pictures with a class for each pixel, in the layouts of VOC, ADE20K and those that take after them.

Pictures and masks lie in two folders (JPEGImages and SegmentationClass; images and annotations or masks; img_dir and
ann_dir) and belong together by name. What is for training and validation is told by folders in them (training,
validation), by lists (ImageSets/Segmentation/train.txt, or train.txt) or, where nothing tells, a fifth is held out.

The names of the classes stand in classes.json or classes.txt, or in ADE20K's objectInfo150.txt; VOC's are known. Masks
are PNG files whose values are classes; a palette is only for looking at.

Options of a source (`masks:PATH?zero=ignore&classes=150`):

- `zero`: 0 counts for nothing, and the classes start at 1 (`ignore`), or 0 is a class (`class`). By default `ignore`
  where objectInfo150.txt lies in the folder, since ADE20K is made so, and `class` elsewhere. 255 never counts.
- `classes`: how many there are, where no file names them.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tokamix.data.annotated.datasets import AnnotatedDataset, AnnotatedImage, check_options, held_out
from tokamix.data.decode import EXTENSIONS, DataError, scene_picture
from tokamix.tasks import IGNORE_INDEX

OPTIONS: dict[str, tuple[str, ...]] = {"zero": ("ignore", "class"), "classes": ()}
PICTURES = ("JPEGImages", "images", "img_dir", "imgs")
MASKS = ("SegmentationClass", "annotations", "masks", "ann_dir", "labels")
PARTS = {"train": ("train", "training"), "val": ("val", "validation", "valid", "test")}
ADE_NAMES = "objectInfo150.txt"
VOC = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)


def open_masks(path: str, options: dict[str, str]) -> tuple[AnnotatedDataset, AnnotatedDataset]:
    """What is for training, and what for validation."""
    check_options(f"masks:{path}", options, OPTIONS)
    given = Path(path).expanduser()
    roots = [given, given / "VOC2012", given / "VOCdevkit" / "VOC2012"]
    root = next((r for r in roots if _folder(r, PICTURES) and _folder(r, MASKS)), None)
    if root is None:
        raise DataError(
            f"{given} has no folders for pictures ({', '.join(PICTURES)}) and masks ({', '.join(MASKS)})"
            if given.is_dir()
            else f"there is no folder {given}"
        )
    ignore_zero = options.get("zero", "ignore" if (root / ADE_NAMES).is_file() else "class") == "ignore"
    classes = _classes(root, options.get("classes"))
    train, val = (MaskFolder(pictures, masks, classes, ignore_zero) for pictures, masks in _pairs(root))
    return train, val


def _folder(root: Path, names: Sequence[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def _classes(root: Path, count: str | None) -> tuple[str, ...]:
    """The names of the classes."""
    if count is not None:
        if not count.isdigit() or not 0 < int(count) <= IGNORE_INDEX:
            raise DataError(f"masks:{root}: classes is {count!r}, but must be a number from 1 to {IGNORE_INDEX}")
        return tuple(map(str, range(int(count))))
    if (file := root / "classes.json").is_file():
        try:
            content = json.loads(file.read_text())
            names = content["classes"] if isinstance(content, dict) else content
            return tuple(map(str, names))
        except (ValueError, KeyError, TypeError):
            raise DataError(f"{file} is no list of names, nor {{'classes': [names]}}") from None
    if (file := root / "classes.txt").is_file():
        return tuple(line.strip() for line in file.read_text().splitlines() if line.strip())
    if (file := root / ADE_NAMES).is_file():
        rows = [line.split("\t") for line in file.read_text().splitlines()[1:] if line.strip()]
        return tuple(row[-1].split(",")[0].strip() for row in rows)
    if (root / "JPEGImages").is_dir() and (root / "SegmentationClass").is_dir():
        return VOC
    raise DataError(
        f"nothing in {root} names the classes; write classes.txt with a name in each line, or masks:{root}?classes=150"
    )


def _pairs(root: Path) -> list[tuple[list[Path], list[Path]]]:
    """Pictures and masks for training, and for validation."""
    pictures, masks = _folder(root, PICTURES), _folder(root, MASKS)
    assert pictures is not None
    assert masks is not None
    found = []
    for part, names in PARTS.items():
        parts = _folder(pictures, names), _folder(masks, names)
        lists = [root / "ImageSets/Segmentation" / f"{part}.txt", root / f"{part}.txt"]
        listed = next((file for file in lists if file.is_file()), None)
        if all(parts):
            found.append(_matched(*parts))  # type: ignore[arg-type]
        elif listed:
            found.append(_matched(pictures, masks, listed))
    if len(found) == 1:
        raise DataError(f"{root} tells either what is for training or what is for validation; it must tell both")
    if found:
        return found
    files, targets = _matched(pictures, masks)
    return [([files[i] for i in part], [targets[i] for i in part]) for part in held_out(len(files), root)]


def _matched(pictures: Path, masks: Path, listed: Path | None = None) -> tuple[list[Path], list[Path]]:
    """Pictures and their masks, by name: those of a list, or all."""
    there = [_by_name(folder) for folder in (pictures, masks)]
    names = sorted(there[0])
    if listed:
        names = [line.split()[0] for line in listed.read_text().splitlines() if line.strip()]
        if missing := [name for name in names if name not in there[0]]:
            raise DataError(
                f"{listed} lists {missing[0]}, but {pictures} has no such picture ({len(missing)} are missing)"
            )
    if not names:
        raise DataError(f"{listed or pictures} has no pictures")
    if missing := [name for name in names if name not in there[1]]:
        raise DataError(f"{there[0][missing[0]]} has no mask in {masks} ({len(missing)} of {len(names)} have none)")
    return [there[0][name] for name in names], [there[1][name] for name in names]


def _by_name(folder: Path) -> dict[str, Path]:
    files = [folder / name for name in os.listdir(folder) if name.lower().endswith(EXTENSIONS) and name[0] != "."]
    return {file.stem: file for file in files}


class MaskFolder(AnnotatedDataset):
    """Pictures, each with a class for each pixel."""

    has_masks = False

    def __init__(self, files: Sequence[Path], masks: Sequence[Path], classes: Sequence[str], ignore_zero: bool) -> None:
        # arrays, since a list of many objects would be copied into each worker, touch by touch
        self.files, self.masks = (np.array([os.fsencode(f) for f in part], dtype=np.bytes_) for part in (files, masks))
        self.classes, self.ignore_zero = tuple(classes), ignore_zero
        self.category_ids = tuple(range(int(ignore_zero), len(classes) + int(ignore_zero)))

    def __len__(self) -> int:
        return len(self.files)

    def has_things(self) -> bool:
        """There are none, only classes of pixels."""
        return False

    def name_of(self, i: int) -> str:
        """The picture's path."""
        return os.fsdecode(self.files[i])

    def scene(self, i: int, masks: bool = True) -> AnnotatedImage:
        """Scene i, decoded; it has no things, only classes of pixels."""
        mask = os.fsdecode(self.masks[i])
        classes = self._read(mask)
        return AnnotatedImage(
            image=scene_picture(Path(self.name_of(i)), (classes.shape[0], classes.shape[1]), f"its mask {mask} is"),
            boxes=torch.zeros(0, 4),
            labels=torch.zeros(0, dtype=torch.int64),
            masks=None,
            crowd=torch.zeros(0, dtype=torch.bool),
            segmentation=classes,
            image_id=i,
            name=self.name_of(i),
        )

    def _read(self, path: str) -> Tensor:
        """Classes of pixels (H, W), from 0."""
        try:
            with Image.open(path) as image:
                values = np.array(image)
                mode = image.mode
        except FileNotFoundError:
            raise DataError(f"{path} does not exist any more") from None
        except Exception as error:  # decoders raise nearly anything on corrupt input
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise DataError(f"{path} is no mask that can be read: {reason}") from None
        if values.ndim != 2:
            raise DataError(
                f"{path} is a picture of {values.shape[2]} channels ({mode}), but a mask has one class a pixel"
            )
        first, last = int(self.ignore_zero), len(self.classes) - 1 + int(self.ignore_zero)
        wrong = (values > last) & (values != IGNORE_INDEX)
        if wrong.any():
            raise DataError(
                f"{path} has the value {values[wrong][0]}, but the {len(self.classes)} classes are {first} to {last}"
                f" ({IGNORE_INDEX} is ignored)"
            )
        classes = torch.from_numpy(values.astype(np.uint8, copy=False))
        if self.ignore_zero:  # 0 becomes 255, which 255 - 1 must not leave
            classes = torch.where(classes == IGNORE_INDEX, classes, classes - 1)
        return classes

    def coco_dict(self) -> dict[str, Any]:
        """There are no things in it."""
        raise DataError(f"{self.name_of(0)} and the others have classes of pixels, but no things")
