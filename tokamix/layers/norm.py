"""Normalisation over the channels of maps and tokens."""

import torch
from torch import Tensor, nn

from tokamix.layers.bare import is_bare
from tokamix.layers.recompute import recompute_in_backward
from tokamix.ops import cpu
from tokamix.ops.precision import autocast_dtype, autocast_enabled

BatchNorm = nn.modules.batchnorm._BatchNorm  # base class of BatchNorm1d, 2d, 3d and SyncBatchNorm


class RecomputedLayerNorm(nn.LayerNorm):
    """A LayerNorm in front of a layer: its output has the autocast dtype and is recomputed in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., C)."""
        return recompute_in_backward(self._normalise, x)

    def _normalise(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        return out.to(autocast_dtype(x)) if autocast_enabled(x) else out


def apply_batch_norm(norm: nn.Module, x: Tensor, inplace: bool = False) -> Tensor:
    """Apply an nn.BatchNorm1d to the channels of a map or of tokens x (..., C); `inplace` allows to overwrite x.

    A function, not a subclass of BatchNorm1d: `convert_sync_batchnorm` would replace a subclass by a plain layer.
    """
    if type(norm) is nn.Identity:  # folded into another layer
        return x
    if cpu.usable(x) and is_bare(norm, nn.BatchNorm1d) and not norm.training and x.shape[-1] == norm.num_features:
        mean, variance = norm.running_mean, norm.running_var
        if mean is not None and variance is not None:
            scale = norm.weight * (variance + norm.eps).rsqrt()
            # several times as fast as PyTorch's kernel
            shift = torch.addcmul(norm.bias, mean, scale, value=-1)
            return torch.addcmul(shift, x, scale, out=x if inplace else None)
    return norm(x.reshape(-1, x.shape[-1])).view(x.shape)
