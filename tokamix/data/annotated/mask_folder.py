"""Folders of images with semantic masks, in the layouts of VOC, ADE20K and similar data sets.

Images and masks are in two folders (JPEGImages and SegmentationClass; images and annotations or masks; img_dir and
ann_dir) and are matched by name. Training and validation are separated by subfolders (training, validation) or by lists
(ImageSets/Segmentation/train.txt, or train.txt); otherwise a fifth is held out.

Class names are read from classes.json or classes.txt, or from ADE20K's objectInfo150.txt; VOC's are built in. Masks are
PNG files whose values are classes; palettes are ignored.

Options of a source (`masks:PATH?zero=ignore&classes=150`):

- `zero`: `ignore` (pixels of 0 are ignored, and classes start at 1) or `class` (0 is a class). Default: `ignore` if the
  folder has objectInfo150.txt, as for ADE20K, otherwise `class`. 255 is always ignored.
- `classes`: number of classes, if no file names them.
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

from tokamix.data.annotated.datasets import AnnotatedDataset, AnnotatedImage
from tokamix.data.annotated.sources import check_options
from tokamix.data.decode import EXTENSIONS, DataError, first_line, read_lines, read_oriented_image
from tokamix.data.splits import split_indices
from tokamix.tasks import IGNORE_INDEX

OPTIONS: dict[str, tuple[str, ...]] = {"zero": ("ignore", "class"), "classes": ()}
IMAGES = ("JPEGImages", "images", "img_dir", "imgs")
MASKS = ("SegmentationClass", "annotations", "masks", "ann_dir", "labels")
PARTS = {"train": ("train", "training"), "val": ("val", "validation", "valid", "test")}
ADE_NAMES = "objectInfo150.txt"
VOC = (
    *("background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)


def open_masks(path: str, options: dict[str, str]) -> tuple[AnnotatedDataset, AnnotatedDataset]:
    """Open the training and validation splits; see `open_annotated`."""
    check_options(f"masks:{path}", options, OPTIONS)
    folder = Path(path).expanduser()
    root = _find_root(folder)
    if root is None:
        raise DataError(
            f"{folder} has no folders of images ({', '.join(IMAGES)}) and masks ({', '.join(MASKS)})"
            if folder.is_dir()
            else f"the folder {folder} does not exist"
        )
    ignore_zero = options.get("zero", "ignore" if (root / ADE_NAMES).is_file() else "class") == "ignore"
    classes = _class_names(root, options.get("classes"))
    train, val = (MaskFolder(images, masks, classes, ignore_zero) for images, masks in _pairs(root))
    return train, val


def is_mask_folder(folder: Path) -> bool:
    """Whether a folder has images with masks."""
    root = _find_root(folder)
    masks = _folder(root, MASKS) if root else None
    return masks is not None and any(path.suffix.lower() in EXTENSIONS for path in masks.rglob("*"))


def _find_root(folder: Path) -> Path | None:
    roots = [folder, folder / "VOC2012", folder / "VOCdevkit" / "VOC2012"]
    return next((root for root in roots if _folder(root, IMAGES) and _folder(root, MASKS)), None)


def _folder(root: Path, names: Sequence[str]) -> Path | None:
    return next((root / name for name in names if (root / name).is_dir()), None)


def _class_names(root: Path, count: str | None) -> tuple[str, ...]:
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
            raise DataError(f"{file} is neither a list of names nor {{'classes': [names]}}") from None
    if (file := root / "classes.txt").is_file():
        return tuple(read_lines(file))
    if (file := root / ADE_NAMES).is_file():
        rows = [line.split("\t") for line in read_lines(file)[1:]]
        return tuple(row[-1].split(",")[0].strip() for row in rows)
    if (root / "JPEGImages").is_dir() and (root / "SegmentationClass").is_dir():
        return VOC
    raise DataError(
        f"{root} has no class names; write classes.txt with one name per line, or use masks:{root}?classes=150"
    )


def _pairs(root: Path) -> list[tuple[list[Path], list[Path]]]:
    """Images and masks for training and for validation."""
    images, masks = _folder(root, IMAGES), _folder(root, MASKS)
    assert images is not None
    assert masks is not None
    splits = []
    for part, names in PARTS.items():
        folders = _folder(images, names), _folder(masks, names)
        lists = [root / "ImageSets/Segmentation" / f"{part}.txt", root / f"{part}.txt"]
        listed = next((file for file in lists if file.is_file()), None)
        if all(folders):
            splits.append(_match(*folders))  # type: ignore[arg-type]
        elif listed:
            splits.append(_match(images, masks, listed))
    if len(splits) == 1:
        raise DataError(f"{root} has either a training or a validation split; it must have both or none")
    if splits:
        return splits
    image_files, mask_files = _match(images, masks)
    indices = split_indices(len(image_files), root)
    return [([image_files[i] for i in part], [mask_files[i] for i in part]) for part in indices]


def _match(images: Path, masks: Path, listed: Path | None = None) -> tuple[list[Path], list[Path]]:
    """The images of a list, or all, with their masks."""
    image_files, mask_files = _by_name(images), _by_name(masks)
    names = sorted(image_files)
    if listed:
        names = [line.split()[0] for line in read_lines(listed)]
        if missing := [name for name in names if name not in image_files]:
            raise DataError(f"{missing[0]} of {listed} is not in {images} ({len(missing)} images are missing)")
    if not names:
        raise DataError(f"{listed or images} has no images")
    if missing := [name for name in names if name not in mask_files]:
        raise DataError(f"{image_files[missing[0]]} has no mask in {masks} ({len(missing)} of {len(names)} have none)")
    return [image_files[name] for name in names], [mask_files[name] for name in names]


def _by_name(folder: Path) -> dict[str, Path]:
    files: dict[str, Path] = {}
    for name in sorted(os.listdir(folder)):
        if name.lower().endswith(EXTENSIONS) and name[0] != ".":
            other = files.setdefault(Path(name).stem, folder / name)
            if other.name != name:
                raise DataError(f"{other} and {name} have the same name, by which masks are found; remove one of them")
    return files


class MaskFolder(AnnotatedDataset):
    """Images with semantic masks."""

    has_masks = False

    def __init__(self, files: Sequence[Path], masks: Sequence[Path], classes: Sequence[str], ignore_zero: bool) -> None:
        # arrays: worker processes would copy lists of many objects
        self.files, self.masks = (np.array([os.fsencode(f) for f in part], dtype=np.bytes_) for part in (files, masks))
        self.classes, self.ignore_zero = tuple(classes), ignore_zero
        self.category_ids = tuple(range(int(ignore_zero), len(classes) + int(ignore_zero)))

    def __len__(self) -> int:
        return len(self.files)

    def has_objects(self) -> bool:
        """False: there are only semantic masks."""
        return False

    def name_of(self, i: int) -> str:
        """Path of image i."""
        return os.fsdecode(self.files[i])

    def sample(self, i: int, masks: bool = True) -> AnnotatedImage:
        """Decode sample i, which has a semantic mask, but no objects."""
        mask = os.fsdecode(self.masks[i])
        classes = self._read(mask)
        return AnnotatedImage(
            image=read_oriented_image(
                Path(self.name_of(i)), (classes.shape[0], classes.shape[1]), f"its mask {mask} is"
            ),
            boxes=torch.zeros(0, 4),
            labels=torch.zeros(0, dtype=torch.int64),
            masks=None,
            crowd=torch.zeros(0, dtype=torch.bool),
            segmentation=classes,
            image_id=i,
            name=self.name_of(i),
        )

    def _read(self, path: str) -> Tensor:
        """Read a semantic mask (H, W) with classes from 0."""
        try:
            with Image.open(path) as image:
                values = np.array(image)
                mode = image.mode
        except FileNotFoundError:
            raise DataError(f"{path} does not exist") from None
        except Exception as error:  # decoders raise nearly anything on corrupt input
            raise DataError(f"{path} is not a readable mask: {first_line(error)}") from None
        if values.ndim != 2:
            raise DataError(
                f"{path} has {values.shape[2]} channels ({mode}), but a mask has one: the class of each pixel"
            )
        first, last = int(self.ignore_zero), len(self.classes) - 1 + int(self.ignore_zero)
        pixels = values.astype(np.uint8)
        wrong = (pixels != values) | ((pixels > last) & (pixels != IGNORE_INDEX))  # also below 0, or not whole
        if wrong.any():
            raise DataError(
                f"{path} has the value {values[wrong][0]}, but the {len(self.classes)} classes are {first} to {last}"
                f" ({IGNORE_INDEX} is ignored)"
            )
        classes = torch.from_numpy(pixels)
        if self.ignore_zero:  # 0 becomes 255 by underflow, and 255 stays
            classes = torch.where(classes == IGNORE_INDEX, classes, classes - 1)
        return classes

    def coco_dict(self) -> dict[str, Any]:
        """Not possible: there are no objects."""
        raise DataError(f"{self.name_of(0)} and the other images have semantic masks, but no objects")
