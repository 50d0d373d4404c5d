"""Training and validation splits of a data set."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokamix.data.decode import DataError
from tokamix.data.rng import generator

HELD_OUT = 0.2  # part of a data set without a validation split that is held out for validation
TRAIN_NAMES, VAL_NAMES = ("train", "training"), ("val", "valid", "validation", "test", "testing")


@dataclass
class DatasetSplits:
    """A data set with its two splits, as `create_dataset` returns it.

    Attributes:
        name: the source it was created from.
        train: the training split.
        val: the validation split.
        classes: class names, in the order of the labels.
        task: "classify", "segment" or "detect".
    """

    name: str
    train: Any
    val: Any
    classes: tuple[str, ...]
    task: str = "classify"

    @property
    def title(self) -> str:
        """The name for people and for publication: of a path only the last part, without folders of the machine."""
        kind, colon, rest = self.name.partition(":")
        if kind == "hf" or "/" not in self.name:
            return self.name
        prefix, paths = (kind + colon, rest) if kind in ("coco", "masks", "wds") else ("", self.name)
        paths = paths.partition("?")[0]
        return prefix + ",".join(part.rstrip("/").rpartition("/")[2] for part in paths.split(","))

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)

    def check_training_images(self) -> None:
        """Raise a DataError if there is nothing to train on: a validation set may come alone."""
        if not len(self.train):
            raise DataError(
                f"{self.name} has {len(self.val):,} validation images, but none for training; name both, such as"
                " train.npz,val.npz or a folder with train/ and val/"
            )


def split_by_class(labels: Sequence[int] | np.ndarray | Tensor) -> tuple[list[int], list[int]]:
    """Split indices into training and validation: a fixed part of each class, at least one of two images.

    There is no seed: what is held out from one run is held out from all, so that nothing is evaluated on its training
    images.
    """
    labels = torch.as_tensor(labels)
    draw = generator("split")
    train: list[int] = []
    val: list[int] = []
    for label in labels.unique().tolist():
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=draw)].tolist()
        count = max(round(len(members) * HELD_OUT), int(len(members) > 1))
        val += members[:count]
        train += members[count:]
    return sorted(train), sorted(val)


def split_indices(count: int, source: Path) -> tuple[list[int], list[int]]:
    """Split the numbers below `count` into training and validation; always the same."""
    if count < 2:
        raise DataError(f"{source} has only one image; two are needed to hold one out for validation")
    order = torch.randperm(count, generator=generator("split")).tolist()
    held_out = max(round(count * HELD_OUT), 1)
    return sorted(order[held_out:]), sorted(order[:held_out])
