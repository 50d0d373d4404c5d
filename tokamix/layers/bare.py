"""Which layers a fused kernel may replace."""

from typing import Any, TypeGuard, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

Layer = TypeVar("Layer", bound=nn.Module)


def is_bare(layer: nn.Module, kind: type[Layer]) -> TypeGuard[Layer]:
    """Whether a float32 layer is exactly of this class and its call does nothing else.

    Hooks, adapters, parametrisations and quantised weights need the call itself.
    """
    if type(layer) is not kind or is_hooked(layer):
        return False
    weight: Any = layer.weight
    return type(weight) in (nn.Parameter, Tensor) and weight.dtype is torch.float32 and weight.is_cpu


def is_hooked(*layers: nn.Module) -> bool:
    """Whether the call of a layer does more than its class says."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return True
    return any(layer._forward_hooks or layer._forward_pre_hooks or "forward" in vars(layer) for layer in layers)
