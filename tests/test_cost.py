"""Counts of exp and multiply-accumulates against the paper's formulas and hand arithmetic."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import nn

import tokamix
from tokamix import count_exp, count_macs

N, C, HIDDEN = 196, 192, 768  # tokens, channels and hidden channels of columnar_tiny at 224 px


class Calls(nn.Module):
    """A model that applies one function to an image."""

    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(x)


def test_deit_evaluates_exp_for_each_pair_of_tokens_and_head() -> None:
    counts = count_exp(timm.create_model("deit_tiny_patch16_224"), 224)
    assert counts == {"softmax": 12 * 3 * 197**2, "gelu": 12 * 197 * 768}
    assert counts["softmax"] == 1_397_124
    assert counts["exp"] == 0


def test_xcit_evaluates_exp_for_each_pair_of_channels_and_head() -> None:
    counts = count_exp(timm.create_model("xcit_tiny_12_p16_224"), 224)
    class_attention = 2 * 4 * 197
    assert counts["softmax"] == 12 * 4 * 48**2 + class_attention


@pytest.mark.parametrize("body", ["columnar_tiny", "pyramid_tiny"])
def test_sima_evaluates_none(body: str) -> None:
    assert count_exp(tokamix.create_body(body, "sima"))["softmax"] == 0
    assert count_exp(tokamix.create_body(body, "sima", act_layer="relu")).total() == 0
    assert count_exp(timm.create_model("xcit_tiny_12_p16_sima"))["softmax"] == 0


@pytest.mark.parametrize(
    ("mixer", "expected"),
    [
        ("softmax", {"softmax": 3 * N**2}),
        ("xca", {"softmax": 3 * 64**2}),
        ("linformer", {"softmax": 3 * N * 49}),
        ("performer", {"exp": 2 * 3 * N * 266}),
        ("nystrom", {"softmax": 3 * (2 * N * 49 + 49 * 49)}),
        ("soft", {"exp": 3 * (N * 49 + 49 * 49)}),
        ("efficient", {"softmax": 2 * N * C}),
        ("cosformer", {}),
        ("pooling", {}),
        ("identity", {}),
        ("active_token", {"softmax": 3 * C, "gelu": C // 4}),
        ("super_token", {"softmax": 9 * N + 3 * 49**2}),
        ("weight_mixing", {"softmax": 3 * N**2, "gelu": N * C // 4}),
    ],
)
def test_mixers(mixer: str, expected: dict[str, int]) -> None:
    model = tokamix.create_body("columnar_tiny", mixer, depth=1, act_layer="relu", device="meta")
    assert count_exp(model) == expected


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda x: F.log_softmax(x, -1), {"softmax": 192}),
        (lambda x: torch.logsumexp(x, -1), {"softmax": 192}),
        (lambda x: x.sigmoid_() + F.silu(x), {"sigmoid": 384}),
        (lambda x: F.glu(x, 2), {"sigmoid": 96}),
        (lambda x: F.logsigmoid(x), {"sigmoid": 192}),
        (lambda x: F.gelu(x, approximate="tanh") + torch.erf(x), {"gelu": 384}),
        (lambda x: x.tanh() + x.exp(), {"tanh": 192, "exp": 192}),
        (lambda x: F.relu(x) + F.hardswish(x) + x.cos(), {}),
        (lambda x: F.scaled_dot_product_attention(x, x[:, :, :3], x[:, :, :3]), {"softmax": 3 * 8 * 3}),
    ],
)
def test_kinds(function, expected: dict[str, int]) -> None:
    assert count_exp(Calls(function), 8) == expected


def test_fused_attention_counts_where_meta_cannot_run() -> None:
    """A model with a tensor outside its state cannot run on the meta device; on its own device the counts are equal."""
    outside = torch.ones(1, 3, 8, 8)
    stuck = Calls(lambda x: F.scaled_dot_product_attention(x + outside, x[:, :, :3], x[:, :, :3]))
    assert count_exp(stuck, 8) == {"softmax": 3 * 8 * 3}
    assert count_macs(stuck, 8) == 3 * 8 * 3 * (8 + 8)


def test_transformer_layers_are_counted() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
    model = Calls(lambda x: layer(x.flatten(1, 2)))
    model.layer = layer
    assert count_exp(model, 8) == {"softmax": 2 * 24**2, "gelu": 24 * 16}
    assert torch.backends.mha.get_fastpath_enabled()
    assert model.training


def test_macs() -> None:
    column = tokamix.create_body("columnar_tiny", "identity", depth=1)
    assert count_macs(column) == N * (768 * C + 2 * C * HIDDEN) + C * 1000
    softmax = tokamix.create_body("columnar_tiny", "softmax", depth=1)
    assert count_macs(softmax) - count_macs(column) == N * 4 * C * C + 2 * N * N * C
    assert count_macs(timm.create_model("deit_tiny_patch16_224")) == 1_253_683_200
    assert count_macs(timm.create_model("resnet18"), (64, 96)) == count_macs(timm.create_model("resnet18"), (96, 64))


def test_macs_of_deformable_convolution() -> None:
    from torchvision.ops import DeformConv2d

    deform = DeformConv2d(4, 6, 3, padding=1)
    model = Calls(lambda x: deform(x[:, :1].expand(-1, 4, -1, -1), x.new_zeros(1, 18, 8, 8)))
    model.deform = deform
    assert count_macs(model, 8) == 64 * 6 * 4 * 9


def test_the_model_is_unchanged() -> None:
    model = tokamix.create_body("columnar_tiny", "softmax", depth=1).train()
    model.blocks[0].eval()
    before = {n: p.clone() for n, p in model.state_dict().items()}
    count_exp(model, 32)
    count_macs(model.double(), 32)
    assert model.training
    assert not model.blocks[0].training
    assert all(torch.equal(p.float(), before[n]) for n, p in model.state_dict().items())
    assert next(model.parameters()).device.type == "cpu"


def test_shared_modules_and_tensors_stay_as_they_are() -> None:
    """A module with two names, and a tensor in two modules."""
    first, tied = nn.Conv2d(3, 3, 1), nn.Conv2d(3, 3, 1)
    model = nn.Sequential(first, nn.GELU(), first, tied)
    tied.weight = first.weight
    x = torch.randn(1, 3, 4, 4)
    expected = model(x)
    assert count_exp(model, 4) == {"gelu": 48}
    assert count_macs(model, 4) == 3 * 9 * 16
    assert torch.equal(model(x), expected)
    assert tied.weight is first.weight
