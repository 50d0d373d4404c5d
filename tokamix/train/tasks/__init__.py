"""What is learned. A task turns a batch into a loss and a model into numbers; the engine knows nothing else of it."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from PIL.Image import Image
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
    shown: Mapping[str, str]
    """The numbers of `evaluate` in percent that people look at, and what to call them."""

    def prepare(self, model: nn.Module) -> None:
        """Set the model up before the optimizer sees it."""

    def loss(self, model: nn.Module, images: Any, targets: Any, moment: Moment) -> tuple[Tensor, Logs]:
        """The loss of a batch as the loader gives it, and scalars to report that stay on the device."""

    def evaluate(self, model: nn.Module, loader: Loader, batch_size: int | None) -> dict[str, float]:
        """The numbers of a validation set; batches are filled up to `batch_size` if it is given."""

    def picture(self, model: nn.Module) -> Image | None:
        """What the model makes of a few validation images, if that can be shown."""
