"""Linear layers for inference, and GELU as a part of them."""

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.flop_counter import FlopCounterMode

from tokamix.layers import GELU, Mlp, apply_linear, fused_linear_gelu
from tokamix.ops import cpu, dispatch

without_onednn = not cpu._AVAILABLE or dispatch.INTERPRET
needs_onednn = pytest.mark.skipif(without_onednn, reason="PyTorch was built without oneDNN")


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """One entry for each product of oneDNN: whether GELU is a part of it."""
    calls: list[bool] = []
    product = cpu.linear

    def count(x: Tensor, weight: Tensor, bias: Tensor | None, gelu: bool = False) -> Tensor:
        calls.append(gelu)
        return product(x, weight, bias, gelu=gelu)

    monkeypatch.setattr(cpu, "linear", count)
    monkeypatch.setattr(cpu, "MIN_PRODUCTS", 0)
    return calls


@needs_onednn
def test_inference_on_a_cpu(products: list[bool]) -> None:
    mlp, x = Mlp(8, 16), torch.randn(2, 5, 8)
    expected = mlp(x)
    assert not products
    with torch.inference_mode():
        torch.testing.assert_close(mlp(x), expected.detach(), rtol=1e-4, atol=1e-5)
        assert products == [True, False]
        for bias in (True, False):
            layer = nn.Linear(8, 3, bias=bias)
            torch.testing.assert_close(apply_linear(layer, x[:, ::2]), layer(x[:, ::2]), rtol=1e-4, atol=1e-5)
        assert len(products) == 4


@needs_onednn
def test_what_is_no_plain_linear_layer_is_called(products: list[bool]) -> None:
    tanh, x = nn.GELU("tanh"), torch.randn(2, 5, 8)
    with torch.inference_mode():
        mlp = Mlp(8, 16, act_layer=lambda: tanh)
        torch.testing.assert_close(mlp(x), mlp.fc2(F.gelu(mlp.fc1(x), approximate="tanh")), rtol=1e-4, atol=1e-5)
        assert products == [False, False]
        products.clear()
        normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))
        doubled = nn.Linear(8, 3)
        doubled.register_forward_hook(lambda layer, inputs, out: 2 * out)
        for layer in (normed, doubled, nn.Identity(), nn.Linear(8, 3).double()):
            y = x.double() if layer is not normed and layer is not doubled else x
            assert torch.equal(apply_linear(layer, y), layer(y))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            apply_linear(nn.Linear(7, 3), x)
        assert apply_linear(nn.Linear(8, 3), x[0, 0]).shape == (3,)
    assert not products


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
