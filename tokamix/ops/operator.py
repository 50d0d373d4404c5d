"""Registered operators with a light path for plain eager calls.

What watches a call (torch.compile, torch.export, torch.func, tracing, dispatch modes, tensor subclasses) sees an
operator of torch.library. Its dispatch takes longer on the host than small kernels take on a GPU, so a call that
nothing watches goes straight to the implementation: within an autograd.Function if a gradient is needed, else alone.
`TOKAMIX_LIGHT=0` turns this off. torch.compile replaces an operator by the launches of its kernels, which the code that
it generates then makes itself. `TOKAMIX_TRACE=0` turns that off.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch._library.triton import triton_ops_to_kernels
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.nn import Parameter
from torch.utils._pytree import tree_leaves

from tokamix.ops import dispatch

Formula = Callable[..., Any]


class Operator:
    """An operator `torch.ops.tokamix.<name>`, called through the dispatcher only if something watches.

    Args:
        name: the operator's name.
        implementation: a function with a signature as `torch.library.custom_op` needs it; it must not return its inputs
            or views of them.
    """

    def __init__(self, name: str, implementation: Callable[..., Any]) -> None:
        self.name, self.implementation = name, implementation
        self.definition = torch.library.custom_op(f"tokamix::{name}", mutates_args=())(implementation)
        self.registered = getattr(torch.ops.tokamix, name).default
        self.register_fake = self.definition.register_fake
        self.definition.register_torch_dispatch(FunctionalTensorMode, self._functionalize)
        # a part of the keys of compiled graphs, which contain the code of the kernels
        triton_ops_to_kernels[f"tokamix::{name}"] = _Kernels(implementation.__module__)  # type: ignore[assignment]
        self.function: type[torch.autograd.Function] | None = None

    def register_autograd(self, backward: Formula, setup_context: Formula) -> None:
        """Set the gradient of both paths; see `torch.library.register_autograd`."""
        self.definition.register_autograd(backward, setup_context=setup_context)
        self.function = _function(self.name, self.implementation, backward, setup_context)

    def __call__(self, *inputs: Any) -> Any:
        """Run the operator; lists of outputs may come as tuples."""
        if dispatch.is_watched() or not dispatch.is_light():
            return self.registered(*inputs)
        differentiable = torch.is_grad_enabled()
        needs_grad = False
        for x in inputs:
            if isinstance(x, Tensor):
                if type(x) is not Tensor and type(x) is not Parameter:
                    return self.registered(*inputs)
                needs_grad = needs_grad or (differentiable and x.requires_grad)
            elif isinstance(x, (list, tuple)) and x and isinstance(x[0], Tensor):
                if any(type(y) is not Tensor for y in x):
                    return self.registered(*inputs)
                needs_grad = needs_grad or (differentiable and any(y.requires_grad for y in x))
        if not needs_grad:
            return self.implementation(*inputs)
        if self.function is None:  # the registered operator raises an error in the backward pass
            return self.registered(*inputs)
        return self.function.apply(*inputs)

    def _functionalize(
        self, mode: FunctionalTensorMode, op: Any, types: Any, inputs: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        """Trace the implementation in place of the operator, as `torch.library.triton_op` does, where kernels run."""
        if _can_trace(inputs):
            with suppress(dispatch.CannotTraceError), mode:
                return self.implementation(*inputs, **options)
        return mode.__torch_dispatch__(op, types, inputs, options)


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Register the decorated function as the operator `torch.ops.tokamix.<name>`."""
    return lambda implementation: Operator(name, implementation)


class _Kernels:
    """The kernels that a graph with an operator may contain; imported when PyTorch iterates over them.

    Args:
        module: the operator's module, which is beside that of its kernels.
    """

    def __init__(self, module: str) -> None:
        self.module = module.rpartition(".")[0] + ".kernels"

    def __iter__(self) -> Iterator[Any]:
        if dispatch.HAS_TRITON and dispatch.traces_kernels():
            from triton.runtime.jit import JITFunction

            yield from (x for x in vars(import_module(self.module)).values() if isinstance(x, JITFunction))


def _can_trace(inputs: tuple[Any, ...]) -> bool:
    """Whether kernels run on these inputs, and all sizes are numbers: launches depend on them."""
    leaves = tree_leaves(inputs)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    numbers = (n for x in tensors for n in (*x.shape, *x.stride(), x.storage_offset()))
    return (
        dispatch.traces_kernels()
        and all(type(x) is FunctionalTensor for x in tensors)
        and dispatch.why_not(*tensors) is None
        and not any(isinstance(n, torch.SymInt) for n in (*leaves, *numbers))
    )


def _function(
    name: str, implementation: Formula, backward: Formula, setup_context: Formula
) -> type[torch.autograd.Function]:
    def run_forward(ctx: Any, *inputs: Any) -> Any:
        output = implementation(*inputs)
        setup_context(ctx, inputs, output)
        ctx.is_list = isinstance(output, list)  # autograd knows tuples only
        return tuple(output) if ctx.is_list else output

    def run_backward(ctx: Any, *grads: Any) -> Any:
        return backward(ctx, list(grads)) if ctx.is_list else backward(ctx, *grads)

    methods = {"forward": staticmethod(run_forward), "backward": staticmethod(run_backward)}
    return type(name, (torch.autograd.Function,), methods)
