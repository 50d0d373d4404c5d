"""The kernels of LayerNorm against the reference, under Triton's interpreter or on a GPU."""

import pytest
import torch
from torch import Tensor

from tests.ops.kernels import DEVICE, assert_kernel_close, relative_rmse
from tokamix.layers import LayerNorm, norm
from tokamix.ops import layer_norm

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(3, 7), (2, 5, 33), (65, 64), (2, 4, 3, 130)]


def make(*shape: int) -> tuple[Tensor, Tensor, Tensor]:
    return 2 * torch.randn(shape) + 0.5, torch.randn(shape[-1]), torch.randn(shape[-1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_reference(shape: tuple[int, ...], dtype: torch.dtype, poison_empty: None) -> None:
    assert_kernel_close(layer_norm, make(*shape), dtype, eps=1e-3)


def test_programs_that_loop(poison_empty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokamix.ops.layer_norm import kernels

    monkeypatch.setattr(kernels, "PROGRAMS", 3)
    monkeypatch.setattr(kernels, "TILE_BACKWARD", 16)
    kernels._launches.cache_clear()
    assert_kernel_close(layer_norm, make(50, 7), torch.float32)
    kernels._launches.cache_clear()


def test_eps_of_zero(poison_empty: None) -> None:
    """Rows that a program has beyond the last one count for nothing."""
    x, weight, bias = (t.to(DEVICE).requires_grad_() for t in make(3, 7))
    outs = [layer_norm(x, weight, bias, 0.0, backend=backend) for backend in ("triton", "eager")]
    found, expected = (torch.autograd.grad(out.square().sum(), (x, weight, bias)) for out in outs)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_one_channel_is_the_bias(poison_empty: None) -> None:
    x, weight, bias = (t.to(DEVICE).requires_grad_() for t in make(4, 1))
    out = layer_norm(x, weight, bias, backend="triton")
    torch.testing.assert_close(out, bias.expand(4, 1))
    grad_x, grad_weight, grad_bias = torch.autograd.grad(out.sum(), (x, weight, bias))
    assert not grad_x.any()
    assert not grad_weight.any()
    assert grad_bias.item() == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype: torch.dtype, poison_empty: None) -> None:
    """The output has autocast's dtype, the gradients have those of the inputs; all are computed in float32."""
    x, weight, bias = (t.to(DEVICE) for t in make(37, 48))
    leaves = [x.to(dtype).requires_grad_(), weight.requires_grad_(), bias.requires_grad_()]
    with torch.autocast(DEVICE, torch.bfloat16):
        out = layer_norm(*leaves, backend="triton")
    assert out.dtype is torch.bfloat16
    seed = torch.linspace(-1, 1, out.numel(), device=DEVICE).bfloat16().view_as(out)
    exact = [t.detach().double().requires_grad_() for t in leaves]
    expected = torch.nn.functional.layer_norm(exact[0], (48,), *exact[1:])
    expected = [expected, *torch.autograd.grad(expected, exact, seed.double())]
    for a, b, c in zip([out, *torch.autograd.grad(out, leaves, seed)], expected, [out, *leaves], strict=True):
        assert a.dtype is c.dtype
        assert relative_rmse(a, b) < (1e-5 if a.dtype is torch.float32 else 4e-3)


def test_large_mean_in_float16(poison_empty: None) -> None:
    """Sums of float16 numbers would overflow."""
    x = torch.linspace(5e4, 6e4, 512, device=DEVICE).half().expand(3, -1)
    weight, bias = torch.ones(512, device=DEVICE).half(), torch.zeros(512, device=DEVICE).half()
    expected = torch.nn.functional.layer_norm(x.double(), (512,))
    torch.testing.assert_close(layer_norm(x, weight, bias, backend="triton").double(), expected, rtol=0, atol=2e-3)


def test_the_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norm, "FEW_NUMBERS", 1)
    layer, x = LayerNorm(24, eps=1e-6).to(DEVICE), torch.randn(2, 5, 24, device=DEVICE)
    expected = torch.nn.functional.layer_norm(x, (24,), layer.weight, layer.bias, 1e-6)
    with torch.autocast(DEVICE, torch.bfloat16):
        out = layer(x)
    assert out.dtype is torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=1e-2, atol=1e-2)
