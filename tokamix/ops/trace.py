"""Kernel launches as part of compiled graphs.

torch.compile sees a launch that `torch.library.wrap_triton` records. The code that Inductor generates then launches the
kernel itself, which takes a fraction of the time that a registered operator takes on the host.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from triton.runtime.jit import JITFunction

from tokamix.ops import dispatch


def record_launch(kernel: JITFunction, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """Record `kernel[grid](*arguments, **options)` in the graph that is being traced.

    Raises `dispatch.CannotTraceError` if the generated code would launch another kernel.
    """
    if options.pop("maxnreg", None) is not None:
        raise dispatch.CannotTraceError("Inductor of torch 2.11 drops the limit on registers")
    _remember_analyses()
    torch.library.wrap_triton(kernel)[grid](*arguments, **options)


def _remember_analyses() -> None:
    """Let PyTorch analyse once for equal launches which tensors they write.

    It compiles the kernel to find out, in each of five stages, for each launch: half of the time that compiling a model
    takes.
    """
    from torch._higher_order_ops import triton_kernel_wrap

    for name in ("identify_mutated_tensors", "identify_accessed_tensors"):  # in torch 2.11 and in torch 2.15
        analyse = getattr(triton_kernel_wrap, name, None)
        if analyse is not None and not hasattr(analyse, "__wrapped__"):
            setattr(triton_kernel_wrap, name, _remember(analyse))


def _remember(analyse: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[Any, Any] = {}

    @wraps(analyse)
    def look_up(kernel: Any, arguments: dict[str, Any], *others: Any) -> Any:
        function = kernel if isinstance(kernel, JITFunction) else kernel.fn
        if not str(function.__module__).startswith("tokamix."):
            return analyse(kernel, arguments, *others)
        key = (function, frozenset((name, _kind(x)) for name, x in arguments.items()))
        if key not in known:
            known[key] = analyse(kernel, arguments, *others)
        return known[key]

    return look_up


def _kind(argument: Any) -> Any:
    """What the code of a kernel depends on: the dtype of a tensor (or of Inductor's description of one), or a value."""
    if isinstance(argument, Tensor):
        return argument.dtype
    return argument.get_dtype() if hasattr(argument, "get_dtype") else (type(argument), argument)
