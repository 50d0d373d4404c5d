"""Linear layers for inference, and GELU as a part of them."""

from collections.abc import Callable
from functools import partial

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.func import jvp
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.checkpoint import checkpoint
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


INPUTS = {
    "tokens": torch.randn(2, 5, 8),
    "matrix": torch.randn(7, 8),
    "strided": torch.randn(2, 10, 16)[:, ::2, ::2],
    "transposed": torch.randn(8, 5, 3).transpose(0, 2),
    "expanded": torch.randn(1, 5, 8).expand(3, 5, 8),
}


@pytest.fixture
def on_amd(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Train with oneDNN; one entry for each of its products."""
    calls: list[bool] = []
    product = cpu._product
    monkeypatch.setattr(cpu, "_is_amd", lambda: True)
    monkeypatch.setattr(cpu, "MIN_PRODUCTS", 0)
    monkeypatch.setattr(cpu, "_product", lambda *args: calls.append(True) or product(*args))
    return calls


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", INPUTS)
def test_gradients_on_a_cpu(on_amd: list[bool], kind: str, bias: bool) -> None:
    layer, x = nn.Linear(8, 6, bias=bias), INPUTS[kind].clone(memory_format=torch.preserve_format).requires_grad_()
    weights = torch.randn(6)

    def loss(y: Tensor) -> Tensor:
        return (y * weights).square().sum() + y.sum()  # the gradient of a sum alone has no memory of its own

    leaves = (x, *layer.parameters())
    for function in (loss, torch.sum):
        expected = torch.autograd.grad(function(layer(x)), leaves)
        for grad, other in zip(torch.autograd.grad(function(apply_linear(layer, x)), leaves), expected, strict=True):
            torch.testing.assert_close(grad, other, rtol=1e-4, atol=1e-5)
    assert len(on_amd) == 6
    torch.autograd.grad(apply_linear(layer, x.detach()).sum(), leaves[1:])
    assert len(on_amd) == 8  # no gradient of the tokens


@needs_onednn
def test_other_derivatives_on_a_cpu(on_amd: list[bool]) -> None:
    """Gradients of gradients, several gradients at once, forward mode, torch.func and gradient checkpoints."""
    layer, x, v = nn.Linear(8, 6), torch.randn(5, 8, requires_grad=True), torch.randn(5, 8)

    def double(call: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        (grad,) = torch.autograd.grad(call(layer, x).square().sum(), x, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), layer.weight)[0]

    torch.testing.assert_close(double(apply_linear), double(nn.Linear.forward), rtol=1e-4, atol=1e-4)
    several = torch.randn(3, 5, 6)
    grads = [
        torch.autograd.grad(call(layer, x), x, several, is_grads_batched=True)[0]
        for call in (apply_linear, nn.Linear.forward)
    ]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)
    for reentrant in (False, True):
        checkpointed = checkpoint(apply_linear, layer, x, use_reentrant=reentrant)
        assert torch.equal(checkpointed, apply_linear(layer, x))  # the same product in both passes
        checkpointed.sum().backward()
        torch.testing.assert_close(x.grad, layer.weight.sum(0).expand(5, 8))
        x.grad = None
    with torch.no_grad():
        assert torch.equal(apply_linear(layer, x), checkpointed)
    assert on_amd
    on_amd.clear()
    calls = (partial(call, layer) for call in (apply_linear, nn.Linear.forward))
    tangents = [jvp(call, (x.detach(),), (v,))[1] for call in calls]
    torch.testing.assert_close(*tangents)
    with forward_ad.dual_level():
        out = apply_linear(layer, forward_ad.make_dual(x.detach(), v))
        torch.testing.assert_close(forward_ad.unpack_dual(out).tangent, tangents[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert apply_linear(layer, x).dtype is torch.bfloat16
    assert not on_amd


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
