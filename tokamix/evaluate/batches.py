"""Grouping of images by size."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def group_by_size(images: Sequence[Tensor], targets: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Group the indices of images that have the same size, both resized and originally.

    Images of different sizes in one batch would be padded, and predictions would depend on the rest of the batch.
    """
    groups: dict[Any, list[int]] = {}
    for i, (image, target) in enumerate(zip(images, targets, strict=True)):
        groups.setdefault((tuple(image.shape), tuple(target["size"])), []).append(i)
    return list(groups.values())
