"""Under autocast, one cast of all weights for a forward pass, where autocast casts each weight by itself."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
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
ENABLED = os.environ.get("TOKAMIX_CAST_WEIGHTS", "1") != "0"


def casts_weights(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator of a model's forward pass: linear layers and convolutions find weights that are already cast.

    A plain eager step of a network with hundreds of layers waits for the host, and up to a third of what it launches
    are casts of weights and of their gradients. Compiled, these are up to a quarter of the kernels.
    """

    @wraps(forward)
    def cast_first(model: nn.Module, x: Any, *args: Any, **kwargs: Any) -> Any:
        if not _wanted(x):
            return forward(model, x, *args, **kwargs)
        if torch.compiler.is_compiling():
            return _call_compiled(forward, model, x, *args, **kwargs)
        with cast_weights(model, x.device):
            return forward(model, x, *args, **kwargs)

    return cast_first


@contextmanager
def cast_weights(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Let the layers of a model read weights in autocast's dtype inside the `with` block.

    The casts lie in the layers' `__dict__`, where Python looks first; `parameters()` and `state_dict()` do not see
    them.
    """
    found = _find(model, device)
    if not found:
        yield
        return
    weights = list(dict.fromkeys(weight for _, _, weight in found))  # shared ones once
    casts = dict(zip(weights, _Cast.apply(torch.get_autocast_dtype(device.type), *weights), strict=True))
    for layer, name, weight in found:
        vars(layer)[name] = casts[weight]
    try:
        yield
    finally:
        for layer, name, _ in found:
            vars(layer).pop(name, None)


def _call_compiled(forward: Callable[..., Any], model: nn.Module, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """A forward pass as torch.compile traces it, for which changed attributes of layers are variables of the graph."""
    found = _find(model, x.device)
    if not found:
        return forward(model, x, *args, **kwargs)
    casts = _cast_each([weight for _, _, weight in found], torch.get_autocast_dtype(x.device.type))
    for (layer, name, _), cast in zip(found, casts, strict=True):
        layer._parameters[name] = cast
    out = forward(model, x, *args, **kwargs)
    for layer, name, weight in found:
        layer._parameters[name] = weight
    return out


def _find(model: nn.Module, device: torch.device) -> list[tuple[Any, str, Any]]:
    """The weights that autocast would cast: layer, name and weight."""
    found: list[tuple[Any, str, Any]] = []
    for layer in model.modules() if torch.compiler.is_compiling() else _eager_modules(model):
        if type(layer) in KINDS and not is_hooked(layer):
            for name in NAMES:
                weight = layer._parameters.get(name)
                if _is_castable(weight, device) and name not in vars(layer):
                    found.append((layer, name, weight))
    return found


def _eager_modules(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a model without those in compiled blocks: these fuse their casts with other work, and CUDA graphs
    would copy weights that are new tensors in each step."""
    for child in model.children():
        if child._compiled_call_impl is None:
            yield child
            yield from _eager_modules(child)


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
        if torch.is_grad_enabled():  # gradients of gradients
            return None, *(None if grad is None else grad.float() for grad in grads)
        # parts of one tensor only where this saves launches: of the others, each is cast by itself
        plain = [grad for grad in grads if grad is not None and grad.is_contiguous()]
        parts = iter(_cast(plain, torch.float32))
        return None, *(
            None if grad is None else next(parts) if grad.is_contiguous() else grad.float() for grad in grads
        )


def _cast(tensors: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, ...]:
    if not tensors:
        return ()
    flat = tensors[0].new_empty(sum(t.numel() for t in tensors), dtype=dtype)
    parts = torch._C._nn.unflatten_dense_tensors(flat, tensors)
    torch._foreach_copy_(parts, tensors)
    return tuple(parts)


def _wanted(x: Any) -> bool:
    if not ENABLED or not isinstance(x, Tensor) or not autocast_enabled(x):
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
    )
