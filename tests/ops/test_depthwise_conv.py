"""Depthwise convolution on channels-last maps: its definition, every option, and its registration."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tokamix.layers import DepthwiseConv
from tokamix.ops import depthwise_conv


def numbers(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("k", [3, 5])
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (2, 4, 3, 5)])
def test_definition(shape: tuple[int, ...], residual: bool, gelu: bool, k: int) -> None:
    b, h, w, c = shape
    x, weight, bias = numbers(*shape), numbers(c, 1, k, k), numbers(c)
    y = depthwise_conv(x, weight, bias, residual, gelu)
    z = x * 0.5 * (1 + torch.erf(x / 2**0.5)) if gelu else x
    for i in range(h):
        for j in range(w):
            expected = bias + (z[:, i, j] if residual else 0)
            for di in range(k):
                for dj in range(k):
                    u, v = i + di - k // 2, j + dj - k // 2
                    if 0 <= u < h and 0 <= v < w:
                        expected = expected + z[:, u, v] * weight[:, 0, di, dj]
            torch.testing.assert_close(y[:, i, j], expected.expand(b, c))


def test_gradients() -> None:
    inputs = [t.requires_grad_() for t in (numbers(1, 3, 4, 2), numbers(2, 1, 3, 3), numbers(2))]
    torch.autograd.gradcheck(lambda x, w, b: depthwise_conv(x, w, b, True, True), inputs)
    torch.autograd.gradcheck(lambda x, w, b: depthwise_conv(x, w, b), inputs)


@pytest.mark.parametrize(("residual", "gelu"), [(True, False), (False, True)])
def test_layer(residual: bool, gelu: bool) -> None:
    layer = DepthwiseConv(6, residual=residual, gelu=gelu)
    x = torch.randn(2, 5, 7, 6)
    z = F.gelu(x) if gelu else x
    y = F.conv2d(z.permute(0, 3, 1, 2), layer.weight, layer.bias, padding=1, groups=6).permute(0, 2, 3, 1)
    torch.testing.assert_close(layer(x), y + z if residual else y)


@pytest.mark.parametrize("biased", [False, True])
def test_custom_op(biased: bool) -> None:
    x, weight = numbers(2, 3, 5, 4).requires_grad_(), numbers(4, 1, 3, 3).requires_grad_()
    leaves = [x, weight] + ([numbers(4).requires_grad_()] if biased else [])
    bias = leaves[2] if biased else None
    own, plain = (
        torch.ops.tokamix.depthwise_conv(x, weight, bias, True, True),
        depthwise_conv(x, weight, bias, True, True),
    )
    torch.testing.assert_close(own, plain)
    loss = numbers(*own.shape)
    torch.testing.assert_close(torch.autograd.grad(own, leaves, loss), torch.autograd.grad(plain, leaves, loss))
    torch.library.opcheck(torch.ops.tokamix.depthwise_conv, (x, weight, bias, True, True))


def test_compiles_without_graph_break() -> None:
    layer = DepthwiseConv(4, residual=True, gelu=True)
    x = torch.randn(2, 3, 5, 4)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"map of shape \(B, H, W, C\), got \(2, 3\)"):
        depthwise_conv(numbers(2, 3), numbers(3, 1, 3, 3))
    for shape in ((4, 1, 3, 3), (3, 1, 2, 2), (3, 3)):
        with pytest.raises(ValueError, match=r"3 channels need kernels \(3, 1, odd, odd\), got"):
            depthwise_conv(numbers(1, 2, 2, 3), numbers(*shape))
