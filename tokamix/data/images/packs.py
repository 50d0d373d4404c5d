"""Packs: encoded images in .npz files with `blob`, `offsets`, `labels` and `classes`."""

import bisect
import itertools
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tokamix.data.decode import DataError, decode_image
from tokamix.data.images.datasets import ImageDataset
from tokamix.data.splits import VAL_NAMES, split_by_class

ARRAY_BYTES = 4 << 30  # larger packs are decoded on access


class PackDataset(ImageDataset):
    """Encoded images of packs; decoded once if they have one size, else on access.

    Args:
        contents: encoded images.
        labels: of the images.
        classes: class names.
        packs: (path, count) of the packs that `contents` was joined from.
        indices: numbers of the images in the joined packs, if `contents` is a part of them.
    """

    def __init__(
        self,
        contents: Sequence[np.ndarray],
        labels: Any,
        classes: Sequence[str],
        packs: Sequence[tuple[str, int]],
        indices: Sequence[int] | None = None,
    ) -> None:
        self.contents, self.packs = contents, packs
        self.indices = range(len(contents)) if indices is None else indices
        self._arrays: tuple[Tensor, Tensor] | None = None
        self._tried = False
        super().__init__(labels, classes)

    def image(self, i: int, min_size: int | None = None) -> Any:
        """Decode image i."""
        return decode_image(self.contents[i].tobytes(), self.name_of(i), min_size)

    def name_of(self, i: int) -> str:
        """Number of image i in its pack."""
        number = self.indices[i]
        starts = [0, *itertools.accumulate(count for _, count in self.packs)]
        pack = bisect.bisect_right(starts, number) - 1
        return f"image {number - starts[pack]} of {self.packs[pack][0]}"

    def arrays(self) -> tuple[Tensor, Tensor] | None:
        """All images, decoded once, if they have one size and fit into memory."""
        if not self._tried:
            images, self._tried = self._decode_all(), True
            self._arrays = None if images is None else (images, self.labels)
        return self._arrays

    def _decode_all(self) -> Tensor | None:
        width, height = self.image(0).size
        if 3 * width * height * len(self) > ARRAY_BYTES:
            return None
        images = torch.empty(len(self), 3, height, width, dtype=torch.uint8)
        with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
            for block in torch.arange(len(self)).split(1024):
                pixels = [np.asarray(image) for image in pool.map(self.image, block.tolist())]
                if any(p.shape[:2] != (height, width) for p in pixels):
                    return None
                images[block] = torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2)
        return images

    def subset(self, indices: Sequence[int]) -> "PackDataset":
        """A part of the images; they keep their names."""
        numbers = [self.indices[i] for i in indices]
        return PackDataset(
            [self.contents[i] for i in indices], self.labels[list(indices)], self.classes, self.packs, numbers
        )


def open_packs(source: str) -> tuple[PackDataset, PackDataset]:
    """Open packs, separated by commas; names that end in _val or _test are for validation, else a fifth is held out.

    Validation packs alone have no training images: enough for evaluation.
    """
    paths = [Path(part.strip()).expanduser() for part in source.split(",")]
    is_val = [path.stem.lower().rpartition("_")[2] in VAL_NAMES for path in paths]
    if all(is_val):
        val = _join([_read_pack(path) for path in paths])
        return val.subset([]), val
    train = _join([_read_pack(path) for path, val in zip(paths, is_val, strict=True) if not val])
    if any(is_val):
        return train, _join([_read_pack(path) for path, val in zip(paths, is_val, strict=True) if val])
    train_indices, val_indices = split_by_class(train.labels)
    return train.subset(train_indices), train.subset(val_indices)


def _read_pack(path: Path) -> PackDataset:
    try:
        with np.load(path) as pack:
            blob, offsets, labels = pack["blob"], pack["offsets"], pack["labels"]
            classes = [name.decode() if isinstance(name, bytes) else str(name) for name in pack["classes"]]
    except FileNotFoundError:
        raise DataError(f"the file {path} does not exist") from None
    except KeyError as error:
        raise DataError(
            f"{path} is not a pack of images: {error.args[0]}; expected blob, offsets, labels, classes"
        ) from None
    except Exception as error:  # zip, NumPy and the decompressor each have their own
        raise DataError(f"{path} is corrupt, truncated or not an .npz file: {error}") from None
    if offsets.dtype.kind not in "iu" or labels.dtype.kind not in "iu":
        raise DataError(f"{path} has offsets or labels that are not whole numbers")
    offsets = offsets.astype(np.int64)  # the differences of unsigned numbers are never negative
    if len(offsets) != len(labels) + 1 or offsets[-1] > len(blob) or (np.diff(offsets) < 0).any():
        raise DataError(f"{path} is inconsistent: {len(labels)} labels, {len(offsets)} offsets, {len(blob)} bytes")
    contents = [blob[a:b] for a, b in itertools.pairwise(offsets)]
    return PackDataset(contents, labels, classes, [(str(path), len(contents))])


def _join(packs: list[PackDataset]) -> PackDataset:
    for pack in packs:
        if pack.classes != packs[0].classes:
            raise DataError(
                f"{packs[0].packs[0][0]} and {pack.packs[0][0]} have different classes and cannot be joined"
            )
    contents = [content for pack in packs for content in pack.contents]
    labels = torch.cat([pack.labels for pack in packs])
    return PackDataset(contents, labels, packs[0].classes, [entry for pack in packs for entry in pack.packs])
