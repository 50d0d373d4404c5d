"""Under autocast, one cast of all weights for a forward pass, where autocast casts each weight by itself."""

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from itertools import repeat
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokamix.layers.bare import is_hooked
from tokamix.layers.conv import ImageConv, MapConv, PatchConv
from tokamix.ops import dispatch
from tokamix.ops.precision import autocast_enabled

NAMES = ("weight", "bias")
# layers that autocast casts the weights of, and that do nothing else with them; not DepthwiseConv, which takes float32
KINDS = frozenset((nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, MapConv, ImageConv, PatchConv))
# where the modules come from that call their layers under the autocast that the model is called under
PACKAGES = ("tokamix.", "timm.", "torch.nn.")
# off until its gain is measured: other threads and hooks can notice casts in the layers
ENABLED = os.environ.get("TOKAMIX_CAST_WEIGHTS", "0") != "0"

_lock = threading.RLock()  # of what follows, and of the casts in the layers
_running: dict[int, list["_Pass"]] = {}  # forward passes, by the id of the model


def casts_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a model's forward pass: linear layers and convolutions find weights that are already cast.

    A plain eager step of a network with hundreds of layers waits for the host, and up to a third of what it launches
    are casts of weights and of their gradients. Compiled, these are up to a quarter of the kernels.
    """

    @wraps(forward)
    def cast_first(model: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not ENABLED:
            return forward(model, x, *args, **kwargs)
        if torch.compiler.is_compiling():
            if _wanted(x):
                return _call_compiled(forward, model, x, *args, **kwargs)
            return forward(model, x, *args, **kwargs)
        with cast_weights(model, x.device if _wanted(x) else None):
            return forward(model, x, *args, **kwargs)

    return cast_first


@contextmanager
def cast_weights(model: nn.Module, device: torch.device | None) -> Iterator[None]:
    """Let the layers of a model read weights in autocast's dtype inside the `with` block (None: their own weights).

    The casts lie in the layers' `__dict__`, where Python looks first; `parameters()` and `state_dict()` do not see
    them. Another forward pass would, in another thread or within this one: it may be without autocast, need gradients,
    have other weights or launch on another stream. So while several passes run a model, its layers have their own
    weights. Calls of a model's parts beside its forward pass are not noticed, nor is `pickle`.

    The gradients of all weights meet in one node of the graph: that of one weight needs the whole backward pass.
    """
    this = _Pass()
    alone = _enter(model, this)
    try:
        found = _find(model, device) if device is not None and alone else []
        if device is not None and found:
            weights = list(dict.fromkeys(weight for _, _, weight in found))  # shared ones once
            casts = dict(zip(weights, _Cast.apply(torch.get_autocast_dtype(device.type), *weights), strict=True))
            this.set([(vars(layer), name, casts[weight]) for layer, name, weight in found], model)
        yield
    finally:
        _leave(model, this)


class _Pass:
    """A forward pass of a model that runs now, and the casts that it has put into the layers."""

    def __init__(self) -> None:
        self.layers: list[dict[str, Any]] = []
        self.names: list[str] = []

    def set(self, casts: list[tuple[dict[str, Any], str, Tensor]], model: nn.Module) -> None:
        """Put casts into the layers, unless another pass has begun since."""
        with _lock:
            if len(_running[id(model)]) == 1:
                self.layers, self.names = [layer for layer, _, _ in casts], [name for _, name, _ in casts]
                _run(map(dict.__setitem__, self.layers, self.names, [cast for _, _, cast in casts]))

    def undo(self) -> None:
        """Take the casts out of the layers."""
        _run(map(dict.pop, self.layers, self.names, repeat(None)))
        self.layers, self.names = [], []


def _enter(model: nn.Module, this: _Pass) -> bool:
    """Register a forward pass; while there are others, nobody has casts. Whether there are none."""
    with _lock:
        others = _running.setdefault(id(model), [])
        alone = not others
        for other in others:
            other.undo()
        others.append(this)
    return alone


def _leave(model: nn.Module, this: _Pass) -> None:
    with _lock:
        this.undo()
        passes = _running[id(model)]
        passes.remove(this)
        if not passes:
            del _running[id(model)]


def _run(calls: Iterator[Any]) -> None:
    """Exhaust an iterator over calls of C functions: Ctrl+C cannot stop it halfway, which would leave casts behind."""
    deque(calls, maxlen=0)


def _call_compiled(forward: Callable[..., Any], model: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A forward pass as torch.compile traces it, for which changed attributes of layers are variables of the graph."""
    # where a graph breaks in the forward pass, Python runs this function, and the parts of the model are compiled
    found = _find(model, x.device) if torch.compiler.is_compiling() else []
    if not found:
        return forward(model, x, *args, **kwargs)
    casts = _cast_each([weight for _, _, weight in found], torch.get_autocast_dtype(x.device.type))
    try:
        for (layer, name, _), cast in zip(found, casts, strict=True):
            layer._parameters[name] = cast
        return forward(model, x, *args, **kwargs)
    finally:
        for layer, name, weight in found:
            layer._parameters[name] = weight


def _find(model: nn.Module, device: torch.device) -> list[tuple[Any, str, Any]]:
    """The weights that autocast would cast: layer, name and weight."""
    found: list[tuple[Any, str, Any]] = []
    if not _is_known(model):
        return found
    for layer in _modules(model):
        if type(layer) in KINDS:
            for name in NAMES:
                weight = layer._parameters.get(name)
                if _is_castable(weight, device):
                    found.append((layer, name, weight))
    return found


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model that run as their classes say, under the model's autocast.

    Without those in compiled blocks of an eager model: these fuse their casts with other work, and CUDA graphs would
    copy weights that are new tensors in each step. Without modules from elsewhere and modules with hooks, and without
    what is in them: these may run their layers in float32, compute with their weights or change them.
    """
    for child in model.children():
        compiled = child._compiled_call_impl is not None and not torch.compiler.is_compiling()
        if not compiled and not is_hooked(child) and _is_known(child):
            yield child
            yield from _modules(child)


def _is_known(module: nn.Module) -> bool:
    return type(module).__module__.startswith(PACKAGES)


@torch.library.custom_op("tokamix::cast_each", mutates_args=())
def _cast_each(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Cast tensors, for compiled graphs: an operator that compilers leave as it is."""
    casts = [torch.empty_like(t, dtype=dtype) for t in tensors]
    torch._foreach_copy_(casts, list(tensors))
    return casts


@_cast_each.register_fake
def _(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    return [torch.empty_like(t, dtype=dtype) for t in tensors]


def _differentiate(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[list[Tensor | None], None]:
    casts = iter(_cast_each([grad for grad in grads if grad is not None], torch.float32))
    return [None if grad is None else next(casts) for grad in grads], None


_cast_each.register_autograd(_differentiate, setup_context=lambda ctx, inputs, output: ctx.set_materialize_grads(False))


class _Cast(torch.autograd.Function):
    """Cast tensors into parts of one; their gradients likewise."""

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, *weights: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return _cast(list(weights), dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or _are_batched(grads):  # gradients of gradients, or several gradients at once
            return None, *(None if grad is None else grad.float() for grad in grads)
        # parts of one tensor only where this saves launches: of the others, each is cast by itself
        plain = [grad for grad in grads if grad is not None and grad.is_contiguous()]
        parts = iter(_cast(plain, torch.float32))
        return None, *(
            None if grad is None else next(parts) if grad.is_contiguous() else grad.float() for grad in grads
        )


def _are_batched(grads: Sequence[Tensor | None]) -> bool:
    """Whether vmap runs the backward pass, which can do less with its tensors; `is_grads_batched` of torch.autograd."""
    if torch._C._are_functorch_transforms_active():
        return True
    return any(torch._C._functorch.is_legacy_batchedtensor(grad) for grad in grads if grad is not None)


def _cast(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    if not tensors:
        return ()
    flat = tensors[0].new_empty(sum(t.numel() for t in tensors), dtype=dtype)
    parts = torch._C._nn.unflatten_dense_tensors(flat, tensors)
    torch._foreach_copy_(parts, tensors)
    return tuple(parts)


def _wanted(x: Any) -> bool:
    if not isinstance(x, Tensor) or not autocast_enabled(x):
        return False
    if torch.compiler.is_compiling():
        if not x.is_cuda or dispatch.is_exporting() or torch._C._are_functorch_transforms_active():
            return False
    elif type(x) is not Tensor or not dispatch.is_light() or dispatch.is_watched():
        return False
    # of several processes, each sends its gradients while others are computed
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def _is_castable(weight: Any, device: torch.device) -> bool:
    """Whether a weight is a plain float32 parameter whose parts of a larger tensor stay aligned to 16 bytes."""
    return (
        type(weight) is nn.Parameter
        and weight.dtype is torch.float32
        and weight.device == device
        and weight.numel() % 8 == 0
        and weight.numel() > 0
        and weight.is_contiguous()
        and (weight.requires_grad or not torch.is_grad_enabled())
        # hooks of a weight that is not used would be called without a gradient
        and not weight._backward_hooks
        and not weight._post_accumulate_grad_hooks
    )
