"""Data of a study: decoded once, read by every run."""

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokamix.data import ArrayDataset, DatasetSplits, create_dataset
from tokamix.data.create import normalize_source
from tokamix.files import write_atomically


def decode_once(source: str, task: str, folder: Path) -> str:
    """Decode a classification data set into one file in `folder`; return its path, or `source` if it has no arrays."""
    if task != "classify":
        return source
    path = folder / f"{hashlib.sha256(normalize_source(source).encode()).hexdigest()[:12]}.npz"
    if path.exists():
        return str(path)
    splits = create_dataset(source)
    arrays: dict[str, Any] = {}
    for name in ("train", "val"):
        if (pair := getattr(splits, name).arrays()) is None:
            return source
        arrays |= {f"{name}_images": pair[0].numpy(), f"{name}_labels": pair[1].numpy()}

    def write(temporary: Path) -> None:
        with temporary.open("wb") as file:
            np.savez(file, name=splits.name, classes=np.array(splits.classes), **arrays)

    write_atomically(path, write)
    return str(path)


def load_splits(path: str, holdout: int = 0, images: int | None = None, seed: int = 0) -> Any:
    """Load data that `decode_once` wrote; anything else is returned as it is, a source for `tokamix.train`.

    Args:
        path: the file.
        holdout: number of training images that replace the validation images, the same ones in every run.
        images: number of training images, as many of each class as possible, drawn by `seed`; None for all.
        seed: of that draw.
    """
    if not path.endswith(".npz") or "train_images" not in (arrays := np.load(path)):
        if holdout or images:
            raise ValueError(f"{path} has images of several sizes: this study needs images of one size")
        return path
    classes = tuple(str(name) for name in arrays["classes"])
    train, val = (
        (torch.from_numpy(arrays[f"{name}_images"]), torch.from_numpy(arrays[f"{name}_labels"]))
        for name in ("train", "val")
    )
    if holdout:
        order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(0))
        val = train[0][order[:holdout]], train[1][order[:holdout]]
        train = train[0][order[holdout:]], train[1][order[holdout:]]
    if images is not None:
        chosen = draw_balanced(train[1], images, seed)
        train = train[0][chosen], train[1][chosen]
    return DatasetSplits(str(arrays["name"]), ArrayDataset(*train, classes), ArrayDataset(*val, classes), classes)


def draw_balanced(labels: torch.Tensor, count: int, seed: int) -> torch.Tensor:
    """Indices of `count` images in random order, whose classes are as frequent as possible the same."""
    if count > len(labels):
        raise ValueError(f"{count} images are asked for, but the training set has {len(labels)}")
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    # the rank of each image among those of its class, in the random order: the first of each class come first
    seen: dict[int, int] = {}
    ranks = []
    for label in labels[order].tolist():
        ranks.append(seen.get(label, 0))
        seen[label] = ranks[-1] + 1
    return order[torch.tensor(ranks).argsort(stable=True)[:count]]
