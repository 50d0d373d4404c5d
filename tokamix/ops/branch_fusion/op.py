"""Functions and operator registration of branch fusion, a part of active token mixing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.branch_fusion import reference
from tokamix.ops.operator import operator

BRANCHES = 3
MANY_TOKENS = 4096  # a program sums all tokens of an image; with more, plain PyTorch keeps a GPU busier


def branch_summary(branches: Sequence[Tensor], backend: str | None = None) -> Tensor:
    """The sum of the branches, averaged over the tokens: what their weights are computed from.

    Args:
        branches: maps of the same shape (B, N, C).
        backend: force "eager" or "triton".

    Returns:
        (B, C).
    """
    if _choose("branch_summary", branches, backend) == "triton":
        return _summary(*branches)
    return reference.branch_summary(branches)


def fuse_branches(branches: Sequence[Tensor], logits: Tensor, backend: str | None = None) -> Tensor:
    """The sum of the branches, weighted for each channel and image by a softmax over the branches.

    Args:
        branches: K maps of the same shape (B, N, C).
        logits: (B, C * K), the K logits of a channel side by side.
        backend: force "eager" or "triton".

    Returns:
        (B, N, C).
    """
    if _choose("fuse_branches", (*branches, logits), backend) == "triton":
        return _fuse(*branches, logits)
    return reference.fuse_branches(branches, logits)


def _choose(op: str, tensors: Sequence[Tensor], backend: str | None) -> str:
    limit = better = None
    fuses = op == "fuse_branches"
    if len(tensors) - fuses != BRANCHES:
        limit = f"the kernels fuse {BRANCHES} branches"
    elif torch.compiler.is_compiling() and (fuses or dispatch.is_exporting()):  # three means would be six kernels
        better = "torch.compile fuses it with neighbouring operators"
    elif tensors[0].shape[1] > MANY_TOKENS:
        better = f"there are over {MANY_TOKENS} tokens"  # their number in a text would fix it in a compiled graph
    return dispatch.choose(op, *tensors, backend=backend, limit=limit, better=better)


@operator("branch_summary")
def _summary(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    if dispatch.why_not(first) is None:
        from tokamix.ops.branch_fusion import kernels

        return kernels.branch_summary(first, second, third)
    return reference.branch_summary((first, second, third))


@_summary.register_fake
def _(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    return first.new_empty(first.shape[0], first.shape[2])


@operator("fuse_branches")
def _fuse(first: Tensor, second: Tensor, third: Tensor, logits: Tensor) -> Tensor:
    if dispatch.why_not(first) is None:
        from tokamix.ops.branch_fusion import kernels

        return kernels.fuse_branches(first, second, third, logits)
    return reference.fuse_branches((first, second, third), logits).contiguous()


@_fuse.register_fake
def _(first: Tensor, second: Tensor, third: Tensor, logits: Tensor) -> Tensor:
    return first.new_empty(first.shape)


@operator("fuse_branches_backward")
def _fuse_backward(
    grad: Tensor, first: Tensor, second: Tensor, third: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if dispatch.why_not(first) is None:
        from tokamix.ops.branch_fusion import kernels

        return kernels.fuse_branches_backward(grad, first, second, third, logits)
    grads, grad_logits = reference.fuse_branches_backward(grad, (first, second, third), logits)
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous(), grad_logits


@_fuse_backward.register_fake
def _(
    grad: Tensor, first: Tensor, second: Tensor, third: Tensor, logits: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        grad.new_empty(grad.shape),
        grad.new_empty(grad.shape),
        grad.new_empty(grad.shape),
        logits.new_empty(logits.shape),
    )


def _keep_tokens(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.tokens = inputs[0].shape[1]


def _differentiate_summary(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    share = (grad / ctx.tokens).unsqueeze(1).expand(-1, ctx.tokens, -1)
    return share, share, share


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_fusion(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return _fuse_backward(grad, *ctx.saved_tensors)


_summary.register_autograd(_differentiate_summary, setup_context=_keep_tokens)
_fuse.register_autograd(_differentiate_fusion, setup_context=_keep_inputs)
