"""`open_images`: data sets for classification, by name or path."""

import contextlib
import difflib
import logging
import os
from pathlib import Path

import torch

from tokamix.data.annotated.sources import dense_task
from tokamix.data.decode import EXTENSIONS, DataError, list_images
from tokamix.data.images.datasets import ArrayDataset, FileDataset, ImageDataset
from tokamix.data.images.packs import open_packs
from tokamix.data.images.streams import ImageStream
from tokamix.data.images.torchvision import TORCHVISION, open_torchvision
from tokamix.data.splits import TRAIN_NAMES, VAL_NAMES, DatasetSplits, split_by_class, split_indices

_log = logging.getLogger("tokamix")


def open_images(source: str, seed: int = 0, labels: bool = True) -> DatasetSplits:
    """Open a data set for classification.

    - `digits`: scikit-learn's 1,797 scans of 8x8 px; `shapes`: generated images (`shapes:128` for 128 px).
    - a folder: `train/` and `val/` with a folder for each class, or only class folders, of which a fifth is held out.
    - `a.npz,b.npz`: packs of encoded images; a file whose name ends in _val or _test is for validation.
    - `wds:train-{0000..0009}.tar,val-{0..1}.tar`: WebDataset shards, local or remote.
    - `hf:user/name`, `hf:user/name:config` or `hf:folder`: Hugging Face data sets, streamed.
    - `CIFAR10`, `CIFAR100`, `Flowers102`, `StanfordCars`, `ImageNet` and others of torchvision, by name, in the
      folder TOKAMIX_DATA (default ~/.cache/tokamix) or another one: `CIFAR100:/my/folder`.

    Args:
        source: see above.
        seed: of generated images; held-out images do not depend on it.
        labels: False also opens a folder with images in any order, as images of a single class.
    """
    kind, _, rest = source.partition(":")
    train: ImageDataset | ImageStream
    val: ImageDataset | ImageStream
    if kind == "shapes":
        train, val = _open_shapes(rest, seed)
    elif source == "digits":
        train, val = _open_digits()
    elif kind == "wds":
        from tokamix.data.images.tar_shards import open_shards

        train, val = open_shards(rest)
    elif kind == "hf":
        from tokamix.data.images.hub import open_hub

        train, val = open_hub(rest)
    elif source.endswith(".npz"):
        train, val = open_packs(source)
    elif Path(source).is_dir():
        train, val = _open_folder(Path(source)) if labels else _open_any_folder(Path(source))
    elif kind.lower() in TORCHVISION:
        train, val = open_torchvision(kind, rest)
    else:
        names = ["digits", "shapes", "wds:", "hf:", *(entry[0] for entry in TORCHVISION.values())]
        near = difflib.get_close_matches(kind, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"possible are a folder, a .npz file, {', '.join(names)}"
        if "/" in source and ":" not in source:
            hint = "no file or folder has this path"
        raise DataError(f"there is no data set {source!r}; {hint}")
    if len(val.classes) > len(train.classes):
        raise DataError(
            f"{source} has {len(train.classes)} classes for training, but {len(val.classes)} for validation"
        )
    for i, (name, other) in enumerate(zip(train.classes, val.classes, strict=False)):
        if name != other:
            raise DataError(
                f"class {i} of {source} is {name!r} for training, but {other!r} for validation; give both the same"
                " classes in the same order"
            )
    if isinstance(val, ImageDataset):
        _warn_missing_classes(source, val)
    return DatasetSplits(source, train, val, train.classes)


def _warn_missing_classes(source: str, val: ImageDataset) -> None:
    counts = torch.bincount(val.labels, minlength=len(val.classes)).tolist()
    missing = [name for name, count in zip(val.classes, counts, strict=True) if not count]
    if missing:
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        words = "%s: %d of %d classes have no validation images (%s); accuracy does not measure them"
        _log.warning(words, source, len(missing), len(val.classes), names)


def _open_digits() -> tuple[ImageDataset, ImageDataset]:
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ImportError("digits needs scikit-learn: pip install 'tokamix[demo]'") from None
    pixels, labels = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels).view(-1, 1, 8, 8).mul(255 / 16).round().byte()  # 17 shades of grey
    labels = torch.from_numpy(labels)
    parts = split_by_class(labels)
    train, val = (ArrayDataset(images[part], labels[part], [str(i) for i in range(10)]) for part in parts)
    return train, val


def _open_shapes(size: str, seed: int) -> tuple[ImageDataset, ImageDataset]:
    from tokamix.data.shapes import Shapes, check_side

    side = check_side(size, default=64)
    return Shapes(2000, side, seed, "train"), Shapes(500, side, seed, "val")


def _open_folder(root: Path) -> tuple[ImageDataset, ImageDataset]:
    if task := dense_task(root):
        annotations = "COCO annotations" if task == "detect" else "masks"
        raise DataError(f"{root} has {annotations}, but no folder for each class; use task={task!r} (--task {task})")
    names = [name for name in sorted(os.listdir(root)) if (root / name).is_dir() and not name.startswith(".")]
    folders = {name.lower(): root / name for name in names}
    train = next((folders[name] for name in TRAIN_NAMES if name in folders), None)
    val = next((folders[name] for name in VAL_NAMES if name in folders), None)
    if train is None:
        if val is not None and all(name in VAL_NAMES for name in folders):  # otherwise "valid" may be a class
            raise DataError(
                f"{root} has {val.name}/, but no train/; add one, or use {val} (to evaluate on all of it: split='all',"
                " --split all)"
            )
        classes, files, labels = _class_folders(root)
        parts = split_by_class(labels)
        return tuple(  # type: ignore[return-value]
            FileDataset([files[i] for i in part], [labels[i] for i in part], classes) for part in parts
        )
    classes, files, labels = _class_folders(train)
    if val is None:
        raise DataError(
            f"{root} has {train.name}/, but no val/ or test/; add one, or use {train} to hold out a fifth of it"
        )
    val_classes, val_files, val_labels = _class_folders(val)
    if unknown := [name for name in val_classes if name not in classes]:
        raise DataError(f"{val / unknown[0]} is a class that {train} does not have")
    index = [classes.index(name) for name in val_classes]
    return FileDataset(files, labels, classes), FileDataset(val_files, [index[label] for label in val_labels], classes)


def _open_any_folder(root: Path) -> tuple[ImageDataset, ImageDataset]:
    """Class folders if all images are inside of them, else all images below the folder, as one class."""
    entries = [entry for entry in root.iterdir() if not entry.name.startswith(".")]
    if all(entry.is_dir() or entry.suffix.lower() not in EXTENSIONS for entry in entries):
        with contextlib.suppress(DataError):
            return _open_folder(root)
    files = list_images(root)
    parts = split_indices(len(files), root)
    train, val = (FileDataset([files[i] for i in part], [0] * len(part), ["image"]) for part in parts)
    return train, val


def _class_folders(root: Path) -> tuple[list[str], list[Path], list[int]]:
    """Classes, files and labels of a folder of class folders."""
    classes = sorted(entry.name for entry in root.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if not classes:
        raise DataError(f"{root} has no class folders; put the images of each class into a folder of its name")
    files: list[Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        try:
            images = list_images(root / name)
        except DataError:
            raise DataError(
                f"the class folder {root / name} has no images ({', '.join(EXTENSIONS)}); fill or remove it"
            ) from None
        files += images
        labels += [label] * len(images)
    return classes, files, labels
