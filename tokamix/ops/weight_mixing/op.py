"""Public functions and operator registration of adaptive weight mixing."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.operator import operator
from tokamix.ops.weight_mixing import reference
from tokamix.ops.weight_mixing.reference import resize_bank

Pair = tuple[int, int]
__all__ = ["bank_mixing", "bank_mixing_weights", "resize_bank"]

ACTIVATIONS = ("softmax", "identity", "l2", "sigmoid", "layernorm")
KERNEL_ACTIVATIONS = ("softmax", "identity", "sigmoid")
MAX_KERNEL_SIDE = 128


def bank_mixing(
    v: Tensor,
    policy: Tensor | None,
    bank: Tensor,
    grid: Pair,
    window: Pair | None = None,
    shift: Pair = (0, 0),
    shift_mask: bool = True,
    activation: str = "softmax",
    backend: str | None = None,
) -> Tensor:
    """Adaptive weight mixing: tokens are mixed with weights that each source composes from a bank.

    AMixer: Adaptive Weight Mixing for Self-Attention Free Vision Transformers, ECCV 2022. Inside each window,

        logits[src, dst, head] = sum_k policy[src, k, head] * bank[k, position(src) - position(dst)]
        weights = activation(logits), for each destination over its sources
        out[dst, head] = sum_src weights[src, dst, head] * v[src, head]

    A shift moves the windows cyclically, as in Swin; windows at the border then hold tokens from opposite sides of the
    map, which do not mix (the authors' code prepares this mask but does not use it: `shift_mask=False`).

    Args:
        v: values (B, N, heads, d) of a grid of N = H*W tokens, row by row.
        policy: (B, N, K, heads), each source's weight of each bank entry; None for weights that do not depend on the
            tokens, one bank entry for each head.
        bank: (K, (2h-1) * (2w-1)), one weight for each displacement in a window, or (K, h*w, h*w), one for each pair
            (source, destination).
        grid: (H, W).
        window: (h, w), which divides the grid; None for the whole grid.
        shift: (rows, columns) by which the windows are shifted down and right.
        shift_mask: do not mix tokens from opposite borders of the map.
        activation: "softmax", "identity", "l2", "sigmoid" or "layernorm" (without parameters), over sources.
        backend: force "eager" or "triton".

    Returns:
        (B, N, heads, d).
    """
    window = window or grid
    _check(v, policy, bank, grid, window, shift, activation)
    limit = "without a policy it is one product" if policy is None else _limit(v, bank, activation)
    tensors = [x for x in (v, policy, bank) if x is not None]
    if dispatch.choose("bank_mixing", *tensors, backend=backend, limit=limit) == "triton":
        out, _ = _bank_mixing(v, policy, bank, grid, window, shift, shift_mask, activation)
        return out
    return reference.bank_mixing(v, policy, bank, grid, window, shift, shift_mask, activation)


def bank_mixing_weights(
    policy: Tensor | None,
    bank: Tensor,
    grid: Pair,
    window: Pair | None = None,
    shift: Pair = (0, 0),
    shift_mask: bool = True,
    activation: str = "softmax",
) -> Tensor:
    """The weights of `bank_mixing`, (B, windows, heads, sources, destinations), for visualisation.

    Without a policy they do not depend on tokens, and B and windows are 1.
    """
    window = window or grid
    _check(None, policy, bank, grid, window, shift, activation)
    weights = reference.mixing_weights(policy, bank, grid, window, shift, shift_mask, activation)
    return weights.permute(1, 2, 3, 0, 4)


def _check(
    v: Tensor | None, policy: Tensor | None, bank: Tensor, grid: Pair, window: Pair, shift: Pair, activation: str
) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"unknown activation {activation!r}: choose one of {', '.join(ACTIVATIONS)}")
    dispatch.check_floating("bank_mixing", v, policy, bank)
    tokens, pairs = grid[0] * grid[1], window[0] * window[1]
    for name, x, axes in (("v", v, "heads, d"), ("policy", policy, "K, heads")):
        if x is not None and (x.ndim != 4 or x.shape[1] != tokens):
            raise ValueError(f"{name} must be (B, {tokens}, {axes}) for grid {grid}, got {tuple(x.shape)}")
    if grid[0] % window[0] or grid[1] % window[1]:
        raise ValueError(f"window {window} does not divide grid {grid}; pad the map to a multiple of the window")
    if not (0 <= shift[0] < window[0] and 0 <= shift[1] < window[1]):
        raise ValueError(f"shift {shift} must be at least 0 and smaller than the window {window}")
    relative = (2 * window[0] - 1) * (2 * window[1] - 1)
    if bank.shape[1:] not in ((relative,), (pairs, pairs)):
        raise ValueError(
            f"a bank for window {window} has shape (K, {relative}) or (K, {pairs}, {pairs}), got {tuple(bank.shape)};"
            " tokamix.ops.resize_bank resizes it to another window"
        )
    if v is None:
        return
    heads = v.shape[2]
    if policy is None:
        if bank.shape[0] != heads:
            raise ValueError(f"without a policy a bank needs one entry for each of {heads} heads, got {bank.shape[0]}")
    elif (policy.shape[0], *policy.shape[2:]) != (v.shape[0], bank.shape[0], heads):
        raise ValueError(
            f"policy must be {(v.shape[0], tokens, bank.shape[0], heads)} for this v and bank,"
            f" got {tuple(policy.shape)}"
        )
    elif policy.dtype != v.dtype:
        raise ValueError(f"v and policy must share one dtype, got {v.dtype} and {policy.dtype}; cast one of them")


def _limit(v: Tensor, bank: Tensor, activation: str) -> str | None:
    if activation not in KERNEL_ACTIVATIONS:
        return f"activation {activation!r} has no kernel, only {', '.join(KERNEL_ACTIVATIONS)} have"
    for name, size in (("head dim", v.shape[3]), ("bank size", bank.shape[0])):
        if size > MAX_KERNEL_SIDE:
            return f"{name} {size} is over {MAX_KERNEL_SIDE}"
    return None


def _use_kernels(v: Tensor, policy: Tensor, bank: Tensor, activation: str) -> bool:
    return v.numel() > 0 and dispatch.why_not(v, policy, bank) is None and _limit(v, bank, activation) is None


@operator("bank_mixing")
def _bank_mixing(
    v: Tensor,
    policy: Tensor,
    bank: Tensor,
    grid: Sequence[int],
    window: Sequence[int],
    shift: Sequence[int],
    shift_mask: bool,
    activation: str,
) -> tuple[Tensor, Tensor]:
    """The mixed tokens, and the logarithms of softmax's sums for the kernels' backward pass."""
    options = (_pair(grid), _pair(window), _pair(shift), shift_mask, activation)
    sums = _empty_sums(v, window, activation)
    if _use_kernels(v, policy, bank, activation):
        from tokamix.ops.weight_mixing import kernels

        return kernels.forward(v, policy, bank, sums, *options), sums
    return reference.bank_mixing(v, policy, bank, *options).contiguous(), sums.zero_()


@_bank_mixing.register_fake
def _(
    v: Tensor,
    policy: Tensor,
    bank: Tensor,
    grid: Sequence[int],
    window: Sequence[int],
    shift: Sequence[int],
    shift_mask: bool,
    activation: str,
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), _empty_sums(v, window, activation)


@operator("bank_mixing_backward")
def _bank_mixing_backward(
    grad: Tensor,
    v: Tensor,
    policy: Tensor,
    bank: Tensor,
    out: Tensor,
    sums: Tensor,
    grid: Sequence[int],
    window: Sequence[int],
    shift: Sequence[int],
    shift_mask: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    options = (_pair(grid), _pair(window), _pair(shift), shift_mask, activation)
    if _use_kernels(v, policy, bank, activation):
        from tokamix.ops.weight_mixing import kernels

        return kernels.backward(grad, v, policy, bank, out, sums, *options)

    def mix(v: Tensor, policy: Tensor, bank: Tensor) -> Tensor:
        return reference.bank_mixing(v, policy, bank, *options)

    # torch.func differentiates here too, although autograd is off
    grads = torch.func.vjp(mix, v, policy, bank)[1](grad)
    return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()


@_bank_mixing_backward.register_fake
def _(
    grad: Tensor,
    v: Tensor,
    policy: Tensor,
    bank: Tensor,
    out: Tensor,
    sums: Tensor,
    grid: Sequence[int],
    window: Sequence[int],
    shift: Sequence[int],
    shift_mask: bool,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return v.new_empty(v.shape), policy.new_empty(policy.shape), bank.new_empty(bank.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.set_materialize_grads(False)  # no zeros for the sums
    ctx.save_for_backward(*inputs[:3], *output)
    ctx.options = inputs[3:]


def _backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Tensor | None, ...]:
    grads = (None,) * 3 if grad is None else _bank_mixing_backward(grad, *ctx.saved_tensors, *ctx.options)
    return *grads, None, None, None, None, None


_bank_mixing.register_autograd(_backward, setup_context=_setup_context)


def _empty_sums(v: Tensor, window: Sequence[int], activation: str) -> Tensor:
    """An empty tensor for the softmax sums (pairs, h*w) of the backward pass; of size 0 if none are saved."""
    tokens = window[0] * window[1]
    pairs = v.shape[0] * v.shape[1] * v.shape[2] // tokens if activation == "softmax" else 0
    return v.new_empty(pairs, tokens, dtype=torch.float32)


def _pair(values: Sequence[int]) -> Pair:
    first, second = values
    return first, second
