"""Images with annotations: boxes, instance masks, semantic masks."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tokamix.data.annotated.rle import encode_rle
from tokamix.data.decode import DataError
from tokamix.tasks import IGNORE_INDEX


@dataclass
class AnnotatedImage:
    """An image with its objects and, for segmentation, its semantic mask."""

    image: Tensor  # (3, H, W) uint8
    boxes: Tensor  # (n, 4) float32: left, top, right, bottom in pixels
    labels: Tensor  # (n,) int64, from 0
    masks: Tensor | None  # (n, H, W) bool
    crowd: Tensor  # (n,) bool: a group of objects annotated as one (COCO's iscrowd)
    segmentation: Tensor | None  # (H, W) uint8: class of each pixel; 255 is ignored
    image_id: int
    name: str

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.image.shape[-2], self.image.shape[-1]

    @property
    def label(self) -> int:
        """Class of the largest object."""
        if not len(self.labels):
            raise ValueError(f"{self.name} has no objects")
        sides = self.boxes[:, 2:] - self.boxes[:, :2]
        return int(self.labels[(sides.prod(1) if self.masks is None else self.masks.sum((1, 2))).argmax()])


class AnnotatedDataset(ABC):
    """Annotated images with random access; `classes` are those of objects or pixels, depending on the task."""

    classes: tuple[str, ...]
    category_ids: tuple[int, ...]  # of the classes, in COCO files
    has_masks: bool = True

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def sample(self, i: int, masks: bool = True) -> AnnotatedImage:
        """Decode sample i; without instance masks this is faster."""

    @abstractmethod
    def name_of(self, i: int) -> str:
        """Name of sample i in messages."""

    def image_id(self, i: int) -> int:
        """Id of image i in COCO files."""
        return i

    def has_objects(self) -> bool:
        """Whether there are objects to detect; crowds do not count."""
        return True

    def coco_dict(self) -> dict[str, Any]:
        """All annotations in the form of COCO files, for pycocotools."""
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        for i in range(len(self)):
            sample = self.sample(i)
            height, width = sample.size
            images.append({"id": sample.image_id, "file_name": sample.name, "height": height, "width": width})
            for n, (left, top, right, bottom) in enumerate(sample.boxes.tolist()):
                area = (right - left) * (bottom - top)
                entry: dict[str, Any] = {"bbox": [left, top, right - left, bottom - top]}
                if sample.masks is not None:
                    entry["segmentation"] = encode_rle(sample.masks[n])
                    area = int(sample.masks[n].sum())
                entry |= {"id": len(annotations) + 1, "image_id": sample.image_id, "area": area}
                entry |= {"category_id": self.category_ids[sample.labels[n]], "iscrowd": int(sample.crowd[n])}
                annotations.append(entry)
        categories = [{"id": n, "name": name} for n, name in zip(self.category_ids, self.classes, strict=True)]
        return {"images": images, "annotations": annotations, "categories": categories}


def semantic_mask(sample: AnnotatedImage) -> Tensor:
    """Compute the class of each pixel (H, W) from instance masks: 0 is background, class + 1 an object, 255 a crowd.

    Small objects are drawn over large ones, and all objects over crowds, whose outlines are rough.
    """
    if sample.masks is None:
        raise DataError(f"{sample.name} has boxes, but no masks for segmentation")
    classes = torch.zeros(sample.size, dtype=torch.uint8)
    areas = sample.masks.sum((1, 2)).tolist()
    for n in sorted(range(len(areas)), key=lambda n: (not sample.crowd[n], -areas[n])):
        classes[sample.masks[n]] = IGNORE_INDEX if sample.crowd[n] else int(sample.labels[n]) + 1
    return classes
