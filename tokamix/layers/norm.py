"""Normalisation over the channels of maps and tokens."""

from typing import TypeGuard

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from tokamix.layers.bare import is_bare, is_hooked
from tokamix.layers.layout import channels_first, channels_last
from tokamix.layers.recompute import recompute_in_backward
from tokamix.ops import cpu, dispatch, layer_norm
from tokamix.ops.precision import to_autocast_dtype

BatchNorm = nn.modules.batchnorm._BatchNorm  # base class of BatchNorm1d, 2d, 3d and SyncBatchNorm
FEW_NUMBERS = 1 << 20  # where the host limits the speed, PyTorch's own call is the quickest


@register_notrace_module
class LayerNorm(nn.LayerNorm):
    """A LayerNorm in front of a matrix product: on large inputs of eager calls, our kernel writes autocast's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., C)."""
        if torch.compiler.is_compiling() or x.numel() < FEW_NUMBERS or not dispatch.prefers_kernels(x):
            return super().forward(x)
        if self.weight is None or self.bias is None or self.weight.ndim > 1:  # options of torch.nn.LayerNorm
            return super().forward(x)
        return layer_norm(x, self.weight, self.bias, self.eps)


@register_notrace_module
class RecomputedLayerNorm(LayerNorm):
    """A LayerNorm in front of a layer: its output has the autocast dtype and is recomputed in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., C)."""
        return recompute_in_backward(self._normalise, x)

    def _normalise(self, x: Tensor) -> Tensor:
        return to_autocast_dtype(super().forward(x))


def apply_batch_norm(norm: nn.Module, x: Tensor, inplace: bool = False) -> Tensor:
    """Apply an nn.BatchNorm1d to the channels of a map or of tokens x (..., C); `inplace` allows to overwrite x.

    A function, not a subclass of BatchNorm1d: `convert_sync_batchnorm` would replace a subclass by a plain layer.
    """
    if type(norm) is nn.Identity:  # folded into another layer
        return x
    if dispatch.is_exporting_to("onnx", "openvino") and x.ndim == 4 and _is_fixed(norm):
        # in the layout of the convolutions around it; rows would be transposed for each of them
        mean, variance, weight, bias = norm.running_mean, norm.running_var, norm.weight, norm.bias
        return channels_last(F.batch_norm(channels_first(x), mean, variance, weight, bias, eps=norm.eps))
    if cpu.usable(x) and is_bare(norm, nn.BatchNorm1d) and not norm.training and x.shape[-1] == norm.num_features:
        mean, variance = norm.running_mean, norm.running_var
        if mean is not None and variance is not None:
            scale = norm.weight * (variance + norm.eps).rsqrt()
            # several times as fast as PyTorch's kernel
            shift = torch.addcmul(norm.bias, mean, scale, value=-1)
            return torch.addcmul(shift, x, scale, out=x if inplace else None)
    return norm(x.reshape(-1, x.shape[-1])).view(x.shape)


def _is_fixed(norm: nn.Module) -> TypeGuard[nn.BatchNorm1d]:
    """Whether a norm is a BatchNorm of stored statistics and nothing else."""
    plain = type(norm) is nn.BatchNorm1d and not is_hooked(norm)
    return plain and not norm.training and norm.running_mean is not None
