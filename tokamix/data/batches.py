"""Which samples form each batch, as a function of (seed, epoch, step) alone.

Batch k of an epoch is the same for any number of workers and after resuming. With several processes each global batch
is split: rank r takes positions r, r + world_size, ... of it.
"""

import itertools
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tokamix.data.decode import DataError
from tokamix.data.rng import generator

MAX_REPLACEMENTS = 64  # samples that are tried in place of one that cannot be decoded
STREAM_REPLACEMENTS = 8  # the same for streams, whose replacements travel with the batch, still encoded


class Request(NamedTuple):
    """A batch to read: the epoch, the positions of its samples and their indices or encoded images.

    `spares` are encoded images of a stream that may replace images that cannot be decoded.
    """

    epoch: int
    positions: list[int]
    items: list[Any]
    spares: list[Any]


@dataclass(frozen=True)
class BatchOrder(ABC):
    """The batches of one rank.

    Attributes:
        dataset_size: samples of an epoch over all ranks.
        batch_size: samples of one batch of one rank.
        rank: of this process.
        world_size: number of processes.
        train: shuffled, and an incomplete last batch is dropped; otherwise every sample comes exactly once over all
            ranks, in order, and the last batch may be smaller (or missing for some ranks).
        seed: of the order.
    """

    dataset_size: int
    batch_size: int
    rank: int
    world_size: int
    train: bool
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}, but must be at least 1")
        if not 0 <= self.rank < self.world_size:
            raise ValueError(f"rank {self.rank} of {self.world_size} processes does not exist; ranks count from 0")
        if self.dataset_size == 0:
            raise DataError(f"the {'training' if self.train else 'validation'} split is empty")
        if self.train and self.dataset_size < self.global_batch:
            raise ValueError(
                f"{self.dataset_size} training images do not fill one batch of {self.global_batch}; lower batch_size"
            )

    @property
    def global_batch(self) -> int:
        """Samples of one batch over all ranks."""
        return self.batch_size * self.world_size

    def __len__(self) -> int:
        steps, rest = divmod(self.dataset_size, self.global_batch)
        return steps if self.train else steps + (self.rank < rest)

    def positions(self, step: int) -> range:
        """Positions of this rank's samples in the epoch."""
        start = step * self.global_batch
        return range(start + self.rank, min(start + self.global_batch, self.dataset_size), self.world_size)

    @abstractmethod
    def requests(self, epoch: int, start: int) -> Iterator[Request]:
        """The batches of an epoch, from step `start` on."""

    @abstractmethod
    def replacements(self, request: Request, n: int) -> Iterator[Any]:
        """Items that may replace item n of a training batch, the nearest first."""


@dataclass(frozen=True)
class IndexOrder(BatchOrder):
    """Batches of a data set with random access.

    Attributes:
        repeats: copies of each image in an epoch (repeated augmentation); the epoch's length stays the same.
    """

    repeats: int = 1

    def indices(self, epoch: int) -> Tensor:
        """The index of the sample at each position of an epoch."""
        if not self.train:
            return torch.arange(self.dataset_size)
        order = torch.randperm(self.dataset_size, generator=generator(self.seed, epoch, "order"))
        # copies are neighbours, so that several ranks get one each
        return order.repeat_interleave(self.repeats)[: self.dataset_size] if self.repeats > 1 else order

    def requests(self, epoch: int, start: int) -> Iterator[Request]:
        """The batches of an epoch, from step `start` on."""
        order = self.indices(epoch)
        for step in range(start, len(self)):
            positions = list(self.positions(step))
            yield Request(epoch, positions, order[positions].tolist(), [])

    def replacements(self, request: Request, n: int) -> Iterator[int]:
        """The samples that follow in the epoch."""
        order, position = self.indices(request.epoch), request.positions[n]
        for other in range(position + 1, position + min(len(order), 1 + MAX_REPLACEMENTS)):
            yield int(order[other % len(order)])


@dataclass(frozen=True)
class StreamOrder(BatchOrder):
    """Batches of an `ImageStream`, which has no random access: it is read from the front, also to resume.

    Attributes:
        stream: the data set.
        spare: send replacements for undecodable images along with training batches.
    """

    stream: Any = None
    spare: bool = False

    def __len__(self) -> int:
        if self.train:
            return super().__len__()
        return math.ceil(self.stream.count(self.rank, self.world_size) / self.batch_size)

    def requests(self, epoch: int, start: int) -> Iterator[Request]:
        """The batches of an epoch, from step `start` on."""
        images = self.stream.read(self.seed, epoch, self.rank, self.world_size, shuffle=self.train)
        ahead: deque[Any] = deque()
        spares = max(0, STREAM_REPLACEMENTS + 1 - self.batch_size) if self.train and self.spare else 0
        for step in range(len(self)):
            ahead.extend(itertools.islice(images, self.batch_size + spares - len(ahead)))
            items = [ahead.popleft() for _ in range(min(self.batch_size, len(ahead)))]
            if step >= start:
                first = step * self.global_batch + self.rank
                positions = [first + i * self.world_size for i in range(len(items))]
                yield Request(epoch, positions, items, list(ahead))

    def replacements(self, request: Request, n: int) -> Iterator[Any]:
        """The other images of the batch, then the spare ones, which follow in the stream."""
        yield from (*request.items[n + 1 :], *request.items[:n], *request.spares)


class BatchSampler:
    """The sampler of PyTorch's DataLoader: yields the batches of an epoch, or endlessly from a given step on."""

    def __init__(self, order: BatchOrder) -> None:
        self.order, self.epoch, self.start, self.endless = order, 0, 0, False

    def __iter__(self) -> Iterator[Request]:
        epoch, endless = self.epoch, self.endless
        yield from self.order.requests(epoch, self.start)
        while endless:
            epoch += 1
            yield from self.order.requests(epoch, 0)

    def __len__(self) -> int:
        return len(self.order) - self.start
