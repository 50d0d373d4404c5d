"""A moving average of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Ema:
    """The average of a model's weights over the steps.

    It is kept as tensors and not as a second model: for its evaluation it changes places with the weights, so that the
    one compiled, sharded model serves both. The decay starts low, as TensorFlow's does: (1 + step) / (10 + step), until
    it reaches `decay`; a short run's average would otherwise be made of the weights it began with.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = dict(model.state_dict())  # they share the memory of the model in use
        self.average = {name: tensor.detach().clone() for name, tensor in self.weights.items()}
        pairs = [(_local(self.average[name]), _local(self.weights[name])) for name in self.weights]
        self._smooth = [pair for pair in pairs if pair[0].is_floating_point()]
        self._counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the weights after so many earlier steps."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages, weights = zip(*self._smooth, strict=True)
        torch._foreach_lerp_(averages, weights, 1 - decay)
        for average, counter in self._counters:
            average.copy_(counter)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The model has the average for its weights inside this context."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, weight in self._smooth + self._counters:
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
