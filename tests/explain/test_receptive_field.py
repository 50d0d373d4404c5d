"""Receptive fields against known ones."""

import pytest
import timm
import torch
from torch import nn

import tokamix
from tokamix.explain.receptive_field import receptive_field

SMALL = {"img_size": 32, "patch_size": 4, "dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


class Convolutions(nn.Module):
    """Two 3x3 convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(2, 5, 3, padding=1), nn.Conv2d(5, 4, 3, padding=1)).double()

    def forward_features(self, x):
        return self.layers(x)


def columnar(mixer: str, **kwargs) -> nn.Module:
    return tokamix.create_body("columnar_tiny", mixer, **{**SMALL, **kwargs}).double()


def test_convolutions_have_the_analytic_field() -> None:
    """The norm of the convolution of both kernels, centred at the token."""
    model = Convolutions()
    first, second = (layer.weight.detach() for layer in model.layers)
    both = torch.zeros(4, 2, 5, 5, dtype=torch.float64)  # both kernels convolved, by definition
    for y in range(3):
        for x in range(3):
            both[:, :, y : y + 3, x : x + 3] += torch.einsum("om,mihw->oihw", second[:, :, y, x], first)
    expected = torch.zeros(11, 13, dtype=torch.float64)
    expected[4:9, 2:7] = both.square().sum((0, 1)).sqrt()
    field = receptive_field(model, torch.randn(2, 11, 13, dtype=torch.float64), token=(6, 4))
    torch.testing.assert_close(field, expected, rtol=1e-12, atol=0)


def test_without_mixing_a_token_depends_on_its_patch() -> None:
    field = receptive_field(columnar("identity"), torch.randn(3, 32, 32, dtype=torch.float64), token=(2, 5))
    assert (field[8:12, 20:24] > 0).all()
    field[8:12, 20:24] = 0
    assert (field == 0).all()


@pytest.mark.parametrize("mixer", ["softmax", "sima", "weight_mixing", "super_token", "active_token"])
def test_global_mixers_depend_on_every_pixel(mixer: str) -> None:
    assert (receptive_field(columnar(mixer), torch.randn(3, 32, 32, dtype=torch.float64)) > 0).all()


def test_pooling_depends_on_neighbours() -> None:
    field = receptive_field(columnar("pooling", depth=1), torch.randn(3, 32, 32, dtype=torch.float64), token=(3, 3))
    assert (field[8:20, 8:20] > 0).all()
    assert torch.count_nonzero(field) == 12 * 12


def test_default_token_and_levels() -> None:
    model, image = columnar("pooling"), torch.randn(3, 32, 32, dtype=torch.float64)
    assert torch.equal(receptive_field(model, image), receptive_field(model, image, (4, 4)))
    assert torch.count_nonzero(receptive_field(model, image, level=0)) == 12 * 12
    assert torch.count_nonzero(receptive_field(model, image)) == 20 * 20


MODELS = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 2},
    "resnet10t": {},
    "swin_tiny_patch4_window7_224": {"img_size": 64, "depths": (1, 1, 1, 1)},
    "atmnet_xtiny": {"depths": (1, 1, 1, 1)},
    "deit_tiny_cb": {"img_size": 64, "depth": 2},
}


@pytest.mark.parametrize("name", MODELS)
def test_timm_models_and_ours(name: str) -> None:
    model = timm.create_model(name, num_classes=0, **MODELS[name]).train()
    field = receptive_field(model, torch.randn(3, 64, 64), probes=4)
    assert field.shape == (64, 64)
    assert field.isfinite().all()
    assert field.max() > 0
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_probes_estimate_the_field() -> None:
    """The mean square over pixels is unbiased; with 8 probes it is within a few standard errors."""
    model, image = columnar("softmax"), torch.randn(3, 32, 32, dtype=torch.float64)
    exact, estimate = receptive_field(model, image), receptive_field(model, image, probes=8)
    assert not torch.equal(exact, estimate)
    assert torch.equal(estimate, receptive_field(model, image, probes=8))
    torch.testing.assert_close(estimate.square().mean().sqrt(), exact.square().mean().sqrt(), rtol=0.5, atol=0)
    assert torch.equal(exact, receptive_field(model, image, probes=16))


def test_tokens_without_intermediates() -> None:
    class Tokens(nn.Module):
        num_prefix_tokens = 1

        def forward_features(self, x):
            patches = nn.functional.avg_pool2d(x, 4).flatten(2).transpose(1, 2)
            return torch.cat([patches[:, :1], patches], 1)

    field = receptive_field(Tokens(), torch.randn(1, 8, 16), token=(1, 2))
    assert torch.count_nonzero(field) == 16
    assert (field[4:8, 8:12] == 1 / 16).all()


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"needs one image \(C, H, W\), got shape \(1, 3, 32, 32\)"):
        receptive_field(columnar("identity"), torch.zeros(1, 3, 32, 32))
    with pytest.raises(ValueError, match=r"token \(8, 0\) is outside of the map of 8x8 tokens"):
        receptive_field(columnar("identity"), torch.zeros(3, 32, 32, dtype=torch.float64), token=(8, 0))
    with pytest.raises(ValueError, match="Linear has neither forward_intermediates nor forward_features"):
        receptive_field(nn.Linear(2, 2), torch.zeros(3, 4, 4))
