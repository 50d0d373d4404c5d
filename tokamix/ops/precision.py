"""Autocast in operators: the dtype of their inputs, and float32 sums."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocast_enabled(x: Tensor) -> bool:
    """Whether autocast is enabled for x's device; False for the meta device, which torch does not support here."""
    if x.is_cuda:  # quicker than the type of a device
        return torch.is_autocast_enabled("cuda")
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype of matrix products on x: autocast's if it is enabled, otherwise x's own; float64 stays float64."""
    wide = x.dtype == torch.float64 or not autocast_enabled(x)
    return x.dtype if wide else torch.get_autocast_dtype(x.device.type)


def to_autocast_dtype(x: Tensor) -> Tensor:
    """x in the dtype of matrix products on it; no operator if it has it already."""
    dtype = autocast_dtype(x)
    return x if x.dtype == dtype else x.to(dtype)


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """A context that disables autocast; a null context if it is off, so that exported graphs do not contain it."""
    return torch.autocast(x.device.type, enabled=False) if autocast_enabled(x) else nullcontext()
