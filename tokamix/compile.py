"""Compilation by blocks: a network's layers look alike, so one of each kind is compiled, not all of them in a row."""

from itertools import chain

import torch
from timm.layers import DropPath
from torch import Tensor, nn

KINDS = 64  # of blocks, at most


def compile_blocks(model: nn.Module, graphs: bool, dynamic: bool | None = False) -> None:
    """Compile every block of a model in place, or the whole of a model that has none; names stay.

    Args:
        model: is changed in place.
        graphs: launch each block as one CUDA graph. Not for gradients that add up over several passes, which a graph
            writes to the same place each time, nor for those that DDP keeps in its own places.
        dynamic: False where images have one shape alone; None where they have many, for which the second one makes a
            graph that serves all others.
    """
    for layer in model.modules():
        if type(layer) is DropPath:
            _as_tensor(layer, next(model.parameters()).device)
    # Dynamo gives up after 8 graphs of one function; a pyramid has as many kinds of blocks, and evaluates them besides
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, KINDS)
    if graphs:  # which take the blocks of one pass for passes of their own otherwise, and write over what they gave
        model.register_forward_pre_hook(lambda *_: torch.compiler.cudagraph_mark_step_begin())
    for block in list(chain.from_iterable(repeated_blocks(model))) or [model]:
        block.compile(dynamic=dynamic, mode="reduce-overhead" if graphs else None)


def repeated_blocks(model: nn.Module) -> list[nn.ModuleList | nn.Sequential]:
    """The innermost lists of a model that hold several blocks of one class."""
    lists = [
        module
        for module in model.modules()
        if isinstance(module, (nn.ModuleList, nn.Sequential))
        and len(module) > 1
        and len({type(block) for block in module}) == 1
        and any(True for _ in module[0].children())
    ]
    return [outer for outer in lists if not any(inner is not outer and inner in outer.modules() for inner in lists)]


class TensorDropPath(DropPath):
    """Stochastic depth whose rate is a tensor: a number is compiled in, and blocks differ in it."""

    keep: Tensor

    @property
    def drop_prob(self) -> float:
        """The share of images whose branch is dropped."""
        return self._rate

    @drop_prob.setter
    def drop_prob(self, rate: float) -> None:
        self._rate = rate
        self.keep.fill_(1 - rate)

    def forward(self, x: Tensor) -> Tensor:
        """Drop the branch of some images, and scale that of the others up."""
        if not self.training:
            return x
        kept = torch.rand((len(x),) + (1,) * (x.ndim - 1), device=x.device) < self.keep
        return x * (kept / self.keep).to(x.dtype)


def _as_tensor(layer: DropPath, device: torch.device) -> None:
    rate = layer.__dict__.pop("drop_prob")
    layer.__class__ = TensorDropPath
    layer.register_buffer("keep", torch.ones((), device=device), persistent=False)
    layer.drop_prob = rate
