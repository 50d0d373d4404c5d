"""torchvision's data sets by name."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tokamix.data.decode import DataError, first_line
from tokamix.data.images.datasets import ArrayDataset, FileDataset, ImageDataset

# torchvision's class and its arguments for training and validation; several of one split are joined
TORCHVISION: dict[str, tuple[str, list[dict[str, Any]], list[dict[str, Any]]]] = {
    name.lower(): (name, train, val)
    for names, train, val in (
        (("CIFAR10", "CIFAR100", "MNIST", "FashionMNIST"), [{"train": True}], [{"train": False}]),
        # transfer papers train on both small splits and report the large one
        (("Flowers102",), [{"split": "train"}, {"split": "val"}], [{"split": "test"}]),
        (("Food101", "GTSRB", "STL10", "SVHN", "StanfordCars"), [{"split": "train"}], [{"split": "test"}]),
        (("OxfordIIITPet",), [{"split": "trainval"}], [{"split": "test"}]),
        (("ImageNet", "Imagenette"), [{"split": "train"}], [{"split": "val"}]),
    )
    for name in names
}
NOT_DOWNLOADABLE = ("ImageNet", "StanfordCars")


def data_folder() -> Path:
    """Folder of downloaded data sets: TOKAMIX_DATA, or ~/.cache/tokamix."""
    return Path(os.environ.get("TOKAMIX_DATA") or "~/.cache/tokamix").expanduser()


def open_torchvision(name: str, folder: str) -> tuple[ImageDataset, ImageDataset]:
    """Open one of torchvision's data sets; download it if it is not in the folder.

    Args:
        name: of the data set; upper and lower case are the same.
        folder: that holds it; empty: `data_folder()`.
    """
    from torchvision import datasets

    name, *splits = TORCHVISION[name.lower()]
    create = getattr(datasets, name)
    root = Path(folder).expanduser() if folder else data_folder()

    def load(arguments: dict[str, Any]) -> Any:
        try:
            return create(root, **arguments)
        except (RuntimeError, OSError):  # missing
            return _download(create, name, root, arguments)

    train, val = (_convert([load(arguments) for arguments in split]) for split in splits)
    return train, val


def _download(create: Callable[..., Any], name: str, root: Path, arguments: dict[str, Any]) -> Any:
    where = f"{name} is not in {root}; set TOKAMIX_DATA to the folder that has it, or use {name}:/folder"
    if name in NOT_DOWNLOADABLE:
        raise DataError(f"{where} (it cannot be downloaded)")
    try:
        return create(root, download=True, **arguments)
    except Exception as error:
        raise DataError(f"{where} (downloading failed: {first_line(error)})") from None


def _convert(parts: list[Any]) -> ImageDataset:
    """Join torchvision data sets that hold arrays of pixels or paths of files."""

    def attribute(part: Any, *names: str) -> Any:
        return next((getattr(part, name) for name in names if getattr(part, name, None) is not None), None)

    files: list[Any] = []
    labels: list[int] = []
    for part in parts:
        samples = attribute(part, "samples", "_samples")  # (path, label)
        if samples:
            files += [path for path, _ in samples]
            labels += [label for _, label in samples]
        else:
            files += attribute(part, "_image_files", "_images") or []
            labels += [int(label) for label in attribute(part, "targets", "labels", "_labels")]
    names = attribute(parts[0], "classes") or [str(i) for i in range(1 + max(labels))]
    # synonyms of ImageNet's classes, named as timm names them: two of the classes are called crane
    joined = [name if isinstance(name, str) else ", ".join(name) for name in names]
    ids = attribute(parts[0], "wnids") or joined
    classes = [
        name if joined.count(name) == 1 else f"{name} ({number})" for name, number in zip(joined, ids, strict=True)
    ]
    if files:
        return FileDataset(files, labels, classes)
    images = torch.cat([torch.as_tensor(part.data) for part in parts])
    images = images[:, None] if images.ndim == 3 else images.permute(0, 3, 1, 2) if images.shape[-1] == 3 else images
    return ArrayDataset(images, labels, classes)
