"""Registered operators with a light path for plain eager calls.

What watches a call (torch.compile, torch.export, torch.func, tracing, dispatch modes, tensor subclasses) sees an
operator of torch.library. Its dispatch takes longer on the host than small kernels take on a GPU, so a call that
nothing watches goes straight to the implementation: within an autograd.Function if a gradient is needed, else alone.
`TOKAMIX_LIGHT=0` turns this off.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

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


def operator(name: str) -> Callable[[Callable[..., Any]], Operator]:
    """Register the decorated function as the operator `torch.ops.tokamix.<name>`."""
    return lambda implementation: Operator(name, implementation)


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
