"""Regional compilation: each kind of block is compiled once instead of the whole network."""

from itertools import chain

import torch
from timm.layers import DropPath
from torch import Tensor, nn

MAX_BLOCK_KINDS = 64


def compile_blocks(model: nn.Module, graphs: bool, dynamic: bool | None = False, step: nn.Module | None = None) -> None:
    """Compile every block of a model in place, or the whole model if it has no blocks; parameter names stay.

    Args:
        model: changed in place.
        graphs: run each block as one CUDA graph. Not for gradient accumulation, because a graph writes gradients to the
            same memory each time, and not for DDP, which keeps gradients in its own buckets.
        dynamic: False if all images have one shape; None if they have several: the second shape triggers a compilation
            with dynamic shapes that serves all others.
        step: the module whose forward pass begins a training step, if that runs the model several times. CUDA graphs
            keep the outputs of one step apart and overwrite those of the last one.
    """
    for layer in model.modules():
        if type(layer) is DropPath:
            _make_rate_a_tensor(layer, next(model.parameters()).device)
    # Dynamo's default limit is 8 graphs per function; a pyramid in training and evaluation mode needs more
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_BLOCK_KINDS)
    if graphs:  # otherwise CUDA graphs treat each block as a new step and overwrite earlier outputs
        model.register_forward_pre_hook(
            lambda module, _: None if step is not None and module.training else _begin_step()
        )
        if step is not None:
            step.register_forward_pre_hook(lambda *_: _begin_step())
    for block in list(chain.from_iterable(repeated_blocks(model))) or [model]:
        block.compile(dynamic=dynamic, mode="reduce-overhead" if graphs else None)


def _begin_step() -> None:
    torch.compiler.cudagraph_mark_step_begin()


def repeated_blocks(model: nn.Module) -> list[nn.ModuleList | nn.Sequential]:
    """The innermost module lists of a model with several blocks of one class."""
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
    """Stochastic depth whose rate is a tensor: a Python number would be compiled in as a constant, once per rate."""

    keep: Tensor

    @property
    def drop_prob(self) -> float:
        """Fraction of images whose branch is dropped."""
        return self._rate

    @drop_prob.setter
    def drop_prob(self, rate: float) -> None:
        self._rate = rate
        self.keep.fill_(1 - rate)

    def forward(self, x: Tensor) -> Tensor:
        """Drop the branch of random images and scale the others up."""
        if not self.training:
            return x
        mask = torch.rand((len(x),) + (1,) * (x.ndim - 1), device=x.device) < self.keep
        return x * (mask / self.keep).to(x.dtype)


def _make_rate_a_tensor(layer: DropPath, device: torch.device) -> None:
    rate = layer.__dict__.pop("drop_prob")
    layer.__class__ = TensorDropPath
    layer.register_buffer("keep", torch.ones((), device=device), persistent=False)
    layer.drop_prob = rate
