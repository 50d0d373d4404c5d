"""What the engine calls an epoch: so many batches, wherever those of the data begin and end."""

from collections.abc import Iterator
from typing import Any

from tokamix.data import Loader


class Rounds:
    """A loader whose epochs are so many batches, however long those of the data are.

    Round n starts where round n - 1 ended, which may be in the middle of an epoch of the data, and reading goes on
    while the engine does something else in between. Batch k of a round is still a function of (seed, n, k) alone, so
    that a run can go on from any.
    """

    def __init__(self, loader: Loader, length: int) -> None:
        self.loader, self.length = loader, length
        self.dataset_size = loader.dataset_size
        self._position, self._reading = -1, iter(())  # the next batch, and the data from there on

    def __len__(self) -> int:
        return self.length if len(self.loader) else 0

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """Batches of a round, from batch `start` on."""
        first = number * self.length + start
        if self._position != first:
            self._position, self._reading = first, self.loader.endless(*divmod(first, len(self.loader)))
        while self._position < (number + 1) * self.length:
            self._position += 1
            yield next(self._reading)
