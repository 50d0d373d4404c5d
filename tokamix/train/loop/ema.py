"""Exponential moving average (EMA) of the weights."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


class Ema:
    """The average of a model's weights over the steps.

    Not timm's ModelEmaV3, which holds a second model: the average is kept as tensors and swapped with the weights for
    evaluation, so that one compiled, sharded model serves both. The decay starts low, as in TensorFlow:
    (1 + step) / (10 + step), until it reaches `decay`; otherwise the average of a short run would consist of its
    initial weights.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self.weights = dict(model.state_dict())  # views of the model's own memory
        tensors = model.state_dict(keep_vars=True)
        # modules may share a tensor, which has several names then: it has one average, or swapping would mix both up
        names = {id(tensor): name for name, tensor in tensors.items()}
        averages = {name: self.weights[name].detach().clone() for name in names.values()}
        self.average = {name: averages[names[id(tensor)]] for name, tensor in tensors.items()}
        pairs = [(_local(average), _local(self.weights[name])) for name, average in averages.items()]
        self._smooth = [pair for pair in pairs if pair[0].is_floating_point()]
        self._counters = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Move the average towards the weights; `step` counts the updates before this one."""
        decay = min(self.decay, (1 + step) / (10 + step))
        averages, weights = zip(*self._smooth, strict=True)
        torch._foreach_lerp_(averages, weights, 1 - decay)
        for average, counter in self._counters:
            average.copy_(counter)

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """The model has the averaged weights inside this context."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, weight in self._smooth + self._counters:
            current = weight.clone()
            weight.copy_(average)
            average.copy_(current)


def _local(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
