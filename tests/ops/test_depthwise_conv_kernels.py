"""The depthwise convolution kernels against the float32 reference, under Triton's interpreter or on a GPU."""

import pytest
import torch
from torch import Tensor

from tests.ops.kernels import DEVICE, assert_kernel_close, relative_rmse
from tokamix.ops import depthwise_conv

FORMS = [(False, False), (True, False), (True, True)]


def kernels(channels: int) -> tuple[Tensor, Tensor]:
    return torch.randn(channels, 1, 3, 3), torch.randn(channels)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("residual", "gelu"), FORMS)
@pytest.mark.parametrize("shape", [(1, 1, 1, 7), (1, 7, 5, 65), (2, 9, 3, 20)])
def test_against_reference(
    shape: tuple[int, ...], residual: bool, gelu: bool, dtype: torch.dtype, poison_empty: None
) -> None:
    assert_kernel_close(depthwise_conv, (torch.randn(shape), *kernels(shape[-1])), dtype, residual=residual, gelu=gelu)


def test_wide_maps(poison_empty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Columns in several programs, channels in several blocks, and several tiles per program in the backward pass."""
    from tokamix.ops.depthwise_conv import kernels as module

    plan = module.Plan(rows=4, block_c=16, columns=7, programs=6)
    monkeypatch.setattr(module, "plan_forward", lambda shape: plan)
    monkeypatch.setattr(module, "plan_backward", lambda shape: plan)
    inputs = (torch.randn(1, 5, 17, 20), *kernels(20))
    assert_kernel_close(depthwise_conv, inputs, torch.float32, residual=True, gelu=True)


def test_without_bias(poison_empty: None) -> None:
    assert_kernel_close(depthwise_conv, (torch.randn(1, 5, 6, 8), kernels(8)[0]), torch.float32)


def test_non_contiguous(poison_empty: None) -> None:
    x = torch.randn(2, 9, 4, 6, device=DEVICE).permute(0, 2, 3, 1).requires_grad_()
    weight, bias = (t.to(DEVICE) for t in kernels(9))
    results = []
    for backend in ("eager", "triton"):
        y = depthwise_conv(x, weight, bias, True, True, backend=backend)
        seed = torch.linspace(-1, 1, y.numel(), device=DEVICE).view(2, 9, 4, 6).permute(0, 2, 3, 1)
        results.append((y, torch.autograd.grad(y, x, seed)[0]))
    torch.testing.assert_close(results[1], results[0])


def test_float32_weights_with_half_precision_maps(poison_empty: None) -> None:
    """Under autocast, the kernels take the float32 master weights."""
    x = torch.randn(1, 5, 6, 8, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    weight, bias = (t.to(DEVICE).requires_grad_() for t in kernels(8))
    y = depthwise_conv(x, weight, bias, True, True, backend="triton")
    exact = depthwise_conv(x.float(), weight, bias, True, True, backend="eager")
    resolution = torch.finfo(torch.bfloat16).eps
    assert relative_rmse(y, exact) < resolution
    ours, expected = (torch.autograd.grad(out.sum(), (x, weight, bias)) for out in (y, exact))
    for a, b, dtype in zip(ours, expected, (torch.bfloat16, torch.float32, torch.float32), strict=True):
        assert a.dtype == dtype
        assert relative_rmse(a, b) < resolution


@pytest.mark.parametrize("value", [0.0, 1e-4, 1e4])
def test_extremes_in_float16(value: float, poison_empty: None) -> None:
    x = (torch.randn(1, 4, 5, 8, device=DEVICE).sign() * value).half()
    weight = torch.full((8, 1, 3, 3), 1 / 9, device=DEVICE, dtype=torch.float16)
    got, expected = (depthwise_conv(x, weight, None, True, True, backend=b) for b in ("triton", "eager"))
    torch.testing.assert_close(got, expected, rtol=2e-3, atol=3e-5)


def test_compiles_without_graph_break() -> None:
    x = torch.randn(2, 5, 6, 4, device=DEVICE, requires_grad=True)
    weight, bias = (t.to(DEVICE).requires_grad_() for t in kernels(4))
    compiled = torch.compile(depthwise_conv, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, weight, bias), depthwise_conv(x, weight, bias))
