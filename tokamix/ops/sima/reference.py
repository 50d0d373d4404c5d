"""SimA attention in plain PyTorch.

The norms are per channel, so they factor out of the products: with w = 1 / (|q| |k|), q^ k^ᵀ v = q (w ⊙ (kᵀ v)). No
normalised copy of q or k is made; w multiplies either a small matrix or one operand.
"""

import torch
from torch import Tensor

from tokamix.ops.precision import no_autocast


def sima_attention(q: Tensor, k: Tensor, v: Tensor, norm: str | None, order: str, eps: float) -> Tensor:
    """Attend from q (B, H, Nq, D) to k, v (B, H, Nk, D); see `tokamix.ops.sima_attention`."""
    with no_autocast(q):
        dtype = q.dtype
        q, k, v = (_widen(x) for x in (q, k, v))
        weight = channel_weight(q, k, norm, eps)  # (B, H, 1, D), float32 or wider
        if order == "quadratic":
            out = ((q * weight).to(q.dtype) @ k.mT) @ v
        else:
            mixing = (k.mT @ v) * weight.mT  # (B, H, D, D)
            out = q @ mixing.to(q.dtype)
        return out.to(dtype)


def exported_self_attention(qkv: Tensor, eps: float) -> Tensor:
    """Self-attention of qkv (B, N, 3, H, D) -> (B, N, H * D) in few operators, for exported graphs."""
    q, k, v = qkv.flatten(2, 3).transpose(1, 2).chunk(3, 1)  # (B, H, N, D)
    # one by one: to norm q and k as one tensor would copy them once more
    norm_q, norm_k = (x.abs().sum(2).clamp_min(eps) for x in (q, k))  # (B, H, D)
    mixing = (k.mT @ v) / (norm_q * norm_k).unsqueeze(-1)
    return (q @ mixing).transpose(1, 2).flatten(2)


def sima_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, norm: str | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of `sima_attention` in the linear order, by the formulas of the kernels.

    With M = w ⊙ (kᵀ v) and P = w ⊙ (qᵀ grad): dv = k P, and dq = grad Mᵀ, dk = v Pᵀ apart from the norms, each of
    which subtracts t = Σ M ⊙ P per channel times its own gradient.
    """
    dtype = q.dtype
    grad, q, k, v = (_widen(x) for x in (grad, q, k, v))
    weight = channel_weight(q, k, norm, eps).mT
    m, p = weight * (k.mT @ v), weight * (q.mT @ grad)  # (B, H, D, D)
    t = (m * p).sum(-1).unsqueeze(-2) / weight.mT  # (B, H, 1, D)
    dq, dk, dv = grad @ m.mT.to(q.dtype), v @ p.mT.to(q.dtype), k @ p.to(q.dtype)
    dq, dk = (dx - t * _log_norm_slope(x, norm, eps) for dx, x in ((dq, q), (dk, k)))
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


def sima_class_attention(q: Tensor, k: Tensor, v: Tensor, norm: str | None, eps: float) -> Tensor:
    """Attend from the first token only; q, k, v (B, H, N, D) -> (B, H, 1, D)."""
    with no_autocast(q):
        dtype = q.dtype
        q, k, v = (_widen(x) for x in (q, k, v))
        weight = channel_weight(q, k, norm, eps)  # from all queries, although only one attends
        attention = (q[:, :, :1] * weight * k).sum(-1)  # (B, H, N)
        return (attention.to(v.dtype).unsqueeze(-2) @ v).to(dtype)


def channel_weight(q: Tensor, k: Tensor, norm: str | None, eps: float) -> Tensor:
    """1 / (|q| |k|) per channel over the tokens, (B, H, 1, D), in float32 or wider."""
    return _channel_norm(q, norm, eps).reciprocal() * _channel_norm(k, norm, eps).reciprocal()


def _channel_norm(x: Tensor, norm: str | None, eps: float) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    if norm is None:
        return torch.ones((1, 1), dtype=wide, device=x.device)
    if norm == "l1":  # several times faster than vector_norm on the CPU
        return x.abs().sum(dim=-2, keepdim=True, dtype=wide).clamp_min(eps)
    return torch.linalg.vector_norm(x, dim=-2, keepdim=True, dtype=wide).clamp_min(eps)


def _widen(x: Tensor) -> Tensor:
    """float32 for float16, whose range kᵀ v exceeds and 1 / |q| falls below; bfloat16 has the range of float32."""
    return x.float() if x.dtype == torch.float16 else x


def _log_norm_slope(x: Tensor, norm: str | None, eps: float) -> Tensor | float:
    """The gradient of log |x| with respect to x; zero where the norm is eps."""
    if norm is None:
        return 0.0
    size = _channel_norm(x, norm, eps)
    slope = x.sign() / size if norm == "l1" else x / size**2
    return slope * (size > eps)
