"""The choice of backend for an operator: which implementation runs, why, and how to force one.

Every operator exists twice: a plain PyTorch reference ("eager") that runs on any device in any dtype, and Triton
kernels ("triton"). A caller forces one with the `backend` argument; `TOKAMIX_BACKEND` and `use_backend` force one for
all operators; otherwise the kernels run wherever they can. Plain eager calls take the light path to the kernels; see
`tokamix.ops.operator`.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

BACKENDS = ("eager", "triton")
HAS_TRITON = find_spec("triton") is not None
# Triton's interpreter runs kernels on CPU tensors, for tests without a GPU.
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)

_log = logging.getLogger("tokamix")
_forced = os.environ.get("TOKAMIX_BACKEND") or None
_light = os.environ.get("TOKAMIX_LIGHT") != "0"
_traced = os.environ.get("TOKAMIX_TRACE") != "0"
_target: str | None = None


@contextmanager
def use_backend(backend: str | None) -> Iterator[None]:
    """Force one backend for every operator called inside the `with` block (None: choose freely)."""
    global _forced
    before, _forced = _forced, _check(backend)
    try:
        yield
    finally:
        _forced = before


@contextmanager
def use_light(light: bool) -> Iterator[None]:
    """Turn the light path of plain eager calls on or off inside the `with` block."""
    global _light
    before, _light = _light, light
    try:
        yield
    finally:
        _light = before


def is_light() -> bool:
    """Whether plain eager calls take the light path."""
    return _light


def traces_kernels() -> bool:
    """Whether compiled graphs hold the launches of kernels instead of operators; Triton's interpreter cannot."""
    return _traced and not INTERPRET


class CannotTraceError(Exception):
    """A launch that cannot be part of a compiled graph; the operator stays in the graph instead."""


def choose(
    op: str, *tensors: Tensor, backend: str | None = None, limit: str | None = None, better: str | None = None
) -> str:
    """Decide between "eager" and "triton" for a call of `op` on `tensors`.

    Args:
        op: the operator's name, for messages.
        tensors: the inputs; their device and dtype decide whether the kernels can run.
        backend: the backend that the caller forces, if any.
        limit: why the operator's kernels do not support this call ("head dim 300 is over 256"); None if they do.
        better: why plain PyTorch is preferred although the kernels could run; None if it is not.
    """
    wanted = forced(backend)
    if wanted == "eager":
        return "eager"
    reason = why_not(*tensors) or limit
    if reason is None and (wanted == "triton" or better is None):
        return "triton"
    if reason is not None and wanted == "triton":
        raise RuntimeError(f"{op} cannot run on the triton backend: {reason}; use backend='eager' or leave it unset")
    if not torch.compiler.is_compiling():
        _log.debug("%s runs eagerly: %s", op, reason or better)
    return "eager"


def check_floating(op: str, *tensors: Tensor | None) -> None:
    """Refuse whole numbers, whose results would be rounded in silence."""
    for t in tensors:
        if t is not None and not t.is_floating_point():
            raise ValueError(f"{op} needs floating-point tensors, got {t.dtype}; convert it with .float()")


def forced(backend: str | None = None) -> str | None:
    """The backend forced by the caller, `use_backend` or `TOKAMIX_BACKEND`; None if none is."""
    return _check(backend) or _check(_forced)


def why_not(*tensors: Tensor) -> str | None:
    """Why Triton kernels cannot run on these tensors; None if they can."""
    if not HAS_TRITON:
        return "Triton is not installed"
    if is_exporting():
        return "an exported graph must hold plain operators"
    if torch._C._are_functorch_transforms_active():
        return "torch.func transforms plain operators only"
    for t in tensors:
        if not t.is_cuda and not (INTERPRET and t.device.type == "cpu"):
            return f"tensors are on {t.device.type}, the kernels need CUDA"
        if t.dtype not in KERNEL_DTYPES:
            return f"{t.dtype} is not among float16, bfloat16 and float32"
    return None


def prefers_kernels(x: Tensor) -> bool:
    """Whether operators on x run in kernels unless they have a limit."""
    return _forced != "eager" and why_not(x) is None


def is_watched() -> bool:
    """Whether a compiler, tracer, dispatch mode or functorch transform needs to see registered operators."""
    return (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or is_in_torch_dispatch_mode()
        or torch._C._are_functorch_transforms_active()
    )


def is_exporting() -> bool:
    """Whether torch.export traces, without Dynamo (its default): in torch 2.11 every compile also exports."""
    return torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()


def is_exporting_fixed(*sizes: int) -> bool:
    """Whether torch.export traces and these sizes are numbers, so that a graph may hold constants made from them."""
    return is_exporting() and not any(isinstance(size, torch.SymInt) for size in sizes)


@contextmanager
def export_target(target: str | None) -> Iterator[None]:
    """Trace for a target of `tokamix.export` inside the `with` block: what one runtime is fast at, another is not."""
    global _target
    before, _target = _target, target
    try:
        yield
    finally:
        _target = before


def is_exporting_to(*targets: str) -> bool:
    """Whether torch.export traces for one of these targets; see `export_target`."""
    return is_exporting() and _target in targets


def sizes_unknown() -> AbstractContextManager[None]:
    """While torch.export traces, decide nothing by the example's sizes, so that the graph holds for all sizes.

    Views of windows compare their number with 1, which holds for some sizes only. PyTorch's ONNX exporter traces in
    this way altogether.
    """
    if not is_exporting():
        return nullcontext()
    return torch.fx.experimental._config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]


def _check(backend: str | None) -> str | None:
    if backend is not None and backend not in BACKENDS:
        raise ValueError(
            f"unknown backend {backend!r}: choose one of {', '.join(BACKENDS)} (argument, or TOKAMIX_BACKEND)"
        )
    return backend
