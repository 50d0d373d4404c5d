"""GELU: its approximation, and GELU as a part of a linear layer."""

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import FlopCounterMode

from tokamix.layers import GELU, Mlp, approximate_gelu, fused_linear_gelu
from tokamix.ops import dispatch


def test_approximate_gelu() -> None:
    x = torch.linspace(-30, 30, 60_001, dtype=torch.float64, requires_grad=True)
    approximate, exact = approximate_gelu(x), F.gelu(x)
    assert (approximate - exact).abs().max() < 3e-5
    slopes = (torch.autograd.grad(y.sum(), x)[0] for y in (approximate, exact))
    assert (next(slopes) - next(slopes)).abs().max() < 2e-4
    torch.testing.assert_close(GELU()(x), exact)


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Take the path of a GPU on the CPU, which has the fused product too; the shapes that it was called for."""
    calls: list[torch.Size] = []
    product = torch._addmm_activation

    def count(bias: Tensor, x: Tensor, weight: Tensor, *, use_gelu: bool) -> Tensor:
        calls.append(x.shape)
        return product(bias, x, weight, use_gelu=use_gelu)

    monkeypatch.setattr(dispatch, "prefers_kernels", lambda x: True)
    monkeypatch.setattr(torch, "_addmm_activation", count)
    return calls


@pytest.mark.parametrize("act", [GELU, nn.GELU, timm.layers.GELU])
@pytest.mark.parametrize("shape", [(2, 5, 8), (3, 8), (0, 8), (0, 5, 8)])
def test_gelu_is_a_part_of_the_product(as_on_a_gpu: list[torch.Size], shape: tuple[int, ...], act: type) -> None:
    mlp, x = Mlp(8, 16, act_layer=act).bfloat16(), torch.randn(shape, dtype=torch.bfloat16)
    with torch.inference_mode():
        torch.testing.assert_close(mlp(x), mlp.fc2(mlp.act(mlp.fc1(x))))
    assert len(as_on_a_gpu) == 1


def test_where_gelu_is_a_layer_of_its_own(as_on_a_gpu: list[torch.Size]) -> None:
    mlp, x = Mlp(8, 16).bfloat16(), torch.randn(2, 8, dtype=torch.bfloat16)
    mlp(x).sum().backward()  # needs the input of GELU
    with torch.inference_mode():
        mlp.float()(x.float())  # no half precision
        mlp.bfloat16()
        for register in (
            mlp.fc1.register_forward_hook,
            mlp.act.register_forward_hook,
            register_module_forward_hook,
            register_module_forward_pre_hook,
        ):
            handle = register(lambda *_: None)
            mlp(x)
            handle.remove()
        for other in (Mlp(8, 16, act_layer=nn.ReLU), Mlp(8, 16, bias=False)):
            other.bfloat16()(x)
        torch.testing.assert_close(mlp(x[0]), mlp(x)[0])  # no matrix
        as_on_a_gpu.pop()
        with FlopCounterMode(display=False):  # would not know the product
            mlp(x)
    assert not as_on_a_gpu
    with torch.inference_mode():
        mlp(x)
    assert as_on_a_gpu


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("compiled", [False, True])
def test_fused_gelu_is_as_exact_as_plain_pytorch(dtype: torch.dtype, compiled: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(320, 1280).cuda()
    x = 3 * torch.randn(2, 197, 320, device="cuda")
    exact, half = F.gelu(linear(x)), linear.to(dtype)
    function = torch.compile(fused_linear_gelu, fullgraph=True) if compiled else fused_linear_gelu
    with torch.inference_mode():
        fused, plain = function(half, x.to(dtype)), F.gelu(half(x.to(dtype)))
    assert fused is not None
    errors = [((y.double() - exact.double()).norm() / exact.double().norm()).item() for y in (fused, plain)]
    assert errors[0] < 2 * errors[1]
