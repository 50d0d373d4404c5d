"""Fixed-length epochs, independent of the data set's boundaries."""

from collections.abc import Iterator
from typing import Any

from tokamix.data import Loader
from tokamix.recipes import Recipe


class FixedLengthEpochs:
    """A loader whose epochs have a given number of batches: the evaluation intervals of a run.

    Epoch n starts where epoch n - 1 ended, which may be in the middle of an epoch of the data; reading ahead continues
    over the boundary. Batch k of an epoch is still a function of (seed, n, k) alone, so that a run can resume anywhere.
    """

    def __init__(self, loader: Loader, length: int) -> None:
        self.loader, self.length = loader, length
        self.dataset_size = loader.dataset_size
        self._next, self._batches = -1, iter(())  # number of the next batch, and the data from there on

    def __len__(self) -> int:
        return self.length if len(self.loader) else 0

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """Batches of an epoch, from batch `start` on."""
        first = number * self.length + start
        if self._next != first:
            self._next, self._batches = first, self.loader.endless(*divmod(first, len(self.loader)))
        while self._next < (number + 1) * self.length:
            self._next += 1
            yield next(self._batches)


def evaluation_intervals(loader: Loader, recipe: Recipe) -> FixedLengthEpochs:
    """The training batches between two evaluations: an epoch of the data, or the recipe's `eval_every` iterations."""
    if recipe.iterations is None:
        return FixedLengthEpochs(loader, len(loader))
    return FixedLengthEpochs(loader, (recipe.eval_every or recipe.iterations) * recipe.accumulate)
