"""COCO annotation files: boxes, polygons, run lengths and crowds.

Options of a source (`coco:PATH?empty=keep`):

- `empty`: `drop` training images without objects, as the papers' framework does (default), or `keep` them. Validation
  keeps them always.

Annotations are clipped to the image. Those without area, or without an outline in a file that has outlines, are left
out of training and evaluation, which is logged once. Classes are numbered from 0 in the order of their ids, whatever
gaps these have; `category_ids` maps back.
"""

import json
import logging
import math
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokamix.data.annotated.datasets import AnnotatedDataset, AnnotatedImage, semantic_mask
from tokamix.data.annotated.rle import import_mask_tools
from tokamix.data.annotated.sources import check_options
from tokamix.data.decode import DataError, read_oriented_image
from tokamix.data.splits import split_indices

_log = logging.getLogger("tokamix")
OPTIONS: dict[str, tuple[str, ...]] = {"empty": ("drop", "keep")}
REQUIRED = {
    "images": ("id", "file_name", "width", "height"),
    "annotations": ("id", "image_id", "category_id", "bbox"),
    "categories": ("id", "name"),
}


def open_coco(path: str, task: str, options: dict[str, str]) -> tuple[AnnotatedDataset, AnnotatedDataset]:
    """Open the training and validation splits; see `open_annotated`."""
    check_options(f"coco:{path}", options, OPTIONS)
    files = _annotation_files(path)
    parts = [CocoFile(file) for file in files]
    kept = [list(range(len(part))) for part in parts]
    if len(parts) == 1:
        parts, kept = parts * 2, list(split_indices(len(parts[0]), files[0]))
    train, val = parts
    for number, name in val.categories.items():
        if train.categories.get(number) != name:
            other = train.categories.get(number)
            difference = "does not have it" if other is None else f"names it {other!r}"
            raise DataError(
                f"category {number} is {name!r} in {val.path}, but {train.path} {difference}; categories must agree"
            )
    if options.get("empty") != "keep":
        kept[0] = [i for i in kept[0] if train.has_objects(i)]
        if not kept[0]:
            raise DataError(f"{train.path} has no annotation with an area, so that there is nothing to learn")
    return CocoDataset(train, kept[0], train.categories, task), CocoDataset(val, kept[1], train.categories, task)


def _annotation_files(path: str) -> list[Path]:
    """The training and the validation file, or one file for both."""
    files = [Path(part.strip()).expanduser() for part in path.split(",")]
    if len(files) > 2:
        raise DataError(
            f"coco:{path} names {len(files)} files; possible are two, for training and for validation, or one"
        )
    if len(files) == 2 or files[0].suffix == ".json":
        return files
    root = files[0]
    if not root.is_dir():
        raise DataError(
            f"the folder {root} does not exist; use one with annotations/instances_train*.json, or a .json file"
        )
    selected = []
    for part in ("train", "val"):
        patterns = [f"annotations/instances_{part}*.json", f"annotations/{part}*.json", f"annotations/*_{part}.json"]
        patterns += [f"{part}*/_annotations.coco.json", f"{part}*.json"]
        matches = next((matches for pattern in patterns if (matches := sorted(root.glob(pattern)))), None)
        if not matches:
            raise DataError(
                f"{root} has no annotations/instances_{part}*.json; name the files: coco:train.json,val.json"
            )
        if len(matches) > 1:
            both = f"{matches[0].name} and {matches[1].name}"
            raise DataError(f"{root} has both {both}; name the files: coco:train.json,val.json")
        selected.append(matches[0])
    return selected


class CocoFile:
    """One annotation file, checked, in few arrays: worker processes would copy a million Python objects.

    Args:
        path: of the .json file; the images are searched for beside it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content = read_json(path)
        images = self._sorted(content, "images")
        annotations = self._sorted(content, "annotations")
        categories = self._sorted(content, "categories")
        self.categories = {entry["id"]: str(entry["name"]) for entry in categories}
        index_of = {entry["id"]: i for i, entry in enumerate(images)}
        # pycocotools needs numbers as ids
        self.ids = np.array(range(1, 1 + len(images)) if isinstance(images[0]["id"], str) else list(index_of))
        self.sizes = np.array([self._size(entry) for entry in images])
        names = [str(entry["file_name"]) for entry in images]
        self.folder = self._find_images(names)
        self.names = np.array([os.fsencode(name) for name in names], dtype=np.bytes_)
        self._read(annotations, index_of)

    def __len__(self) -> int:
        return len(self.ids)

    def _sorted(self, content: dict[str, Any], kind: str) -> list[dict[str, Any]]:
        """The entries of one kind, checked and sorted by their ids."""
        entries = content.get(kind)
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise DataError(f"{self.path} has no list of {kind}; is it a COCO annotation file?")
        if not entries and kind != "annotations":
            raise DataError(f"{self.path} has an empty list of {kind}")
        for n, entry in enumerate(entries):
            if missing := [key for key in REQUIRED[kind] if key not in entry]:
                raise DataError(f"{self.path}: entry {n} of {kind} lacks {missing[0]!r}")
        kinds = {str if isinstance(entry["id"], str) else int if _is_number(entry["id"]) else None for entry in entries}
        if None in kinds or len(kinds) > 1:
            raise DataError(f"{self.path}: the ids of {kind} must be all numbers, or all text")
        repeated = [number for number, count in Counter(entry["id"] for entry in entries).items() if count > 1]
        if repeated:
            raise DataError(f"{self.path}: the id {repeated[0]} occurs twice in {kind}; ids must be unique")
        return sorted(entries, key=lambda entry: entry["id"])

    def _size(self, entry: dict[str, Any]) -> tuple[int, int]:
        height, width = entry["height"], entry["width"]
        if not (_is_number(height) and _is_number(width) and min(height, width) >= 1):
            raise DataError(f"{self.path}: image {entry['id']} has the size {width!r}x{height!r}; it must be in pixels")
        return int(height), int(width)

    def _find_images(self, names: list[str]) -> Path:
        """The folder of the images, found by the name of the first one."""
        beside, part = self.path.parent, self.path.stem.removeprefix("instances_")
        roots = [beside.parent, beside] if beside.name == "annotations" else [beside, beside.parent]
        folders = [root / name for root in roots for name in (part, f"images/{part}", "images", ".")]
        folder = next((folder for folder in folders if (folder / names[0]).is_file()), None)
        if folder is None:
            tried = ", ".join(map(str, folders[:4]))
            raise DataError(f"the image {names[0]} of {self.path} is not in {tried}; put it there")
        existing = {
            parent: set(os.listdir(folder / parent))
            for parent in {os.path.dirname(name) for name in names}
            if (folder / parent).is_dir()
        }
        missing = [name for name in names if os.path.basename(name) not in existing.get(os.path.dirname(name), ())]
        if missing:
            raise DataError(
                f"{len(missing)} of the {len(names)} images of {self.path} are missing, such as {folder / missing[0]}"
            )
        return folder

    def _read(self, annotations: list[dict[str, Any]], index_of: dict[Any, int]) -> None:
        """Store what training and evaluation need, in the order of the images."""
        index = {number: i for i, number in enumerate(self.categories)}
        for entry in annotations:
            self._check(entry, index_of, index)
        annotations = sorted(annotations, key=lambda entry: index_of[entry["image_id"]])
        outlines = [_outline(entry.get("segmentation"), self._name(entry)) for entry in annotations]
        owners = np.array([index_of[entry["image_id"]] for entry in annotations], dtype=np.int64)
        bboxes = np.array([entry["bbox"] for entry in annotations], dtype=np.float64).reshape(-1, 4)
        boxes = np.concatenate([bboxes[:, :2], bboxes[:, :2] + bboxes[:, 2:]], axis=1)
        boxes = boxes.clip(0, self.sizes[owners][:, [1, 0, 1, 0]])
        has_area = np.all(boxes[:, 2:] > boxes[:, :2], axis=1)
        has_outline = np.array([outline is not None for outline in outlines], dtype=bool)
        self.has_masks = bool(has_outline.any())
        keep = has_area & has_outline if self.has_masks else has_area
        if not keep.all():
            reasons = (~has_area).sum(), (has_area & ~keep).sum()
            words = "%s: %d of %d annotations are not used: %d have no area in the image, %d no outline"
            _log.warning(words, self.path, (~keep).sum(), len(keep), *reasons)
        kept = np.flatnonzero(keep)
        self.bboxes, self.boxes = bboxes[kept], boxes[kept].astype(np.float32)
        areas = [annotations[n].get("area") for n in kept]
        self.areas = np.where(
            [area is None for area in areas], self.bboxes[:, 2:].prod(1), np.array(areas, dtype=float)
        )
        self.labels = np.array([index[annotations[n]["category_id"]] for n in kept], dtype=np.int64)
        self.crowd = np.array([bool(annotations[n].get("iscrowd")) for n in kept], dtype=bool)
        self.starts = np.searchsorted(owners[kept], np.arange(len(self.ids) + 1))
        # polygons are stored one after the other: polygon p starts at corners[p], those of object n at polygons[n]
        self.run_lengths: dict[int, dict[str, Any]] = {}
        outlines_of: list[list[np.ndarray]] = []
        for n, number in enumerate(kept):
            outline = outlines[number]
            if isinstance(outline, dict):
                self.run_lengths[n] = outline
            outlines_of.append(outline if isinstance(outline, list) else [])
        flat = [polygon for polygons in outlines_of for polygon in polygons]
        self.points = np.concatenate(flat) if flat else np.empty(0)
        self.corners = np.cumsum([0, *map(len, flat)])
        self.polygons = np.cumsum([0, *map(len, outlines_of)])

    def _name(self, entry: dict[str, Any]) -> str:
        return f"{self.path}: annotation {entry['id']}"

    def _check(self, entry: dict[str, Any], images: dict[Any, int], categories: dict[Any, int]) -> None:
        """Raise if an annotation is inconsistent."""
        if not _is_id(entry["image_id"]) or entry["image_id"] not in images:
            raise DataError(f"{self._name(entry)} has image_id {entry['image_id']}, which is not in images")
        if not _is_id(entry["category_id"]) or entry["category_id"] not in categories:
            raise DataError(f"{self._name(entry)} has category_id {entry['category_id']}, which is not in categories")
        box, area = entry["bbox"], entry.get("area")
        if not (isinstance(box, list) and len(box) == 4 and all(_is_number(side) for side in box)):
            raise DataError(f"{self._name(entry)} has the bbox {box!r}; it must be [left, top, width, height]")
        if not (area is None or _is_number(area)):
            raise DataError(f"{self._name(entry)} has the area {area!r}; it must be a number")

    def has_objects(self, i: int) -> bool:
        """Whether image i has objects that are not crowds."""
        return not self.crowd[self.starts[i] : self.starts[i + 1]].all()

    def mask(self, n: int, size: tuple[int, int], name: str) -> np.ndarray:
        """The mask (H, W) of object n, drawn by pycocotools."""
        tools = import_mask_tools()
        if n in self.run_lengths:
            runs = self.run_lengths[n]
            if tuple(runs["size"]) != size:
                raise DataError(
                    f"{name} is {size[1]}x{size[0]} px, but one of its masks is {runs['size'][1]}x{runs['size'][0]}"
                )
            if not isinstance(runs["counts"], list):
                return tools.decode(runs)
            if sum(runs["counts"]) != math.prod(size):
                total = sum(runs["counts"])
                raise DataError(f"{name} has {math.prod(size)} px, but the runs of one of its masks sum to {total}")
            return tools.decode(tools.frPyObjects(runs, *size))
        return tools.decode(tools.merge(tools.frPyObjects(self.outline(n), *size)))

    def outline(self, n: int) -> dict[str, Any] | list[list[float]]:
        """Run lengths or polygons of object n."""
        if n in self.run_lengths:
            return self.run_lengths[n]
        polygons = range(self.polygons[n], self.polygons[n + 1])
        return [self.points[self.corners[p] : self.corners[p + 1]].tolist() for p in polygons]


class CocoDataset(AnnotatedDataset):
    """Images of an annotation file.

    Args:
        file: the annotations.
        kept: numbers of the images.
        categories: ids and names of the training file's categories.
        task: "segment" or "detect".
    """

    def __init__(self, file: CocoFile, kept: Sequence[int], categories: dict[int, str], task: str) -> None:
        self.file, self.kept, self.task = file, np.array(kept, dtype=np.int64), task
        self.category_ids, self.classes = tuple(categories), tuple(categories.values())
        self.has_masks = file.has_masks
        # the validation file may list fewer categories
        self.index = torch.tensor([self.category_ids.index(number) for number in file.categories])
        if task == "segment":
            if not file.has_masks:
                has = "only boxes, no outlines" if len(file.boxes) else "no annotations with an area"
                raise DataError(f"{file.path} has {has}; segmentation needs outlines")
            self.classes, self.category_ids = ("background", *self.classes), (0, *self.category_ids)

    def __len__(self) -> int:
        return len(self.kept)

    def name_of(self, i: int) -> str:
        """Path of image i."""
        return str(self.file.folder / os.fsdecode(self.file.names[self.kept[i]]))

    def image_id(self, i: int) -> int:
        """Id of image i in the file; images whose ids are text are numbered from 1."""
        return int(self.file.ids[self.kept[i]])

    def sample(self, i: int, masks: bool = True) -> AnnotatedImage:
        """Decode sample i."""
        file, number = self.file, self.kept[i]
        height, width = (int(side) for side in file.sizes[number])
        image = read_oriented_image(Path(self.name_of(i)), (height, width), f"{file.path} states")
        objects = range(file.starts[number], file.starts[number + 1])
        sample = AnnotatedImage(
            image=image,
            boxes=torch.from_numpy(file.boxes[objects.start : objects.stop]).clone(),
            labels=self.index[torch.from_numpy(file.labels[objects.start : objects.stop])],
            masks=None,
            crowd=torch.from_numpy(file.crowd[objects.start : objects.stop]).clone(),
            segmentation=None,
            image_id=self.image_id(i),
            name=self.name_of(i),
        )
        if self.has_masks and (masks or self.task == "segment"):
            instance_masks = np.zeros((len(objects), height, width), dtype=bool)
            for n, entry in enumerate(objects):
                instance_masks[n] = file.mask(entry, (height, width), sample.name)
            sample.masks = torch.from_numpy(instance_masks)
        if self.task == "segment":
            sample.segmentation = semantic_mask(sample)
        return sample

    def has_objects(self) -> bool:
        """Whether there are objects to detect; crowds do not count."""
        return any(self.file.has_objects(i) for i in self.kept)

    def coco_dict(self) -> dict[str, Any]:
        """The file's annotations of these images, without the unused ones.

        Ids of annotations start at 1: pycocotools treats id 0 as no match.
        """
        file, categories = self.file, tuple(self.file.categories)
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for i, number in enumerate(self.kept):
            height, width = file.sizes[number].tolist()
            name = os.fsdecode(file.names[number])
            images.append({"id": self.image_id(i), "file_name": name, "width": width, "height": height})
            for n in range(file.starts[number], file.starts[number + 1]):
                entry = {"id": len(annotations) + 1, "image_id": self.image_id(i), "bbox": file.bboxes[n].tolist()}
                entry |= {"category_id": categories[file.labels[n]], "area": float(file.areas[n])}
                entry |= {"iscrowd": int(file.crowd[n])} | ({"segmentation": file.outline(n)} if self.has_masks else {})
                annotations.append(entry)
        named = [{"id": number, "name": name} for number, name in file.categories.items()]
        return {"images": images, "annotations": annotations, "categories": named}


def read_json(path: Path) -> dict[str, Any]:
    """Read an annotation file."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(f"the annotation file {path} does not exist") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path} is broken or not a .json file: {error}") from None
    if not isinstance(content, dict):
        raise DataError(
            f"{path} is a {type(content).__name__}, not a COCO file with images, annotations and categories"
        )
    return content


def _is_id(value: Any) -> bool:
    return isinstance(value, int | float | str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) < 2**53  # neither NaN nor infinite


def _outline(segmentation: Any, name: str) -> list[np.ndarray] | dict[str, Any] | None:
    """Polygons with an area, or run lengths; None if there is neither."""
    if isinstance(segmentation, dict):
        size, counts = segmentation.get("size"), segmentation.get("counts")
        if not (isinstance(size, list) and len(size) == 2 and isinstance(counts, list | str)):
            raise DataError(f"{name} has run lengths without 'size' and 'counts'")
        if isinstance(counts, list) and not all(type(count) is int and count >= 0 for count in counts):
            raise DataError(f"{name} has run lengths that are not whole numbers from 0 on")
        return segmentation
    parts = segmentation if isinstance(segmentation, list) else []
    polygons = [points for points in parts if isinstance(points, list) and len(points) >= 6]
    if not all(_is_number(value) for points in polygons for value in points):
        raise DataError(f"{name} has a polygon whose corners are not numbers")
    return [np.array(points[: len(points) // 2 * 2], dtype=np.float64) for points in polygons] or None
