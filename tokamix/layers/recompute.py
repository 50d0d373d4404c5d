"""Recompute cheap functions in the backward pass of compiled models."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tokamix.ops import dispatch


def recompute_in_backward(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return function(x); a model compiled for a GPU recomputes it in the backward pass instead of storing it.

    For cheap functions that feed a matrix product, where the compiler would store both input and output.
    """
    if torch.compiler.is_compiling() and torch.is_grad_enabled() and x.is_cuda and not dispatch.is_exporting():
        return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    return function(x)
