"""Fold BatchNorm into a neighbouring layer, for inference."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tokamix.layers.norm import BatchNorm, apply_batch_norm


class FoldableSequential(nn.Sequential):
    """nn.Sequential in which `timm.utils.reparameterize_model` folds each BatchNorm into the preceding layer."""

    def reparameterize(self) -> None:
        """Fold each BatchNorm that follows a convolution or a Linear layer."""
        for i, (layer, norm) in enumerate(pairwise(list(self))):
            if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
                self[i + 1] = fold_into_previous(layer, norm)


class MapSequential(FoldableSequential):
    """FoldableSequential on maps (B, H, W, C) or tokens (B, N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Apply the layers to x (..., C)."""
        return self._call(list(self), x)

    def _call(self, layers: list[nn.Module], x: Tensor) -> Tensor:
        for layer in layers:
            x = apply_batch_norm(layer, x) if isinstance(layer, BatchNorm) else layer(x)
        return x


def fold_into_previous(layer: nn.Conv2d | nn.ConvTranspose2d | nn.Linear, norm: nn.Module) -> nn.Module:
    """Fold a BatchNorm into the preceding layer; return nn.Identity, or `norm` itself if it is no BatchNorm."""
    if not isinstance(norm, BatchNorm):
        return norm
    scale, shift = _scale_and_shift(norm)
    axis = 1 if isinstance(layer, nn.ConvTranspose2d) else 0
    shape = [-1 if i == axis else 1 for i in range(layer.weight.ndim)]
    with torch.no_grad():
        layer.weight.mul_(scale.view(shape))
        _set_bias(layer, shift if layer.bias is None else layer.bias * scale + shift)
    return nn.Identity().train(norm.training)


def fold_into_next(norm: nn.Module, layer: nn.Linear) -> nn.Module:
    """Fold a BatchNorm into the following layer; return nn.Identity, or `norm` itself if it is no BatchNorm."""
    if not isinstance(norm, BatchNorm):
        return norm
    scale, shift = _scale_and_shift(norm)
    with torch.no_grad():
        shift = layer.weight.to(shift.dtype) @ shift
        _set_bias(layer, shift if layer.bias is None else layer.bias + shift)
        layer.weight.mul_(scale)
    return nn.Identity().train(norm.training)


def _set_bias(layer: nn.Module, bias: Tensor) -> None:
    weight: Any = layer.weight
    layer.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=weight.requires_grad)


@torch.no_grad()
def _scale_and_shift(norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """Scale and shift per channel of a BatchNorm in evaluation mode, in float32 or wider."""
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None
    assert variance is not None
    wide = torch.promote_types(variance.dtype, torch.float32)
    scale = norm.weight.to(wide) * (variance.to(wide) + norm.eps).rsqrt()
    return scale, norm.bias - mean * scale
