"""ImageNet's further test sets: A, R, Sketch, V2 and ReaL, from folders that the user has.

Protocols and sources:

- a: ImageNet-A (arXiv 1907.07174), r: ImageNet-R (arXiv 2006.16241): the logits of their 200 classes only are compared.
- sketch: ImageNet-Sketch (arXiv 1905.13549): all 1,000 classes.
- v2: ImageNet-V2 (arXiv 1902.10811), all 1,000 classes, in up to three variants. Its folders are named 0 to 999; read
  in the order of their names as text (0, 1, 10, 100, ...), nearly all labels would be wrong.
- real: ReaL labels (arXiv 2006.07159) of the validation images: a prediction is correct if it is in the image's set of
  labels. Images with an empty set are skipped.
"""

import json
from collections import Counter
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from tokamix.data import DataError, FileDataset
from tokamix.data.decode import image_files
from tokamix.inference import InferenceConfig, imagenet_classes

SETS = {"a": "ImageNet-A", "r": "ImageNet-R", "sketch": "ImageNet-Sketch", "v2": "ImageNet-V2", "real": "ImageNet-ReaL"}
VARIANTS = {"matched-frequency": "matched frequency", "threshold": "threshold 0.7", "top-images": "top images"}  # of V2
IMAGES = "ILSVRC2012_val_"  # start of the names of ImageNet's validation images


class TestSet(NamedTuple):
    """Images with the outputs of a model that are correct for each.

    Attributes:
        name: for tables.
        data: the images; their labels are not used.
        targets: for each image, the outputs that count as correct.
        outputs: the outputs that are compared; None: all.
        skipped: images that were left out, because they have no label.
    """

    name: str
    data: FileDataset
    targets: list[frozenset[int]]
    outputs: list[int] | None = None
    skipped: int = 0


def open_imagenet(kind: str, folder: str | Path, config: InferenceConfig) -> list[TestSet]:
    """Open one of ImageNet's test sets for a model; V2 may give three.

    Args:
        kind: "a", "r", "sketch", "v2" or "real".
        folder: with a folder for each class; for V2 also the folder that holds its variants; for ReaL any folder with
            files such as ILSVRC2012_val_00000001.JPEG.
        config: has the class names of the model.
    """
    if kind not in SETS:
        raise ValueError(f"there is no ImageNet test set {kind!r}; choose from {', '.join(SETS)}")
    root = Path(folder).expanduser()
    if not root.is_dir():
        raise DataError(f"{SETS[kind]}: the folder {root} does not exist")
    outputs = _find_outputs(config)
    if kind == "real":
        return [_open_real(root, outputs)]
    if kind == "v2":
        return [_open_v2(path, name, outputs) for path, name in _v2_variants(root)]
    ids = _class_numbers() if kind == "sketch" else _read(f"imagenet_{kind}_synsets.txt").split()
    by_folder = {name: _class_numbers()[name] for name in ids}
    return [_open_classes(root, SETS[kind], by_folder, outputs)]


def _find_outputs(config: InferenceConfig) -> dict[int, int]:
    """Number of a class in ImageNet-1k -> the model's output for it."""
    classes = imagenet_classes(1000)
    short = Counter(name.split(",")[0] for _, name in classes)
    numbers: dict[str, int] = {}
    for i, (label, name) in enumerate(classes):
        first = name.split(",")[0]
        numbers |= {label: i, name: i} | ({first: i} if short[first] == 1 else {})
    if config.num_classes == 1000 and not config.has_class_names:
        return {i: i for i in range(1000)}
    unknown = [name for name in config.class_names if name not in numbers]
    if unknown:
        raise ValueError(
            f"ImageNet's test sets need a model with ImageNet's classes, but the model has the class {unknown[0]!r};"
            " leave out --imagenet"
        )
    return {numbers[name]: i for i, name in enumerate(config.class_names)}


def _open_classes(root: Path, name: str, by_folder: dict[str, int], outputs: dict[int, int]) -> TestSet:
    """Class folders, whose names are keys of `by_folder`; a model that lacks one of the classes is refused."""
    missing = [number for number in by_folder.values() if number not in outputs]
    if missing:
        raise ValueError(
            f"{name} has {len(by_folder)} of ImageNet's classes, but the model lacks {len(missing)} of them; it needs a"
            " model with all 1,000 classes"
        )
    folders = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    unknown = [entry for entry in folders if entry not in by_folder]
    if unknown or not folders:
        found = f"the folder {unknown[0]!r}" if unknown else "no folders"
        raise DataError(f"{root} is not {name}: it has {found}, but must have folders such as {next(iter(by_folder))}")
    paths = [(path, outputs[by_folder[entry]]) for entry in folders for path in image_files(root / entry)]
    data = FileDataset([path for path, _ in paths], [0] * len(paths), ["image"])
    compared = None if len(by_folder) == len(outputs) else [outputs[number] for number in by_folder.values()]
    return TestSet(name, data, [frozenset((target,)) for _, target in paths], compared)


def _v2_variants(root: Path) -> list[tuple[Path, str]]:
    """The variants in a folder, or the folder itself if it has the classes."""
    if (root / "0").is_dir():
        name = next((name for key, name in VARIANTS.items() if key in root.name), "")
        return [(root, f"ImageNet-V2{f' ({name})' if name else ''}")]
    entries = sorted(entry for entry in root.iterdir() if entry.is_dir())
    found = [(path, f"ImageNet-V2 ({name})") for key, name in VARIANTS.items() for path in entries if key in path.name]
    if not found:
        raise DataError(
            f"{root} is not ImageNet-V2: it has neither class folders 0 to 999 nor folders such as"
            " imagenetv2-matched-frequency-format-val"
        )
    return found


def _open_v2(root: Path, name: str, outputs: dict[int, int]) -> TestSet:
    return _open_classes(root, name, {str(number): number for number in range(1000)}, outputs)


def _open_real(root: Path, outputs: dict[int, int]) -> TestSet:
    """Images with labels of ReaL that the model has; those without are counted as skipped."""
    real: list[list[int]] = json.loads(_read("imagenet_real_labels.json"))
    files_, targets, skipped = [], [], 0
    for path in image_files(root):
        number = path.stem.removeprefix(IMAGES)
        if not (path.stem.startswith(IMAGES) and number.isdigit() and 1 <= int(number) <= len(real)):
            continue
        labels = frozenset(outputs[label] for label in real[int(number) - 1] if label in outputs)
        if labels:
            files_.append(path)
            targets.append(labels)
        skipped += not labels
    if not files_:
        raise DataError(f"{root} has no images of ImageNet's validation set with ReaL labels ({IMAGES}00000001.JPEG)")
    return TestSet(SETS["real"], FileDataset(files_, [0] * len(files_), ["image"]), targets, None, skipped)


@cache
def _class_numbers() -> dict[str, int]:
    """Number of each WordNet id in ImageNet-1k."""
    return {label: i for i, (label, _) in enumerate(imagenet_classes(1000))}


def _read(name: str) -> str:
    """A file of class lists that timm ships."""
    return (files("timm.data") / "_info" / name).read_text()
