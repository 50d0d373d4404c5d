"""Data sets that are read from front to back: base class of WebDataset shards and Hugging Face data sets.

The shards, shuffled for each epoch, are spread over a fixed number of lanes, and position p of an epoch is the next
image of lane p mod lanes. A lane shuffles within a buffer, and starts again if it is shorter than the others. So the
order does not depend on the number of processes, and if that number divides the number of lanes, each process reads
only its own shards.

To resume exactly, the stream is read up to the position, without decoding: streams have no random access. If reading is
slow too, unpack the shards into folders.
"""

import copy
import itertools
import random
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Self

from PIL import Image

from tokamix.data.decode import DataError, decode_image
from tokamix.data.rng import key

LANES = 16
BUFFER = 2048  # images, over all lanes


class Item(NamedTuple):
    """An encoded image with its label."""

    name: str
    label: int
    content: bytes


class ImageStream:
    """Images with labels in shards: `read` yields encoded images, `decode` decodes one.

    Args:
        shards: anything that `items` can read.
        size: images of all shards.
        classes: class names.
        sizes: images of each shard, if they are known.
    """

    def __init__(self, shards: Sequence[Any], size: int, classes: Sequence[str], sizes: Sequence[int] = ()) -> None:
        self.shards, self.size, self.sizes, self.classes = list(shards), size, list(sizes), tuple(classes)

    def __len__(self) -> int:
        return self.size

    def arrays(self) -> None:
        """A stream is never held in memory."""

    def items(self, shard: Any) -> Iterator[Item]:
        """The images of one shard."""
        raise NotImplementedError

    def at_most(self, count: int) -> Self:
        """At most the first `count` images, for evaluation; shards are taken to be shuffled."""
        part = copy.copy(self)
        if count < self.size:
            part.size, part.sizes = count, []
        return part

    def count(self, rank: int, world_size: int) -> int:
        """Number of images that a rank reads in evaluation."""
        if self._by_shard(world_size):
            return sum(self.sizes[rank::world_size])
        return len(range(rank, self.size, world_size))

    def read(self, seed: int, epoch: int, rank: int, world_size: int, shuffle: bool) -> Iterator[Item]:
        """The images of a rank: endless and shuffled for training; otherwise each exactly once over all ranks."""
        if shuffle:
            yield from self._read_lanes(seed, epoch, rank, world_size)
        elif self._by_shard(world_size):
            for shard, size in list(zip(self.shards, self.sizes, strict=True))[rank::world_size]:
                yield from self._checked(shard, size)
        else:
            sizes = self.sizes or itertools.repeat(None)
            images = itertools.chain.from_iterable(map(self._checked, self.shards, sizes))
            yield from itertools.islice(images, rank, self.size, world_size)

    def decode(self, item: Item, min_size: int | None = None) -> tuple[Image.Image, int]:
        """Decode an image and return it with its label."""
        return decode_image(item.content, item.name, min_size), item.label

    def name_of(self, item: Item) -> str:
        """Name of an image in messages."""
        return item.name

    def _by_shard(self, world_size: int) -> bool:
        return bool(self.sizes) and len(self.shards) >= world_size

    def _checked(self, shard: Any, size: int | None = None) -> Iterator[Item]:
        """The images of one shard; its number of images is checked if `size` is given."""
        number = 0
        for number, item in enumerate(self.items(shard), 1):
            if size is not None and number > size:
                break
            if not 0 <= item.label < len(self.classes):
                raise DataError(f"{item.name} has label {item.label}, but there are {len(self.classes)} classes")
            yield item
        if size not in (None, number):
            found = f"more than {size}" if number > size else f"only {number}"
            raise DataError(f"{shard} has {found} images, but its stated number is {size} (sizes.json)")

    def _read_lanes(self, seed: int, epoch: int, rank: int, world_size: int) -> Iterator[Item]:
        order = random.Random(key(seed, epoch, "shards")).sample(self.shards, len(self.shards))
        count = min(LANES, len(order))
        own = count % world_size == 0  # then a rank always reads the same lanes

        def lane(i: int) -> Iterator[Item]:
            rng = random.Random(key(seed, epoch, "lane", i))
            while True:
                items = itertools.chain.from_iterable(map(self._checked, order[i::count]))
                yield from _shuffle(items, BUFFER // count, rng)

        lanes = {i: lane(i) for i in range(count) if not own or i % world_size == rank}
        for position in itertools.count():
            if own and position % world_size != rank:
                continue
            item = next(lanes[position % count])
            if position % world_size == rank:
                yield item


def _shuffle(items: Iterator[Item], size: int, rng: random.Random) -> Iterator[Item]:
    """Shuffle within a buffer."""
    buffer = list(itertools.islice(items, size))
    for item in items:
        i = rng.randrange(size)
        yield buffer[i]
        buffer[i] = item
    rng.shuffle(buffer)
    yield from buffer
