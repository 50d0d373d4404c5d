"""Hugging Face data sets, streamed."""

import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tokamix.data.decode import DataError, first_line
from tokamix.data.images.streams import ImageStream, Item
from tokamix.data.splits import TRAIN_NAMES, VAL_NAMES, split_by_class


def open_hub(source: str) -> tuple[ImageStream, ImageStream]:
    """Open the training and validation splits of `user/name`, `user/name:config` or a local folder.

    A fifth of the training split is held out if there is no validation split; its labels are read once for that.
    """
    try:
        from datasets import load_dataset
    except ImportError:
        raise ImportError(f"hf:{source} needs datasets: pip install 'tokamix[data]'") from None
    name, _, config = source.partition(":")
    try:
        splits = load_dataset(name, config or None, streaming=True)
    except Exception as error:
        raise DataError(f"hf:{source} cannot be opened: {first_line(error)}") from None
    train = next((split for split in TRAIN_NAMES if split in splits), None)
    val = next((split for split in VAL_NAMES if split in splits), None)
    if train is None:
        raise DataError(f"hf:{source} has the splits {', '.join(splits)}, but no training split ('train')")

    def stream(split: str) -> HubStream:
        info = (splits[split].info.splits or {}).get(split)
        return HubStream(splits[split], f"hf:{source} ({split})", info.num_examples if info else None)

    whole = stream(train)
    return whole.hold_out() if val is None else (whole, stream(val))


class HubStream(ImageStream):
    """One split of a Hugging Face data set.

    Args:
        split: an IterableDataset with a column of type Image and one of type ClassLabel.
        name: for messages.
        size: number of images; None: they are counted.
        kept: a mask of the rows of each shard, for a part of the split.
    """

    def __init__(
        self, split: Any, name: str, size: int | None = None, kept: Sequence[np.ndarray] | None = None
    ) -> None:
        from datasets import ClassLabel
        from datasets import Image as ImageFeature

        features = split.features or {}
        images = [column for column, feature in features.items() if isinstance(feature, ImageFeature)]
        labels = [column for column, feature in features.items() if isinstance(feature, ClassLabel)]
        if not (images and labels):
            kinds = ", ".join(f"{column} ({type(feature).__name__})" for column, feature in features.items())
            raise DataError(
                f"{name} needs one column of type Image and one of type ClassLabel; it has {kinds or 'none'}"
            )
        self.split, self.name, self.column = split, name, images[0]
        self.label = "label" if "label" in labels else labels[0]
        rows = split.select_columns([self.column, self.label]).cast_column(self.column, ImageFeature(decode=False))
        shards = [(i, rows.shard(num_shards=rows.num_shards, index=i)) for i in range(rows.num_shards)]
        sizes: list[int] = []
        self.kept = kept
        if kept is not None:
            shards = [shard for shard in shards if kept[shard[0]].any()]
            sizes = [int(kept[i].sum()) for i, _ in shards]
            size = sum(sizes)
        elif size is None:  # not in the data set's metadata: read it once
            size = sum(1 for _ in rows)
        super().__init__(shards, size, features[self.label].names, sizes)

    def items(self, shard: tuple[int, Any]) -> Iterator[Item]:
        """The images of one shard."""
        index, rows = shard
        for i, row in enumerate(rows):
            if self.kept is not None and not self.kept[index][i]:
                continue
            image = row[self.column]
            name = f"{self.name}, image {i} of shard {index}"
            content = image["bytes"] if image["bytes"] is not None else _read(image["path"], name)
            yield Item(name, int(row[self.label]), content)

    def hold_out(self) -> "tuple[HubStream, HubStream]":
        """Split into training and validation: a fixed fifth of each class is held out."""
        rows = self.split.select_columns([self.label])
        shards = [rows.shard(num_shards=rows.num_shards, index=i) for i in range(rows.num_shards)]
        labels = [[int(row[self.label]) for row in shard] for shard in shards]
        held_out = np.zeros(sum(map(len, labels)), dtype=bool)
        held_out[split_by_class([label for part in labels for label in part])[1]] = True
        ends = list(itertools.accumulate(map(len, labels)))
        masks = np.split(held_out, ends[:-1])
        train = HubStream(self.split, self.name, kept=[~mask for mask in masks])
        return train, HubStream(self.split, f"{self.name}, held out", kept=masks)


def _read(path: str, name: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DataError(f"{name} cannot be read: {error}") from None
