"""Convolution and normalisation on token layout: channels last, no copy on the way in or out."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def channels_first(x: Tensor) -> Tensor:
    """(B, H, W, C) -> (B, C, H, W), a view whose memory is channels_last."""
    return x.permute(0, 3, 1, 2)


def channels_last(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, H, W, C), a view (contiguous when the memory was channels_last)."""
    return x.permute(0, 2, 3, 1)


class MapConv(nn.Conv2d):
    """A convolution on maps (B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (B, H, W, C)."""
        return channels_last(super().forward(channels_first(x)))


class DepthwiseConv(MapConv):
    """A depthwise 3x3 convolution on maps (B, H, W, C)."""

    def __init__(
        self, dim: int, kernel_size: int = 3, bias: bool = True, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(
            dim, dim, kernel_size, padding=kernel_size // 2, groups=dim, bias=bias, device=device, dtype=dtype
        )


class MapBatchNorm(nn.BatchNorm2d):
    """Batch normalisation over the last axis of x (..., C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., C) per channel."""
        flat = x.reshape(-1, x.shape[-1])  # (B*N, C): batch_norm takes it as is, so no layout changes hands
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
        out = F.batch_norm(
            flat,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum or 0.1,
            self.eps,
        )
        return out.view(x.shape)


def pad_to_multiple(x: Tensor, multiple: tuple[int, int]) -> Tensor:
    """Pad x (B, H, W, C) with zeros at the right and bottom to multiples of `multiple` (h, w)."""
    pad_h, pad_w = -x.shape[1] % multiple[0], -x.shape[2] % multiple[1]
    return F.pad(x, (0, 0, 0, pad_w, 0, pad_h))


def map_to_tokens(x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """(B, H, W, C) -> tokens (B, H*W, C) and the grid (H, W)."""
    return x.flatten(1, 2), (x.shape[1], x.shape[2])


def tokens_to_map(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Tokens (B, H*W, C) -> (B, H, W, C)."""
    return x.unflatten(1, grid)


def autocast_dtype(x: Tensor) -> torch.dtype:
    """The dtype matrix products on x run in: autocast's where it is on, else x's own."""
    device = x.device.type
    enabled = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if enabled else x.dtype
