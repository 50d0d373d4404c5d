"""Finding images, and writing predictions: CSV, JSONL, overlays, COCO's detections, contact sheets."""

import csv
import glob
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from PIL import Image
from torch import Tensor

from tokamix.data.annotated.rle import encode_rle
from tokamix.data.decode import EXTENSIONS, DataError, list_images
from tokamix.files import write_atomically, write_json
from tokamix.inference import InferenceConfig
from tokamix.predict.draw import GREY, INK, Objects, captioned_sheet, draw_class_map, draw_objects, draw_segmentation

if TYPE_CHECKING:
    from tokamix.predict.predictor import Prediction

SHEET_IMAGES = 120  # images of a contact sheet
NAME_ERRORS = "backslashreplace"  # bytes of a file's name that are not UTF-8; in JSON these are valid escapes


def find_images(paths: Iterable[str | Path]) -> list[Path]:
    """List image files: named ones, all in named folders, matches of glob patterns, and "-" for paths on stdin."""
    files: list[Path] = []
    for entry in paths:
        path = Path(entry)
        if str(entry) == "-":
            inside = [Path(line.strip()) for line in sys.stdin if line.strip()]
            problem = "standard input has no paths of images"
        elif path.is_dir():
            inside, problem = list_images(path), ""
        elif glob.has_magic(str(entry)) and not path.exists():
            matches = sorted(Path(match) for match in glob.glob(str(entry), recursive=True))
            inside = [p for p in matches if p.suffix.lower() in EXTENSIONS and not p.is_dir()]
            problem = f"no image matches {entry}"
        else:
            inside, problem = [path], ""
        if not inside:
            raise DataError(problem)
        files += inside
    return files


@contextmanager
def open_writer(output: str | Path | None, config: InferenceConfig) -> Iterator["_Writer"]:
    """Create the writer for a task and an output; at the end, files that hold several predictions are written.

    After an error, they hold the predictions that were made before it.
    """
    writer: _Writer
    if output is None:
        writer = _Writer()
    elif config.task == "classify":
        writer = _TableWriter(Path(output))
    else:
        writer = _FolderWriter(Path(output), config)
    try:
        yield writer
    finally:
        writer.close()


class _Writer:
    """Writes nothing."""

    def write(self, name: str, prediction: "Prediction", pixels: Tensor) -> None:
        """Add a prediction for an image (3, H, W) uint8; `name` is for files of this image alone."""

    def close(self) -> None:
        """Write files that hold several predictions."""


class _TableWriter(_Writer):
    """Top classes of a classifier as a .csv or .jsonl file."""

    def __init__(self, path: Path) -> None:
        if path.suffix not in (".csv", ".jsonl"):
            raise ValueError(f"the predictions of a classifier are written to a .csv or .jsonl file, not to {path}")
        self.path = path
        self.rows: list[tuple[str, list[str], list[float]]] = []

    def write(self, name: str, prediction: "Prediction", pixels: Tensor) -> None:
        """Add a row."""
        assert prediction.scores is not None
        scores = [round(score, 6) for score in prediction.scores.tolist()]
        self.rows.append((prediction.image, list(prediction.names), scores))

    def close(self) -> None:
        """Write the file."""
        if self.rows:
            write_atomically(self.path, self._write_csv if self.path.suffix == ".csv" else self._write_jsonl)

    def _write_csv(self, path: Path) -> None:
        width = max(len(names) for _, names, _ in self.rows)
        with path.open("w", newline="", encoding="utf-8", errors=NAME_ERRORS) as file:
            writer = csv.writer(file)
            writer.writerow(["image", *(f"{key}{i + 1}" for i in range(width) for key in ("class", "score"))])
            for image, names, scores in self.rows:
                writer.writerow([image, *(v for pair in zip(names, scores, strict=True) for v in pair)])

    def _write_jsonl(self, path: Path) -> None:
        with path.open("w", encoding="utf-8", errors=NAME_ERRORS) as file:
            for image, names, scores in self.rows:
                row = {"image": image, "classes": names, "scores": scores}
                file.write(json.dumps(row, ensure_ascii=False) + "\n")


class _FolderWriter(_Writer):
    """Overlays, class maps and detections.json of a segmenter or detector."""

    def __init__(self, folder: Path, config: InferenceConfig) -> None:
        if folder.is_file() or folder.suffix in (".csv", ".jsonl"):
            raise ValueError(f"the predictions of task {config.task} are written to a folder, not to the file {folder}")
        self.folder, self.config = folder, config
        self.images: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []

    def write(self, name: str, prediction: "Prediction", pixels: Tensor) -> None:
        """Write the images of a prediction and keep its detections; of masks, only the run lengths."""
        classes = self.config.class_names
        if prediction.segmentation is not None:
            self._save(draw_segmentation(pixels, prediction.segmentation, classes), f"{name}_overlay.png")
            self._save(draw_class_map(prediction.segmentation, classes), f"{name}_classes.png")
            return
        assert prediction.boxes is not None
        assert prediction.labels is not None
        objects = Objects(prediction.boxes, prediction.labels, prediction.scores, prediction.masks)
        self._save(draw_objects(pixels, objects, classes), f"{name}_overlay.png")
        if (class_map := merge_masks(prediction)) is not None:
            self._save(draw_class_map(class_map, ("background", *classes)), f"{name}_classes.png")
        self._add_detections(prediction, (pixels.shape[-2], pixels.shape[-1]))

    def _save(self, image: Image.Image, name: str) -> None:
        write_atomically(self.folder / name, lambda path: image.save(path, format="png"))

    def _add_detections(self, prediction: "Prediction", size: tuple[int, int]) -> None:
        image_id = len(self.images) + 1
        self.images.append({"id": image_id, "file_name": prediction.image, "height": size[0], "width": size[1]})
        for entry in _coco_annotations(prediction):
            entry["category_id"] = self.config.category_ids[entry["category_id"]]
            self.annotations.append({"id": len(self.annotations) + 1, "image_id": image_id, **entry})

    def close(self) -> None:
        """Write detections.json."""
        if not self.images:
            return
        pairs = zip(self.config.category_ids, self.config.class_names, strict=True)
        categories = [{"id": number, "name": name} for number, name in pairs]
        content = {"images": self.images, "annotations": self.annotations, "categories": categories}
        write_json(self.folder / "detections.json", content)


def merge_masks(prediction: "Prediction") -> Tensor | None:
    """Merge the masks of objects into a class map (H, W): 0 is background, then class + 1; the best score wins."""
    if prediction.masks is None or prediction.labels is None:
        return None
    class_map = torch.zeros(prediction.masks.shape[1:], dtype=torch.int64)
    for label, mask in zip(prediction.labels.flip(0), prediction.masks.flip(0), strict=True):
        class_map[mask] = int(label) + 1
    return class_map


def _coco_annotations(prediction: "Prediction") -> Iterator[dict[str, Any]]:
    assert prediction.boxes is not None
    assert prediction.labels is not None
    assert prediction.scores is not None
    for n, (left, top, right, bottom) in enumerate(prediction.boxes.tolist()):
        box = [round(value, 2) for value in (left, top, right - left, bottom - top)]
        entry: dict[str, Any] = {"category_id": int(prediction.labels[n]), "bbox": box, "area": box[2] * box[3]}
        if prediction.masks is not None:
            entry |= {"segmentation": encode_rle(prediction.masks[n]), "area": int(prediction.masks[n].sum())}
        yield entry | {"iscrowd": 0, "score": round(float(prediction.scores[n]), 4)}


def unique_names(images: Sequence[Any]) -> list[str]:
    """Give the results of each image a name; repeated names, also in different case, get a number."""
    names: dict[str, str] = {}
    copies: Counter[str] = Counter()
    for image in images:
        stem = name = Path(image).stem if isinstance(image, str | Path) else "image"
        while name.casefold() in names:
            copies[stem] += 1
            name = f"{stem}_{copies[stem] + 1}"
        names[name.casefold()] = name
    return list(names.values())


def sheet_format(path: Path) -> str:
    """Pillow's name of the format of a contact sheet, by the name of its file."""
    formats = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg"}
    if path.suffix.lower() not in formats:
        raise ValueError(f"a contact sheet is written to a .png or .jpg file, not to {path}")
    return formats[path.suffix.lower()]


def write_sheet(path: Path, drawings: Sequence[tuple[Image.Image, "Prediction"]]) -> None:
    """Write a contact sheet of images with their predictions; of many, the first 120."""
    shown = drawings[:SHEET_IMAGES]
    captions = []
    for _, prediction in shown:
        name = [(Path(prediction.image).name, GREY)] if prediction.image else []
        text = prediction.summary()
        if prediction.boxes is None and prediction.scores is not None:
            text = f"{prediction.names[0]} {100 * float(prediction.scores[0]):.0f} %"
        captions.append([(text, INK), *name])
    hidden = f"; {len(drawings) - len(shown)} more are not shown" if len(drawings) > len(shown) else ""
    sheet = captioned_sheet([image for image, _ in shown], captions, title=f"{len(drawings)} images{hidden}")
    write_atomically(path, lambda beside: sheet.save(beside, format=sheet_format(path)))
