"""Images with one label each, with random access."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tokamix.data.decode import DataError, decode_image


class ImageDataset:
    """Base class: `len()`, and `[i]` -> (RGB image or uint8 tensor (C, H, W), label)."""

    def __init__(self, labels: Sequence[int] | np.ndarray | Tensor, classes: Sequence[str]) -> None:
        self.labels = torch.as_tensor(labels, dtype=torch.int64)
        self.classes = tuple(classes)
        self.check_labels()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Image.Image | Tensor, int]:
        return self.image(i), int(self.labels[i])

    def image(self, i: int, min_size: int | None = None) -> Image.Image | Tensor:
        """Decode image i; JPEGs may be decoded smaller if both sides keep `min_size` pixels."""
        raise NotImplementedError

    def name_of(self, i: int) -> str:
        """Name of image i in messages."""
        return f"image {i}"

    def arrays(self) -> tuple[Tensor, Tensor] | None:
        """All images (N, C, H, W) as uint8 and labels (N,), if they fit into memory; else None."""
        return None

    def subset(self, indices: Sequence[int]) -> "ImageDataset":
        """A part of the images; they keep their names."""
        return Subset(self, indices)

    def at_most(self, count: int) -> "ImageDataset":
        """At most `count` images, evenly spread over the data set."""
        if len(self) <= count:
            return self
        return self.subset([i * len(self) // count for i in range(count)])

    def check_labels(self) -> None:
        """Raise if a label has no class."""
        wrong = ((self.labels < 0) | (self.labels >= len(self.classes))).nonzero().flatten().tolist()
        if wrong:
            raise DataError(
                f"{self.name_of(wrong[0])} has label {int(self.labels[wrong[0]])}, but there are {len(self.classes)}"
                f" classes (0 to {len(self.classes) - 1}); {len(wrong)} of {len(self)} labels are out of range"
            )


class ArrayDataset(ImageDataset):
    """Images of one size, held as one uint8 tensor (N, C, H, W)."""

    def __init__(self, images: Tensor, labels: Sequence[int] | np.ndarray | Tensor, classes: Sequence[str]) -> None:
        self.images = images
        super().__init__(labels, classes)

    def image(self, i: int, min_size: int | None = None) -> Tensor:
        """Image i as a tensor."""
        return self.images[i]

    def arrays(self) -> tuple[Tensor, Tensor]:
        """The tensors themselves."""
        return self.images, self.labels


class Subset(ImageDataset):
    """Some images of a data set."""

    def __init__(self, dataset: ImageDataset, indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, indices
        super().__init__(dataset.labels[torch.as_tensor(indices, dtype=torch.int64)], dataset.classes)

    def image(self, i: int, min_size: int | None = None) -> Image.Image | Tensor:
        """Decode image i of the part."""
        return self.dataset.image(self.indices[i], min_size)

    def name_of(self, i: int) -> str:
        """Name of the image in the whole data set."""
        return self.dataset.name_of(self.indices[i])

    def arrays(self) -> tuple[Tensor, Tensor] | None:
        """Copies of the images, if the data set is held in memory."""
        arrays = self.dataset.arrays()
        return None if arrays is None else (arrays[0][torch.as_tensor(self.indices)], self.labels)


class FileDataset(ImageDataset):
    """Image files, decoded on access."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int], classes: Sequence[str]) -> None:
        # one array: reading a list changes reference counts, so that each worker process would copy it
        self.files = np.array([os.fsencode(file) for file in files], dtype=np.bytes_)
        super().__init__(labels, classes)

    def image(self, i: int, min_size: int | None = None) -> Image.Image:
        """Decode image i."""
        return decode_image(Path(self.name_of(i)), min_size=min_size)

    def name_of(self, i: int) -> str:
        """Path of image i."""
        return os.fsdecode(self.files[i])


class SubsetDataset(ImageDataset):
    """Some images of a data set.

    Args:
        dataset: that has them.
        indices: their numbers in it.
    """

    def __init__(self, dataset: ImageDataset, indices: Sequence[int]) -> None:
        self.dataset, self.indices = dataset, list(indices)
        super().__init__(dataset.labels[self.indices], dataset.classes)

    def image(self, i: int, min_size: int | None = None) -> Image.Image | Tensor:
        """Decode image i."""
        return self.dataset.image(self.indices[i], min_size)

    def name_of(self, i: int) -> str:
        """Name of image i in the data set."""
        return self.dataset.name_of(self.indices[i])

    def arrays(self) -> tuple[Tensor, Tensor] | None:
        """The images and labels of the subset, if the data set holds arrays."""
        arrays = self.dataset.arrays()
        return None if arrays is None else (arrays[0][self.indices], arrays[1][self.indices])
