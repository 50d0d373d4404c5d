"""Fused layers and packed weights of inference on a CPU: equal to plain PyTorch, never stale, only where allowed."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tokamix
from tokamix.layers import DepthwiseConv, MapConv, apply_batch_norm, is_bare
from tokamix.mixers import WeightMixing
from tokamix.models.stvit import STViT
from tokamix.ops import cpu
from tokamix.ops.dispatch import use_backend
from tokamix.ops.super_token import reference
from tokamix.ops.super_token.cpu import mix

TINY: dict[str, Any] = {"dims": (16, 16, 32, 32), "depths": (1, 1, 1, 1), "num_heads": (1, 2, 2, 4), "num_classes": 5}
FORMS: dict[str, dict[str, Any]] = {
    "as published": {},
    "layer scale, two iterations": {"layer_scale": (None, 0.5, 0.5, 0.5), "n_iter": 2, "stoken_sizes": (3, 2, 1, 1)},
    "isotropic form": {"projection": 0, "conv_stem": False, "cpe": False, "conv_ffn": False, "relative_position": True},
    "refined by convolutions": {"refine": "conv"},
}

pytestmark = pytest.mark.skipif(not cpu._AVAILABLE or cpu.dispatch.INTERPRET, reason="PyTorch was built without oneDNN")


@pytest.fixture(autouse=True)
def no_small_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use oneDNN for small layers as well, and start and end without packed weights."""
    monkeypatch.setattr(cpu, "MIN_PRODUCTS", 0)
    cpu._packed.clear()
    yield
    cpu._packed.clear()


def create(**options: Any) -> STViT:
    torch.manual_seed(0)
    model = STViT(**TINY | options).eval()
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm1d):
            norm.running_mean.normal_()
            norm.running_var.uniform_(0.5, 2.0)
    return model


@torch.inference_mode()
def assert_equal_to_plain(model: nn.Module, images: Tensor) -> Tensor:
    with use_backend("eager"):
        expected = model(images)
    for _ in range(2):  # packs the weights, then takes the packed ones
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
    return expected


@pytest.mark.parametrize("form", FORMS)
def test_models(form: str) -> None:
    model = create(**FORMS[form])
    assert_equal_to_plain(model, torch.randn(1, 3, 64, 64))
    assert len(cpu._packed) >= 8
    assert_equal_to_plain(model, torch.randn(2, 3, 57, 90))  # another size and batch with the same packed weights


OTHERS: dict[str, dict[str, Any]] = {
    "atmnet_xtiny": {"dims": (16, 16, 32, 32), "depths": (1, 2, 1, 1)},
    "amixer_tiny": {"dims": (12, 24, 24, 48), "depths": (1, 2, 1, 1), "num_heads": (2, 2, 2, 4), "img_size": 64},
    "xcit_tiny_12_p16_sima": {"embed_dim": 16, "depth": 2, "num_heads": 2},
    "deit_small_sima": {"embed_dim": 16, "depth": 2, "num_heads": 2, "dynamic_img_size": True},
    "pyramid_nano_softmax": {},
    "columnar_tiny_xca": {"dim": 16, "depth": 2, "num_heads": 2},
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_families(name: str) -> None:
    torch.manual_seed(0)
    model = tokamix.create_model(name, num_classes=5, **OTHERS[name]).eval()
    assert_equal_to_plain(model, torch.randn(1, 3, 64, 64))
    assert len(cpu._packed) >= 4
    assert_equal_to_plain(model, torch.randn(2, 3, 64, 96))


def test_banks_are_expanded_again_when_they_change() -> None:
    mixer, x = WeightMixing(8, 4, num_heads=2, partition=True), torch.randn(2, 64, 8)
    for _ in range(2):
        with torch.inference_mode():
            with use_backend("eager"):
                expected = mixer(x, (8, 8))
            for _ in range(2):
                torch.testing.assert_close(mixer(x, (8, 8)), expected, rtol=1e-4, atol=1e-5)
        assert any(kept.kind == "matrices (4, 4)" for kept in cpu._packed.values())
        nn.init.normal_(mixer.bank)


@pytest.mark.parametrize("n_iter", [1, 3])
@pytest.mark.parametrize(
    ("shape", "cell"), [((2, 7, 5, 3), (2, 2)), ((1, 4, 12, 5), (4, 3)), ((2, 5, 6, 4), (8, 8)), ((1, 3, 1, 2), (1, 1))]
)
def test_super_tokens(shape: tuple[int, ...], cell: tuple[int, int], n_iter: int) -> None:
    x = torch.randn(shape) * 3
    tokens, association, _ = reference.sample(x, cell, n_iter)
    expected = reference.scatter(tokens.sin(), association, cell)
    torch.testing.assert_close(mix(x, cell, n_iter, lambda tokens, _: tokens.sin()), expected, rtol=1e-4, atol=1e-5)
    total = mix(x, cell, n_iter, lambda tokens, _: tokens.sin(), residual=2 * x)
    torch.testing.assert_close(total, expected + 2 * x, rtol=1e-4, atol=1e-5)


def test_far_logits_do_not_overflow() -> None:
    x = torch.randn(1, 8, 8, 16) * 100
    assert mix(x, (4, 4), 1, lambda tokens, _: tokens).isfinite().all()


@pytest.mark.parametrize("rows", [3, cpu.MAX_PACKED_ROWS + 1])
@torch.inference_mode()
def test_linear(rows: int) -> None:
    with torch.inference_mode(False):
        layer = nn.Linear(24, 40)
    x, residual = torch.randn(rows, 48)[:, ::2], torch.randn(rows, 80)[:, ::2]
    for bias in (layer.bias, None):
        plain = F.linear(x, layer.weight, bias)
        torch.testing.assert_close(cpu.linear(x, layer.weight, bias), plain, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(cpu.linear(x, layer.weight, bias, gelu=True), F.gelu(plain), rtol=1e-4, atol=1e-5)
        total = cpu.linear(x, layer.weight, bias, residual=residual)
        torch.testing.assert_close(total, plain + residual, rtol=1e-4, atol=1e-5)
    assert bool(cpu._packed) == (rows == 3)


@pytest.mark.parametrize(("hidden", "parts"), [(64, 2), (64, 4), (40, 4), (64, 9), (16, 1)])
def test_conv_mlp_in_parts(hidden: int, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hidden map in parts of its channels, where they divide, and again after a change of the weights."""
    monkeypatch.setattr(cpu, "MAX_HIDDEN", 2 * 5 * 7 * hidden // parts)
    monkeypatch.setattr(cpu, "MAX_PACKED_ROWS", 0)
    layers: Any = nn.Linear(8, hidden), DepthwiseConv(hidden, residual=True), nn.Linear(hidden, 8)
    x, residual = torch.randn(2, 35, 8), torch.randn(2, 35, 8)
    for _ in range(2):
        weights = [(layer.weight, layer.bias) for layer in layers]
        with torch.inference_mode():
            z = F.gelu(layers[0](x)).unflatten(1, (5, 7)).permute(0, 3, 1, 2)
            z = z + F.conv2d(z, layers[1].weight, layers[1].bias, padding=1, groups=hidden)
            expected = layers[2](z.permute(0, 2, 3, 1).flatten(1, 2))
            torch.testing.assert_close(cpu.conv_mlp(x, (5, 7), *weights), expected, rtol=1e-4, atol=1e-5)
            total = cpu.conv_mlp(x, (5, 7), *weights, residual)
            torch.testing.assert_close(total, expected + residual, rtol=1e-4, atol=1e-5)
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.3)


@pytest.mark.parametrize(
    "conv",
    [
        MapConv(8, 12, 3, padding=1, stride=2),
        MapConv(8, 12, (3, 5), padding=(0, 2), stride=(1, 2), dilation=2, bias=False),
        MapConv(8, 12, 3, padding="same"),
        DepthwiseConv(8, residual=True, gelu=True),
        DepthwiseConv(8, 5, bias=False),
    ],
    ids=str,
)
def test_convolutions(conv: nn.Module) -> None:
    whole = torch.randn(2, 20, 30, 8)
    for x in (whole, whole[:1, 3:17, 5:20], whole.transpose(1, 2), torch.randn(1, 8, 9, 7).permute(0, 2, 3, 1)):
        assert_equal_to_plain(conv, x)
    with torch.inference_mode(), pytest.raises((RuntimeError, ValueError), match="channels"):
        conv(torch.randn(1, 9, 9, 7))


def test_batch_norm() -> None:
    norm, x = nn.BatchNorm1d(6), torch.randn(4, 5, 6) + 1
    apply_batch_norm(norm, x)  # moves the running statistics
    for _ in range(2):
        norm.eval()
        expected = norm(x.flatten(0, 1)).view(x.shape).detach()
        with torch.inference_mode():
            torch.testing.assert_close(apply_batch_norm(norm, x), expected)
            norm.train()
            training = apply_batch_norm(norm, x)  # uses the batch's own statistics, and moves the running ones
            torch.testing.assert_close(training.mean((0, 1)), torch.zeros(6), atol=1e-5, rtol=0)


CHANGES: dict[str, Callable[[nn.Linear], Any]] = {
    "optimizer": lambda layer: torch.optim.SGD(layer.parameters(), 0.5).step(),
    "data, in place": lambda layer: layer.weight.data.mul_(0.9),
    "data, one row": lambda layer: layer.weight.data[17].add_(1),
    "data, one column": lambda layer: layer.weight.data[:, 11].add_(1),
    "data, replaced": lambda layer: setattr(layer.weight, "data", torch.randn(40, 24)),
    "state dict": lambda layer: layer.load_state_dict(nn.Linear(24, 40).state_dict()),
    "new parameter": lambda layer: setattr(layer, "weight", nn.Parameter(torch.randn(40, 24))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_changed_weights_are_packed_again(change: str) -> None:
    layer, x = nn.Linear(24, 40), torch.randn(3, 24)
    for _ in range(3):
        with torch.inference_mode():
            before = cpu.linear(x, layer.weight, layer.bias)
            torch.testing.assert_close(before, F.linear(x, layer.weight, layer.bias), rtol=1e-4, atol=1e-5)
        layer.weight.grad = torch.ones_like(layer.weight)
        CHANGES[change](layer)
        with torch.inference_mode():
            after = cpu.linear(x, layer.weight, layer.bias)
            torch.testing.assert_close(after, F.linear(x, layer.weight, layer.bias), rtol=1e-4, atol=1e-5)
            assert not torch.allclose(before, after)


def test_weights_that_count_no_changes_are_not_kept() -> None:
    with torch.inference_mode():
        weight, x = torch.randn(40, 24), torch.randn(3, 24)
        for _ in range(2):
            torch.testing.assert_close(cpu.linear(x, weight, None), F.linear(x, weight), rtol=1e-4, atol=1e-5)
            weight.mul_(2)
    assert not cpu._packed


def test_packed_weights_go_with_the_model() -> None:
    model = create()
    with torch.inference_mode():
        model(torch.randn(1, 3, 32, 32))
    assert cpu._packed
    del model
    gc.collect()
    assert not cpu._packed


def test_only_in_plain_inference(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(2, 3)
    assert not cpu.usable(x)
    with torch.no_grad():
        assert not cpu.usable(x)  # the first pass of a gradient checkpoint
    with torch.inference_mode():
        assert cpu.usable(x)
        assert not any(cpu.usable(t) for t in (x.double(), x.bfloat16(), x.to("meta"), x[:0]))
        with torch.autocast("cpu", torch.bfloat16):
            assert not cpu.usable(x)
        with use_backend("eager"):
            assert not cpu.usable(x)
        monkeypatch.setattr(torch._C, "_get_mkldnn_enabled", lambda: False)  # what torch.backends.mkldnn.flags sets
        assert not cpu.usable(x)


def test_hooks_and_adapters_see_their_layers() -> None:
    class Adapter(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.layer, self.calls = layer, 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.layer(x) * 2

    model, images = create(), torch.randn(1, 3, 32, 32)
    plain = assert_equal_to_plain(model, images)
    mlp, seen = model.stages[2].blocks[0].mlp, []
    handle = mlp.fc1.register_forward_hook(lambda *args: seen.append(args[2]))
    assert_equal_to_plain(model, images)
    assert len(seen) == 3
    assert seen[0].min() < -0.3  # before GELU, whose least value is -0.17
    handle.remove()
    with model.stem[4].register_forward_hook(lambda *args: seen.append(args[2])):
        assert_equal_to_plain(model, images)
    assert len(seen) == 6
    with torch.inference_mode(), pytest.raises(RuntimeError, match="channels"):
        model.stem(torch.randn(1, 4, 32, 32))
    mlp.fc2 = adapter = Adapter(mlp.fc2)
    assert not torch.allclose(assert_equal_to_plain(model, images), plain)
    assert adapter.calls == 3
    assert not is_bare(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear)
