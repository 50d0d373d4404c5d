"""LayerNorm: the formula, its dtypes under autocast, and the layer that calls it."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.layers import LayerNorm, norm
from tokamix.ops import dispatch, layer_norm
from tokamix.ops.layer_norm.op import _layer_norm


def make(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in ((2, 3, 6), (6,), (6,))]


def test_formula_and_gradients() -> None:
    x, weight, bias = make()
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
    torch.testing.assert_close(layer_norm(x, weight, bias, 0.1), (x - mean) / (variance + 0.1).sqrt() * weight + bias)
    for light in (True, False):
        with dispatch.use_light(light):
            leaves = [t.requires_grad_() for t in (x, weight, bias)]
            torch.autograd.gradcheck(lambda *t: _layer_norm(*t, 0.1, torch.float64), leaves)


def test_dtype_under_autocast() -> None:
    x, weight, bias = make(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        for out in (layer_norm(x, weight, bias), layer_norm(x.bfloat16(), weight, bias)):
            assert out.dtype is torch.bfloat16
        assert layer_norm(*make()).dtype is torch.float64
    assert layer_norm(x, weight, bias).dtype is torch.float32
    torch.testing.assert_close(layer_norm(x, weight, bias), F.layer_norm(x, (6,), weight, bias))


def test_the_operator_computes_in_float32() -> None:
    x, weight, bias = make(torch.float32)
    x = (x + 100).bfloat16().requires_grad_()  # the mean of bfloat16 numbers would be rounded
    out = _layer_norm(x, weight, bias, 1e-5, torch.bfloat16)
    expected = F.layer_norm(x.float(), (6,), weight, bias)
    assert torch.equal(out, expected.bfloat16())
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close(grad, torch.autograd.grad(expected.sum(), x)[0])


@pytest.mark.parametrize(("weight", "bias"), [((5,), (6,)), ((6,), (1,)), ((1, 6), (6,))])
def test_wrong_shapes(weight: tuple[int, ...], bias: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must have one value per channel, \(6,\), got"):
        layer_norm(torch.zeros(2, 6), torch.zeros(weight), torch.zeros(bias))


def test_cases_without_a_kernel() -> None:
    wide = torch.zeros(1, 8193), torch.zeros(8193), torch.zeros(8193)
    x, weight, bias = make(torch.float32)
    for inputs in (wide, (x, weight, bias.half())):
        with pytest.raises(RuntimeError, match="cannot run on the triton backend"):
            layer_norm(*inputs, backend="triton")


@pytest.mark.parametrize("options", [{"bias": False}, {"elementwise_affine": False}, {"normalized_shape": (3, 6)}])
def test_layer_with_options_of_torch(monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]) -> None:
    monkeypatch.setattr(norm, "FEW_NUMBERS", 1)
    monkeypatch.setattr(dispatch, "why_not", lambda *tensors: None)  # as on a GPU
    options = {"normalized_shape": 6, **options}
    x = torch.randn(2, 3, 6)
    assert torch.equal(LayerNorm(**options)(x), nn.LayerNorm(**options)(x))


def test_layer_calls_the_operator_on_large_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones, compiled calls and other devices take PyTorch's; the names and values of weights are PyTorch's."""
    calls = []

    def record(*inputs: object) -> Tensor:
        calls.append(inputs)
        return layer_norm(*inputs)

    monkeypatch.setattr(norm, "layer_norm", record)
    layer, plain, x = LayerNorm(6), nn.LayerNorm(6), torch.randn(2, 3, 6)
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), plain(x))
    monkeypatch.setattr(norm, "FEW_NUMBERS", 36)
    assert torch.equal(layer(x), plain(x))
    assert not calls
    monkeypatch.setattr(dispatch, "why_not", lambda *tensors: None)  # as on a GPU
    monkeypatch.setattr(dispatch, "choose", lambda *_, **__: "eager")
    assert torch.equal(layer(x), plain(x))
    assert len(calls) == 1
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), plain(x))
    with dispatch.use_backend("eager"):
        layer(x)
    layer(x[:1])
    assert len(calls) == 1
