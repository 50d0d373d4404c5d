"""What is learned. A task turns a batch into a loss and a model into numbers; the engine knows nothing else of it."""

from typing import NamedTuple, Protocol

from torch import Tensor, nn

from tokamix.data import Loader

Logs = dict[str, Tensor]


class Moment(NamedTuple):
    """Where in the run a batch stands; all that is random about it follows from this."""

    seed: int
    epoch: int
    batch: int


class Task(Protocol):
    """One kind of training."""

    metric: str
    """The number of `evaluate` that the best weights have most of."""

    def prepare(self, model: nn.Module) -> None:
        """Set the model up before the optimizer sees it."""

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, moment: Moment) -> tuple[Tensor, Logs]:
        """The loss of a batch, and scalars to report that stay on the device."""

    def evaluate(self, model: nn.Module, loader: Loader, batch_size: int | None) -> dict[str, float]:
        """The numbers of a validation set; batches are filled up to `batch_size` if it is given."""
