"""Depthwise convolution in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokamix.ops.precision import autocast_dtype


def depthwise_conv(x: Tensor, weight: Tensor, bias: Tensor | None, residual: bool, gelu: bool) -> Tensor:
    """Convolve x (B, H, W, C); see `tokamix.ops.depthwise_conv`."""
    weight = match_gradient_strides(weight)
    z = F.gelu(x) if gelu else x
    down, right = weight.shape[2] // 2, weight.shape[3] // 2
    exact = autocast_dtype(x) in (torch.float32, torch.float64)
    if residual and exact:  # adding 1 at the centre of each kernel adds z; half precision would round the weights
        weight = weight + F.pad(weight.new_ones(1, 1), (right, right, down, down))
    y = F.conv2d(z.permute(0, 3, 1, 2), weight, bias, padding=(down, right), groups=weight.shape[0])
    y = y.permute(0, 2, 3, 1)
    return z + y if residual and not exact else y


def match_gradient_strides(weight: Tensor) -> Tensor:
    """A view of kernels (C, 1, k, k) whose gradient has the strides of `weight`.

    PyTorch's own has channels-last strides, which differ in the axis of length 1 only: the same memory, but
    DistributedDataParallel warns about the difference in every process.
    """
    return weight.flatten(1).view(weight.shape) if weight.stride(1) != 1 else weight


def depthwise_conv_backward(
    grad: Tensor, x: Tensor, weight: Tensor, residual: bool, gelu: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of x, weight and bias, for use inside a custom operator, where autograd is off."""
    z, channels = F.gelu(x) if gelu else x, weight.shape[0]
    padding = [weight.shape[2] // 2, weight.shape[3] // 2]
    maps = [t.permute(0, 3, 1, 2) for t in (grad, z)]
    grad_x, grad_weight, grad_bias = torch.ops.aten.convolution_backward(
        *maps, weight, [channels], [1, 1], padding, [1, 1], False, [0, 0], channels, [True, True, True]
    )
    grad_x = grad_x.permute(0, 2, 3, 1)
    if residual:
        grad_x = grad_x + grad
    return torch.ops.aten.gelu_backward(grad_x, x) if gelu else grad_x, grad_weight, grad_bias
