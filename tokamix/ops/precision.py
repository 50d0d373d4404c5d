"""What autocast means for an operator: which dtype it gets, and how it keeps its sums wide."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def autocast_enabled(x: Tensor) -> bool:
    """Whether autocast is on for x's device (the meta device has none, and asking for it raises)."""
    return x.device.type != "meta" and torch.is_autocast_enabled(x.device.type)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype matrix products on x run in: autocast's where it is on, else x's own. It leaves float64 alone."""
    wide = x.dtype == torch.float64 or not autocast_enabled(x)
    return x.dtype if wide else torch.get_autocast_dtype(x.device.type)


def no_autocast(x: Tensor) -> AbstractContextManager[Any]:
    """Autocast off, where it is on: a plain context otherwise, so that exported graphs hold no trace of it."""
    return torch.autocast(x.device.type, enabled=False) if autocast_enabled(x) else nullcontext()
