"""Data sets with random access: what `[i]` and `arrays()` give, whatever the pictures come from."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from tokamix.data.decode import DataError, decode

Picture = Image.Image | Tensor


class ImageDataset:
    """Pictures with labels: `len()`, and `[i]` -> (RGB picture or uint8 tensor (C, H, W), label)."""

    def __init__(self, labels: Sequence[int] | np.ndarray | Tensor, classes: Sequence[str]) -> None:
        self.labels = torch.as_tensor(labels, dtype=torch.int64)
        self.classes = tuple(classes)
        self.check_labels()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Picture, int]:
        return self.picture(i), int(self.labels[i])

    def picture(self, i: int, at_least: int | None = None) -> Picture:
        """Picture i; `at_least` is a side in pixels that decoding need not exceed."""
        raise NotImplementedError

    def name_of(self, i: int) -> str:
        """What to call picture i in messages."""
        return f"picture {i}"

    def arrays(self) -> tuple[Tensor, Tensor] | None:
        """All pictures (N, C, H, W) as uint8 and labels (N,), for sets that fit into memory; else None."""
        return None

    def check_labels(self) -> None:
        """Raise where a label has no class."""
        wrong = ((self.labels < 0) | (self.labels >= len(self.classes))).nonzero().flatten().tolist()
        if wrong:
            raise DataError(
                f"{self.name_of(wrong[0])} has label {int(self.labels[wrong[0]])}, but there are {len(self.classes)}"
                f" classes (0 to {len(self.classes) - 1}); {len(wrong)} of {len(self)} labels are out of range"
            )


class ArrayDataset(ImageDataset):
    """Pictures of one size, held as one uint8 tensor (N, C, H, W)."""

    def __init__(self, images: Tensor, labels: Sequence[int] | np.ndarray | Tensor, classes: Sequence[str]) -> None:
        self.images = images
        super().__init__(labels, classes)

    def picture(self, i: int, at_least: int | None = None) -> Tensor:
        """Picture i as a tensor."""
        return self.images[i]

    def arrays(self) -> tuple[Tensor, Tensor]:
        """The tensors themselves."""
        return self.images, self.labels


class FileDataset(ImageDataset):
    """Picture files, decoded when they are asked for."""

    def __init__(self, files: Sequence[Path], labels: Sequence[int], classes: Sequence[str]) -> None:
        # one array: a list of a million objects would be copied into each worker, touch by touch
        self.files = np.array([os.fsencode(file) for file in files], dtype=np.bytes_)
        super().__init__(labels, classes)

    def picture(self, i: int, at_least: int | None = None) -> Image.Image:
        """Picture i, decoded."""
        return decode(Path(self.name_of(i)), at_least=at_least)

    def name_of(self, i: int) -> str:
        """Its path."""
        return os.fsdecode(self.files[i])
