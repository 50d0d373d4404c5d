"""Public functions and operator registration of SimA attention."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.operator import operator
from tokamix.ops.sima import reference

NORMS = ("l1", "l2", None)
ORDERS = ("linear", "quadratic", None)


def sima_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    norm: str | None = "l1",
    order: str | None = None,
    eps: float = 1e-12,
    backend: str | None = None,
) -> Tensor:
    """SimA attention: q^ k^ᵀ v, where each channel of q and of k is divided by its l1 norm over the tokens.

    SimA: Simple Softmax-free Attention for Vision Transformers, arXiv 2206.08898. No exp, no scale. Norms are
    accumulated in float32, so half precision keeps its accuracy at any token count. A channel that is zero on all
    tokens gives zero (and the gradient of a division by eps). The paper chooses the order of multiplication from N and
    the model's width; per head, the head's width decides.

    Args:
        q: queries (B, H, Nq, D).
        k: keys (B, H, Nk, D).
        v: values (B, H, Nk, D).
        norm: "l1", or the paper's ablations "l2" and None.
        order: "linear" q (kᵀ v), "quadratic" (q kᵀ) v; None is the cheaper one, and always "linear" while compiling
            or exporting, where a choice would specialise the graph to a range of sizes.
        eps: lower bound of the norms.
        backend: force "eager" or "triton".

    Returns:
        (B, H, Nq, D). The kernels return memory in the order (B, Nq, H, D), for the projection that follows.
    """
    _check_options(norm, order, eps)
    _check_inputs("sima_attention", q, k, v)
    if dispatch.choose("sima_attention", q, k, v, backend=backend, limit=_limit(q, order)) == "triton":
        return _attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), norm, eps).transpose(1, 2)
    return reference.sima_attention(q, k, v, norm, order or _cheaper_order(q, k), eps)


def sima_self_attention(
    qkv: Tensor, norm: str | None = "l1", order: str | None = None, eps: float = 1e-12, backend: str | None = None
) -> Tensor:
    """`sima_attention` on the output of one Linear layer for q, k and v; the kernels make no copies.

    Args:
        qkv: (B, N, 3, H, D).
        norm: see `sima_attention`.
        order: see `sima_attention`.
        eps: see `sima_attention`.
        backend: see `sima_attention`.

    Returns:
        Tokens (B, N, H * D).
    """
    _check_options(norm, order, eps)
    if qkv.ndim != 5 or qkv.shape[2] != 3:
        raise ValueError(f"sima_self_attention needs qkv of shape (B, N, 3, H, D), got {tuple(qkv.shape)}")
    dispatch.check_floating("sima_self_attention", qkv)
    if dispatch.choose("sima_self_attention", qkv, backend=backend, limit=_limit(qkv, order)) == "triton":
        return _self_attention(qkv, norm, eps).flatten(2)
    if dispatch.is_exporting() and norm == "l1" and qkv.dtype != torch.float16:
        return reference.exported_self_attention(qkv, eps)
    q, k, v = qkv.transpose(1, 3).unbind(2)  # (B, H, N, D) each
    out = reference.sima_attention(q, k, v, norm, order or _cheaper_order(q, k), eps)
    return out.transpose(1, 2).flatten(2)


def sima_class_attention(q: Tensor, k: Tensor, v: Tensor, norm: str | None = "l1", eps: float = 1e-6) -> Tensor:
    """The first row of `sima_attention`, for the class token; (B, H, N, D) each -> (B, H, 1, D).

    The queries' norm is over all tokens, so the other queries are needed too.
    """
    _check_options(norm, None, eps)
    _check_inputs("sima_class_attention", q, k, v)
    return reference.sima_class_attention(q, k, v, norm, eps)


def _check_options(norm: str | None, order: str | None, eps: float) -> None:
    if norm not in NORMS:
        raise ValueError(f"unknown norm {norm!r} for SimA: choose one of 'l1', 'l2', None")
    if order not in ORDERS:
        raise ValueError(f"unknown order {order!r} of multiplication: choose one of 'linear', 'quadratic', None")
    if eps <= 0:
        raise ValueError(f"eps must be positive, got {eps}: a channel of zeros is divided by it")


def _check_inputs(op: str, q: Tensor, k: Tensor, v: Tensor) -> None:
    if q.ndim != 4 or k.shape != v.shape or (*q.shape[:2], q.shape[3]) != (*k.shape[:2], k.shape[3]):
        shapes = ", ".join(str(tuple(x.shape)) for x in (q, k, v))
        raise ValueError(f"{op} needs q (B, H, Nq, D) and k, v (B, H, Nk, D), got {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must share one dtype, got {q.dtype}, {k.dtype} and {v.dtype}; cast them first")
    dispatch.check_floating(op, q)


def _cheaper_order(q: Tensor, k: Tensor) -> str:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return "linear"
    (nq, dim), nk = q.shape[-2:], k.shape[-2]
    return "quadratic" if 2 * nq * nk < dim * (nq + nk) else "linear"


def _limit(x: Tensor, order: str | None) -> str | None:
    if order == "quadratic":
        return "the kernels multiply in the linear order"
    widest = 64 if x.dtype == torch.float32 else 128
    return f"head dim {x.shape[-1]} is over {widest} in {x.dtype}" if x.shape[-1] > widest else None


# The registered operators use the layout (B, N, H, D) of the Linear layers around them. The backward pass starts from
# q, k and v: recomputing the small matrices is cheaper than storing them.


@operator("sima_attention")
def _attention(q: Tensor, k: Tensor, v: Tensor, norm: str | None, eps: float) -> Tensor:
    return _forward(q, k, v, norm, eps)


@_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, norm: str | None, eps: float) -> Tensor:
    return q.new_empty(q.shape)


@operator("sima_attention_backward")
def _attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, norm: str | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    grads = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    _backward(grad, (q, k, v), grads, norm, eps)
    return grads


@_attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, norm: str | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


@operator("sima_self_attention")
def _self_attention(qkv: Tensor, norm: str | None, eps: float) -> Tensor:
    q, k, v = qkv.unbind(2)
    return _forward(q, k, v, norm, eps)


@_self_attention.register_fake
def _(qkv: Tensor, norm: str | None, eps: float) -> Tensor:
    batch, tokens, _, heads, dim = qkv.shape
    return qkv.new_empty(batch, tokens, heads, dim)


@operator("sima_self_attention_backward")
def _self_attention_backward(grad: Tensor, qkv: Tensor, norm: str | None, eps: float) -> Tensor:
    grad_qkv = qkv.new_empty(qkv.shape)
    _backward(grad, qkv.unbind(2), (grad_qkv,), norm, eps)
    return grad_qkv


@_self_attention_backward.register_fake
def _(grad: Tensor, qkv: Tensor, norm: str | None, eps: float) -> Tensor:
    return qkv.new_empty(qkv.shape)


def _keep_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.norm, ctx.eps = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *_attention_backward(grad, *ctx.saved_tensors, ctx.norm, ctx.eps), None, None


def _differentiate_self(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _self_attention_backward(grad, *ctx.saved_tensors, ctx.norm, ctx.eps), None, None


_attention.register_autograd(_differentiate, setup_context=_keep_inputs)
_self_attention.register_autograd(_differentiate_self, setup_context=_keep_inputs)


def _use_kernels(x: Tensor) -> bool:
    return dispatch.why_not(x) is None and _limit(x, None) is None


def _forward(q: Tensor, k: Tensor, v: Tensor, norm: str | None, eps: float) -> Tensor:
    if _use_kernels(q):
        from tokamix.ops.sima import kernels

        return kernels.forward(q, k, v, norm, eps)
    out = reference.sima_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), norm, "linear", eps)
    return out.transpose(1, 2).contiguous()


def _backward(grad: Tensor, inputs: Sequence[Tensor], grads: tuple[Tensor, ...], norm: str | None, eps: float) -> None:
    """Write the gradients of q, k and v into `grads`: three tensors, or one (B, N, 3, H, D)."""
    q, k, v = inputs
    if _use_kernels(q):
        from tokamix.ops.sima import kernels

        return kernels.backward(grad, q, k, v, grads, norm, eps)
    grad, q, k, v = (x.transpose(1, 2) for x in (grad, q, k, v))
    targets = grads if len(grads) == 3 else grads[0].unbind(2)
    for target, value in zip(targets, reference.sima_attention_backward(grad, q, k, v, norm, eps), strict=True):
        target.copy_(value.transpose(1, 2))
