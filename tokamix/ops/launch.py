"""Kernel launches without the work that Triton repeats in every call.

`kernel[grid](...)` binds the arguments, derives the specialisation of each one and looks up the compiled kernel: tens
of microseconds in Python. A `Launch` knows everything but the tensors, so from the second call on it looks at their
dtypes and addresses only. It uses the interface between Triton's JITFunction and its compiled kernels, the same in
Triton 3.6 and 3.9; if that is missing, every call goes through `kernel[grid]`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.functional_tensor import FunctionalTensor
from triton import knobs
from triton.runtime import driver

from tokamix.ops import dispatch
from tokamix.ops.trace import record_launch

ALIGNMENT = 16  # bytes: Triton compiles different code for pointers that are no multiple of it
CACHE_SIZE = 1024  # launches that an operator keeps: one for each combination of shapes, strides and options
DIRECT = not dispatch.INTERPRET and torch.version.hip is None  # ROCm specialises on the sizes of tensors, too


class Launch:
    """A kernel with its grid, numbers and constants; call it with the tensors.

    The kernel takes tensors first, then numbers, then constants.

    Args:
        kernel: a function decorated with triton.jit.
        grid: number of programs along each axis.
        numbers: the arguments after the tensors, in order.
        constants: the arguments after those, by name; and options such as num_warps.
    """

    __slots__ = ("arguments", "compiled", "constants", "grid", "kernel", "numbers")

    def __init__(self, kernel: Any, grid: tuple[int, ...], *numbers: Any, **constants: Any) -> None:
        self.kernel, self.numbers, self.constants = kernel, numbers, constants
        self.grid = (*grid, 1, 1)[:3]
        self.arguments = (*numbers, *(constants[name] for name in kernel.arg_names if name in constants))
        self.compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(self, *tensors: Tensor) -> None:
        """Launch the kernel on the current stream of the tensors' device; a compiler that traces records it."""
        if isinstance(tensors[0], FunctionalTensor):
            record_launch(self.kernel, self.grid, *tensors, *self.numbers, **self.constants)
            return
        if not DIRECT or not dispatch.is_light() or _has_hooks():
            with _device_of(tensors):
                self._launch(tensors)
            return
        device = driver.active.get_current_device()
        pointers, key = [], [device]
        for x in tensors:
            pointer = x.data_ptr()
            pointers.append(pointer)
            key += (x.dtype, pointer % ALIGNMENT == 0, x.get_device())
        found = self.compiled.get(tuple(key))
        if found is None:
            with _device_of(tensors):
                compiled = self._launch(tensors)
            if tensors[0].get_device() == device and _is_launchable(compiled):
                self.compiled[tuple(key)] = (compiled.run, compiled.function, compiled.packed_metadata, compiled)
            return
        run, function, metadata, _ = found
        stream = driver.active.get_current_stream(device)
        run(*self.grid, stream, function, metadata, None, None, None, *pointers, *self.arguments)

    def _launch(self, tensors: tuple[Tensor, ...]) -> Any:
        return self.kernel[self.grid](*tensors, *self.numbers, **self.constants)


def empty_like(x: Tensor) -> Tensor:
    """An empty contiguous tensor of the shape and dtype of x; in less time than torch.empty takes."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _device_of(tensors: tuple[Tensor, ...]) -> AbstractContextManager[Any]:
    """Make the GPU that holds the tensors the current one, on which Triton launches."""
    devices = list(dict.fromkeys(str(x.device) for x in tensors))
    if len(devices) > 1:
        raise ValueError(f"a kernel needs all tensors on one device, got {' and '.join(devices)}; move them with .to()")
    return torch.cuda.device(tensors[0].device) if tensors[0].is_cuda else nullcontext()


def _has_hooks() -> bool:
    """Whether a profiler of Triton watches launches."""
    hooks = knobs.runtime.launch_enter_hook
    return bool(getattr(hooks, "calls", hooks))


def _is_launchable(compiled: Any) -> bool:
    return all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata"))
