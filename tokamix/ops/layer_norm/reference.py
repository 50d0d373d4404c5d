"""LayerNorm in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokamix.ops.precision import to_autocast_dtype


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The LayerNorm of x (..., C); under autocast it is computed in float32 and returned in autocast's dtype."""
    return to_autocast_dtype(F.layer_norm(x, x.shape[-1:], weight, bias, eps))


def layer_norm_in(dtype: torch.dtype, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The LayerNorm of x (..., C), computed in at least float32 and returned in dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.layer_norm(x.to(wide), x.shape[-1:], weight.to(wide), bias.to(wide), eps).to(dtype)


def layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, of the weight and of the bias."""
    wide = torch.promote_types(x.dtype, torch.float32)
    rows, slopes = x.to(wide), grad.to(wide)
    variance, mean = torch.var_mean(rows, -1, correction=0, keepdim=True)
    scale = (variance + eps).rsqrt()
    normal = (rows - mean) * scale
    weighted = slopes * weight.to(wide)
    along = (weighted * normal).mean(-1, keepdim=True)
    grad_x = (weighted - weighted.mean(-1, keepdim=True) - normal * along) * scale
    leading = list(range(x.ndim - 1))
    grad_weight, grad_bias = (slopes * normal).sum(leading), slopes.sum(leading)
    return grad_x.to(x.dtype), grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)
