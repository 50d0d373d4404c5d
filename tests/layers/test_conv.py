"""Convolutions on maps and patches against torch.nn.functional.conv2d."""

import pytest
import torch
import torch.nn.functional as F

from tokamix.layers import PatchConv


@pytest.mark.parametrize("size", [(16, 20), (23, 27)])  # the second leaves pixels over
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("patch", [(8, 10), (4, 2)])  # a product, and on a CPU none
def test_patch_conv_equals_conv2d(patch: tuple[int, int], bias: bool, size: tuple[int, int]) -> None:
    conv = PatchConv(3, 6, patch, dtype=torch.float64)
    conv.bias = conv.bias if bias else None
    x = torch.randn(2, 3, *size, dtype=torch.float64, requires_grad=True)
    parameters = [x, *conv.parameters()]
    out, expected = conv(x), F.conv2d(x, conv.weight, conv.bias, conv.stride)
    torch.testing.assert_close(out, expected)
    assert out.is_contiguous(memory_format=torch.channels_last)
    gradients = (torch.autograd.grad(y.sin().sum(), parameters) for y in (out, expected))
    torch.testing.assert_close(*gradients)


def test_patch_conv_rejects_wrong_channels() -> None:
    with pytest.raises(RuntimeError, match="to have 3 channels, but got 1 channels"):
        PatchConv(3, 6, 8)(torch.zeros(1, 1, 16, 16))
