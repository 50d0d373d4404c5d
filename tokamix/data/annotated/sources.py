"""`open_annotated`: data sets for segmentation and detection, by name or path."""

import difflib
from pathlib import Path
from typing import Literal

from tokamix.data.annotated.datasets import AnnotatedDataset
from tokamix.data.decode import DataError
from tokamix.data.splits import DatasetSplits
from tokamix.tasks import IGNORE_INDEX

Splits = tuple[AnnotatedDataset, AnnotatedDataset]


def open_annotated(source: str, task: Literal["segment", "detect"], seed: int = 0) -> DatasetSplits:
    """Open a data set for segmentation or detection.

    - `shapes`, `shapes:256`: generated images of 128 (256) px.
    - `coco:PATH`: COCO annotations: a folder with annotations/instances_train*.json and instances_val*.json, one .json
      file (a fifth of its images is held out), or two, separated by a comma. The images are searched for beside it.
    - `masks:PATH`: images with semantic masks, in the layout of VOC, ADE20K and many others.
    - a folder or a .json file: one of the two above, recognised by its content.

    Options follow a question mark, joined by &: see `coco.py` and `mask_folder.py`.

    Args:
        source: see above.
        task: "segment" or "detect"; for "segment", the instance masks of COCO files are merged to semantic masks.
        seed: of generated images; held-out images do not depend on it.
    """
    train, val = _open(source, task, seed)
    if task == "segment" and len(train.classes) > IGNORE_INDEX:
        raise DataError(f"{source} has {len(train.classes)} classes; masks of 8 bits have room for {IGNORE_INDEX}")
    return DatasetSplits(source, train, val, train.classes, task)


def _open(source: str, task: Literal["segment", "detect"], seed: int) -> Splits:
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
        if dense_task(Path(path).expanduser()) is None:
            raise DataError(f"{source} has no COCO annotations (annotations/*.json), which detection needs")
        raise DataError(f"{source} has semantic masks, but no objects to detect; detection needs COCO annotations")
    from tokamix.data.annotated.mask_folder import open_masks

    return open_masks(path, options)


def _kind(source: str) -> str:
    """Whether a path holds COCO annotations or masks."""
    first = source.partition("?")[0].split(",")[0]
    path = Path(first).expanduser()
    if first.endswith(".json"):
        return "coco"
    if path.is_dir():
        return "coco" if is_coco_folder(path) else "masks"
    near = difflib.get_close_matches(source.partition(":")[0], ["shapes", "coco:", "masks:"], n=1)
    hint = f"did you mean {near[0]}?" if near else "possible are shapes, coco:PATH, masks:PATH, a folder, a .json file"
    raise DataError(f"there is no data set {source!r} with annotations; {hint}")


def is_coco_folder(path: Path) -> bool:
    """Whether a folder has COCO annotations."""
    return any(path.glob("annotations/*.json")) or any(path.glob("*/_annotations.coco.json"))


def dense_task(path: Path) -> str | None:
    """The task of a folder's annotations, if it has any: "detect" for COCO files, "segment" for semantic masks."""
    from tokamix.data.annotated.mask_folder import is_mask_folder

    return "detect" if is_coco_folder(path) else "segment" if is_mask_folder(path) else None


def check_options(source: str, options: dict[str, str], allowed: dict[str, tuple[str, ...]]) -> None:
    """Raise for an unknown option or value; an empty tuple allows any value."""
    for name, value in options.items():
        if name not in allowed:
            raise DataError(f"{source} has no option {name!r}; possible are {', '.join(allowed)}")
        if allowed[name] and value not in allowed[name]:
            raise DataError(f"{source}: {name} is {value!r}, but must be {' or '.join(allowed[name])}")
