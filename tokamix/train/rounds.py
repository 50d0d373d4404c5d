"""Training that is counted in iterations instead of epochs."""

from collections.abc import Iterator
from typing import Any

from tokamix.data import Loader


class Rounds:
    """A loader whose epochs are so many batches, however long those of the data are.

    Round n starts where round n - 1 ended, in the middle of an epoch of the data. Batch k of a round is still a
    function of (seed, n, k) alone, so that a run can go on from any.
    """

    def __init__(self, loader: Loader, length: int) -> None:
        self.loader, self.length = loader, length
        self.dataset_size = loader.dataset_size
        self._reading: tuple[int, Iterator[Any]] | None = None  # the next batch, and an epoch of the data from there on

    def __len__(self) -> int:
        return self.length if len(self.loader) else 0

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """Batches of a round, from batch `start` on."""
        for position in range(number * self.length + start, (number + 1) * self.length):
            reading = self._from(position)
            batch = next(reading, None)
            if batch is None:
                raise RuntimeError(f"an epoch of the data is shorter than its {len(self.loader)} batches")
            self._reading = (position + 1, reading)
            yield batch

    def _from(self, position: int) -> Iterator[Any]:
        """The data from this batch on; what was read for the round before goes on, so that nothing is decoded twice."""
        epoch, step = divmod(position, len(self.loader))
        if self._reading is not None and self._reading[0] == position and step:
            return self._reading[1]
        return self.loader.epoch(epoch, start=step)
