"""Public functions and operator registration of super token sampling."""

from typing import Any

import torch
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.operator import operator
from tokamix.ops.super_token import reference
from tokamix.ops.super_token.reference import Cell, grid_of

MAX_CHANNELS = 1024  # a kernel's program holds all channels of a super token


def super_token_sample(x: Tensor, cell: Cell, n_iter: int = 1, backend: str | None = None) -> tuple[Tensor, Tensor]:
    """Cluster the tokens of a map into super tokens, one per cell of the map.

    Vision Transformer with Super Token Sampling, arXiv 2211.11167. Super tokens start as the averages of their cells;
    each token is associated by softmax(x . s / sqrt(C)) with the 3x3 super tokens around its cell; super tokens become
    the association-weighted means of the tokens. As in the authors' code, unlike the paper's equations: super tokens
    beyond the border are zero vectors that take part in the softmax; a map that the cells do not divide is padded with
    zero tokens at the right and bottom, which take part in every step; the association and the sums that normalise it
    are constants in the backward pass.

    Args:
        x: map of tokens (B, H, W, C).
        cell: height and width (h, w) of a cell.
        n_iter: iterations of association and averaging.
        backend: "eager", "triton" or None; see `tokamix.ops.dispatch`.

    Returns:
        The super tokens (B, p, q, C), p = ceil(H / h), q = ceil(W / w), and the association (B, H, W, 9) of each token
        with the super tokens around its cell, row by row.
    """
    _check_map("super_token_sample", x, cell)
    if n_iter < 1:
        raise ValueError(f"super_token_sample needs at least one iteration, got n_iter={n_iter}")
    if dispatch.choose("super_token_sample", x, backend=backend, limit=_limit(x)) == "eager":
        tokens, association, _ = reference.sample(x, cell, n_iter)
    else:
        tokens, association, _ = _sample(x, cell, n_iter, True)
    return tokens, _constant(association)


def super_token_scatter(tokens: Tensor, association: Tensor, cell: Cell, backend: str | None = None) -> Tensor:
    """Map super tokens back to tokens: each token is a weighted sum of the 3x3 super tokens around its cell.

    The association is a constant in the backward pass, as in `super_token_sample`.

    Args:
        tokens: super tokens (B, p, q, C).
        association: (B, H, W, 9), from `super_token_sample`.
        cell: height and width (h, w) of a cell.
        backend: "eager", "triton" or None; see `tokamix.ops.dispatch`.

    Returns:
        A map of tokens (B, H, W, C).
    """
    _check_map("super_token_scatter", association, cell)
    grid = grid_of(association.shape, cell)
    # not while compiling, because comparing sizes would specialise them
    if not torch.compiler.is_compiling() and (
        tokens.ndim != 4 or association.shape[-1] != 9 or tokens.shape[:3] != (association.shape[0], *grid)
    ):
        raise ValueError(
            f"an association (B, H, W, 9) of shape {tuple(association.shape)} with cells {tuple(cell)} needs super "
            f"tokens ({association.shape[0]}, {grid[0]}, {grid[1]}, C), got {tuple(tokens.shape)}"
        )
    dispatch.check_floating("super_token_scatter", tokens)
    association = _constant(association)
    if association.dtype != tokens.dtype:
        association = association.to(tokens.dtype)
    if dispatch.choose("super_token_scatter", tokens, association, backend=backend, limit=_limit(tokens)) == "eager":
        return reference.scatter(tokens, association, cell)
    return _scatter(tokens, association, cell, True)


def _constant(association: Tensor) -> Tensor:
    """The association without gradient; in eager mode without an operator if it has none."""
    return association.detach() if torch.compiler.is_compiling() or association.requires_grad else association


def _limit(x: Tensor) -> str | None:
    return f"{x.shape[-1]} channels are over {MAX_CHANNELS}" if x.shape[-1] > MAX_CHANNELS else None


def _pair(cell: list[int]) -> Cell:
    return cell[0], cell[1]


def _check_map(op: str, x: Tensor, cell: Cell) -> None:
    if x.ndim != 4 or x.shape[3] == 0:
        raise ValueError(f"{op} needs a map of shape (B, H, W, C), got {tuple(x.shape)}")
    if len(cell) != 2 or min(cell) < 1:
        raise ValueError(f"{op} needs cells of at least 1x1 as a pair (h, w), got {cell}")
    dispatch.check_floating(op, x)


@operator("super_token_sample")
def _sample(x: Tensor, cell: list[int], n_iter: int, kernel: bool) -> tuple[Tensor, Tensor, Tensor]:
    tokens, association, weight = _implementation(kernel).sample(x, _pair(cell), n_iter)
    return tokens, association.contiguous(), weight


@operator("super_token_sample_backward")
def _sample_backward(grad: Tensor, association: Tensor, weight: Tensor, cell: list[int], kernel: bool) -> Tensor:
    return _implementation(kernel).sample_backward(grad, association, weight, _pair(cell)).contiguous()


@operator("super_token_scatter")
def _scatter(tokens: Tensor, association: Tensor, cell: list[int], kernel: bool) -> Tensor:
    return _implementation(kernel).scatter(tokens, association, _pair(cell)).contiguous()


@operator("super_token_scatter_backward")
def _scatter_backward(grad: Tensor, association: Tensor, cell: list[int], kernel: bool) -> Tensor:
    return _implementation(kernel).scatter_backward(grad, association, _pair(cell))


def _implementation(kernel: bool) -> Any:
    """The module of the kernels or of the reference; both have the same four functions."""
    if kernel:
        from tokamix.ops.super_token import kernels

        return kernels
    return reference


@_sample.register_fake
def _(x: Tensor, cell: list[int], n_iter: int, kernel: bool) -> tuple[Tensor, Tensor, Tensor]:
    grid = grid_of(x.shape, _pair(cell))
    weight = x.new_empty(x.shape[0], *grid, 1, dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape[0], *grid, x.shape[3]), x.new_empty(*x.shape[:3], 9), weight


@_sample_backward.register_fake
def _(grad: Tensor, association: Tensor, weight: Tensor, cell: list[int], kernel: bool) -> Tensor:
    return grad.new_empty(*association.shape[:3], grad.shape[3])


@_scatter.register_fake
def _(tokens: Tensor, association: Tensor, cell: list[int], kernel: bool) -> Tensor:
    return tokens.new_empty(*association.shape[:3], tokens.shape[3])


@_scatter_backward.register_fake
def _(grad: Tensor, association: Tensor, cell: list[int], kernel: bool) -> Tensor:
    return grad.new_empty(grad.shape[0], *grid_of(grad.shape, _pair(cell)), grad.shape[3])


def _save_sample(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.cell, ctx.kernel = inputs[1], inputs[3]
    ctx.set_materialize_grads(False)  # no zeros for the association
    ctx.save_for_backward(*output[1:])


def _save_scatter(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.cell, ctx.kernel = inputs[2], inputs[3]
    ctx.save_for_backward(inputs[1])


def _backward_of_sample(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, None, None, None]:
    grad_x = None if grad is None else _sample_backward(grad, *ctx.saved_tensors, ctx.cell, ctx.kernel)
    return grad_x, None, None, None


def _backward_of_scatter(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
    grad_tokens = _scatter_backward(grad, *ctx.saved_tensors, ctx.cell, ctx.kernel)
    return grad_tokens, None, None, None


_sample.register_autograd(_backward_of_sample, setup_context=_save_sample)
_scatter.register_autograd(_backward_of_scatter, setup_context=_save_scatter)
