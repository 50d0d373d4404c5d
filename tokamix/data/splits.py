"""A data set in its training and validation splits."""

from dataclasses import dataclass
from typing import Any


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
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.classes)
