"""Convolutions on channels-last maps and on images."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from tokamix.layers.layout import channels_first, channels_last
from tokamix.ops import cpu, depthwise_conv, dispatch
from tokamix.ops.depthwise_conv.reference import match_gradient_strides
from tokamix.ops.precision import autocast_dtype


@register_notrace_module
class MapConv(nn.Conv2d):
    """A convolution on channels-last maps (B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (B, H, W, C)."""
        image = channels_first(x)
        plain = self.groups == 1 and not isinstance(self.padding, str) and self.padding_mode == "zeros"
        if plain and cpu.usable(x) and self.weight.dtype is x.dtype and x.shape[-1] == self.in_channels:
            return channels_last(
                cpu.conv(image, self.weight, self.bias, self.padding, self.stride, self.dilation)  # type: ignore[arg-type]
            )
        weight = self.weight if self.groups == 1 else match_gradient_strides(self.weight)
        return channels_last(self._conv_forward(image, weight, self.bias))


@register_notrace_module
class ImageConv(nn.Conv2d):
    """The first convolution of a model: images (B, C, H, W) in, channels_last memory out.

    On a GPU in half precision channels are padded with zeros to a multiple of 8: cuDNN needs that for tensor cores.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Convolve images x."""
        x, weight = x.contiguous(memory_format=torch.channels_last), self.weight
        if x.is_cuda and autocast_dtype(x) in (torch.bfloat16, torch.float16) and not dispatch.is_exporting():
            missing = (0, 0, 0, 0, 0, -self.in_channels % 8)
            x, weight = F.pad(x, missing), F.pad(weight, missing)
        return self._conv_forward(x, weight, self.bias)


@register_notrace_module
class PatchConv(nn.Conv2d):
    """A convolution of non-overlapping patches: images (B, C, H, W) in, channels_last memory out.

    Computed as a matrix product, because cuDNN is slow for patches of three channels, and PyTorch on a CPU for large
    patches. Other runtimes get the convolution.
    """

    def __init__(
        self, in_chans: int, dim: int, patch_size: int | tuple[int, int], device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(in_chans, dim, patch_size, patch_size, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve images x."""
        height, width = self.kernel_size
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            return super().forward(x)  # raises the usual error
        if dispatch.is_exporting_to("onnx", "openvino"):
            return super().forward(x)
        if x.device.type == "cpu" and height * width < 64:
            return super().forward(x.contiguous(memory_format=torch.channels_last))
        patches = x.unfold(2, height, height).unfold(3, width, width).permute(0, 2, 3, 1, 4, 5)  # (B, h, w, C, ...)
        return channels_first(F.linear(patches.flatten(3), self.weight.flatten(1), self.bias))


class DepthwiseConv(MapConv):
    """A depthwise convolution on maps (B, H, W, C); see `tokamix.ops.depthwise_conv` for `residual` and `gelu`."""

    def __init__(
        self,
        dim: int,
        kernel_size: int = 3,
        bias: bool = True,
        residual: bool = False,
        gelu: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            dim, dim, kernel_size, padding=kernel_size // 2, groups=dim, bias=bias, device=device, dtype=dtype
        )
        self.residual, self.gelu = residual, gelu

    def forward(self, x: Tensor, activated: bool = False) -> Tensor:
        """Convolve x (B, H, W, C), or GELU(x) if this is the layer's option and x is not `activated` yet."""
        gelu = self.gelu and not activated
        if cpu.usable(x) and self.weight.dtype is x.dtype and x.ndim == 4 and x.shape[3] == self.in_channels:
            image, padding = channels_first(F.gelu(x) if gelu else x), self.padding
            return channels_last(
                cpu.conv(image, self.weight, self.bias, padding, groups=self.groups, residual=self.residual)  # type: ignore[arg-type]
            )
        return depthwise_conv(x, self.weight, self.bias, self.residual, gelu)

    def extra_repr(self) -> str:
        """The text of torch.nn.Conv2d and the options that are on."""
        return super().extra_repr() + ", residual=True" * self.residual + ", gelu=True" * self.gelu
