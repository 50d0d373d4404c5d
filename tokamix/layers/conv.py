"""Convolutions on channels-last maps and on images."""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn

from tokamix.layers.layout import channels_first, channels_last
from tokamix.ops import depthwise_conv, dispatch
from tokamix.ops.depthwise_conv.reference import match_gradient_strides
from tokamix.ops.precision import autocast_dtype


@register_notrace_module
class MapConv(nn.Conv2d):
    """A convolution on channels-last maps (B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (B, H, W, C)."""
        image = channels_first(x)
        if self._prefer_matmul(image):
            return channels_last(self._as_matmul(image))
        weight = self.weight if self.groups == 1 else match_gradient_strides(self.weight)
        return channels_last(self._conv_forward(image, weight, self.bias))

    def _prefer_matmul(self, image: Tensor) -> bool:
        """Whether a CPU would spend most of a convolution reordering its weights, which it does at each call."""
        plain = self.groups == 1 and not isinstance(self.padding, str) and self.padding_mode == "zeros"
        traced = torch.compiler.is_compiling() or dispatch.is_exporting() or torch.jit.is_tracing()
        # only in inference mode: a gradient checkpoint runs twice, first without gradients, and both must be equal
        if image.device.type != "cpu" or not plain or traced or not torch.is_inference_mode_enabled():
            return False
        return self.weight[0].numel() > 4 * image[:, 0].numel()

    def _as_matmul(self, image: Tensor) -> Tensor:
        padding: Any = self.padding
        patches = F.unfold(image, self.kernel_size, self.dilation, padding, self.stride)
        sides = zip(image.shape[2:], self.kernel_size, self.dilation, padding, self.stride, strict=True)
        grid = [(n + 2 * pad - step * (k - 1) - 1) // stride + 1 for n, k, step, pad, stride in sides]
        product = F.linear(patches.mT, self.weight.flatten(1), self.bias)  # (B, h * w, C), channels last
        return channels_first(product.unflatten(1, grid))


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

    Computed as a matrix product, because cuDNN is slow for patches of three channels, and a CPU for large patches.
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

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (B, H, W, C)."""
        return depthwise_conv(x, self.weight, self.bias, self.residual, self.gelu)

    def extra_repr(self) -> str:
        """The text of torch.nn.Conv2d and the options that are on."""
        return super().extra_repr() + ", residual=True" * self.residual + ", gelu=True" * self.gelu
