"""Every mixer, the same questions: rows of the mixing matrix and distances, against known answers."""

import math

import pytest
import timm
import torch
from torch import nn

from tests.explain.models import captured, column, first_layer, images, pyramid
from tokamix.explain import attention, mixing
from tokamix.explain.capture import CapturedLayer, capture

ROW = torch.tensor([27])


def values(layer: CapturedLayer) -> torch.Tensor:
    """The values (B, heads, N, D) that a mixer's weights multiply, by its own layers."""
    mixer = layer.mixer
    if layer.layer.kind == "weight_mixing":
        return mixer.v(layer.x).unflatten(2, (mixer.num_heads, -1)).transpose(1, 2)
    qkv = mixer.refine.qkv if layer.layer.kind == "super_token" else mixer.qkv
    heads = mixer.refine.num_heads if layer.layer.kind == "super_token" else mixer.num_heads
    return qkv(layer.x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)[2]


def output_layer(layer: CapturedLayer) -> nn.Module:
    return layer.mixer.refine.proj if layer.layer.kind == "super_token" else layer.mixer.proj


EXPLICIT = {
    "softmax": {},
    "sima": {},
    "super_token": {"mixer_kwargs": {"cell": 2, "qkv_bias": False}},
    "weight_mixing": {},
    "softmax with qk_norm": {"mixer_kwargs": {"qk_norm": True}},
    "softmax in shifted windows": {"mixer_kwargs": {"window": 3, "shift": 1}},
    "super_token of 1x1": {"mixer_kwargs": {"cell": 1, "relative_grid": (8, 8)}},
    "weight_mixing in shifted windows": {"mixer_kwargs": {"window": (4, 4), "partition": True, "shift": 2}},
    "weight_mixing of a fixed bank": {"mixer_kwargs": {"adaptive": False}},
}


@pytest.mark.parametrize("case", EXPLICIT)
def test_weights_times_values_are_the_output(case: str) -> None:
    """The explicit weights are the mixer's: they reproduce its output exactly."""
    layer = first_layer(case.split()[0], **EXPLICIT[case])
    rows = mixing.mixing_rows(layer, torch.arange(64)).flatten(-2)  # (B, heads, N, N)
    project = output_layer(layer)
    with torch.no_grad():
        mixed = (rows @ values(layer)).transpose(1, 2).flatten(2)
        if layer.layer.kind == "super_token" and layer.mixer.cell != (1, 1):
            # tokens at the border are also associated with zero vectors, which do not pass the last layer
            inside = rows.sum(-1).mean(1).isclose(torch.tensor(1.0, dtype=torch.float64))
            assert 0 < inside.sum() < inside.numel()
            torch.testing.assert_close(project(mixed)[inside], layer.mix(layer.x)[inside])
            return
        torch.testing.assert_close(project(mixed), layer.mix(layer.x))
    torch.testing.assert_close(mixing.mixing_rows(layer, ROW).flatten(-2)[:, :, 0], rows[:, :, 27])


def test_padded_windows() -> None:
    layer = capture(column("weight_mixing", mixer_kwargs={"window": (3, 3), "partition": True}), images(1))[0]
    rows = mixing.mixing_rows(layer, torch.arange(64))
    assert rows.shape == (1, 2, 64, 8, 8)
    torch.testing.assert_close(rows[:, :, 0].sum((-2, -1)), torch.ones(1, 2, dtype=torch.float64))
    assert (rows[:, :, 0, 3:] == 0).all()
    assert (rows[:, :, 63].sum((-2, -1)) < 1).all()  # the last window is padded


def test_jacobian_of_pooling_is_its_window() -> None:
    """out = mean of the neighbourhood - x, so derivatives are 1/9 for neighbours and 8/9 for the token itself."""
    layer = first_layer("pooling")
    row = mixing.mixing_row(layer, (3, 3), probes=None)
    expected = torch.zeros(8, 8, dtype=torch.float64)
    expected[2:5, 2:5] = 1 / 9
    expected[3, 3] = 8 / 9
    torch.testing.assert_close(row, 4 * expected.expand(2, 1, 8, 8))  # the norm of 16 channels


def test_identity_has_distance_zero_and_a_delta_row() -> None:
    layer = first_layer("identity")
    row = mixing.mixing_row(layer, (2, 5), probes=None)
    assert row[0, 0, 2, 5] == 4
    assert row.sum() == 8
    assert (mixing.mixing_distance(layer) == 0).all()


def test_a_convolution_has_the_distance_of_its_kernel() -> None:
    """Equal weights on 3x3 tokens, 4 px apart: 4 * (4 * 1 + 4 * sqrt(2)) / 9 inside of the map."""
    model = column("identity")

    class Blur(nn.Module):
        def forward(self, x, grid):
            maps = x.transpose(1, 2).unflatten(2, grid)
            maps = nn.functional.avg_pool2d(nn.functional.pad(maps, (1, 1, 1, 1), mode="circular"), 3, stride=1)
            return maps.flatten(2).transpose(1, 2)

    model.blocks[0].mixer = Blur()
    layer = capture(model, images(1))[0]
    assert layer.layer.kind == "Blur"
    row = mixing._distances(layer, torch.tensor([27]), "jacobian")
    torch.testing.assert_close(row, torch.full((1, 1, 1), 4 * (4 + 4 * math.sqrt(2)) / 9, dtype=torch.float64))


def test_distance_of_uniform_attention() -> None:
    model = column("softmax")
    nn.init.zeros_(model.blocks[0].mixer.qkv.weight)
    layer = capture(model, images(1))[0]
    place = torch.cartesian_prod(torch.arange(8.0), torch.arange(8.0)).double()
    expected = 4 * torch.cdist(place, place).mean()
    torch.testing.assert_close(mixing.mixing_distance(layer), expected.expand(1, 2))


def test_probes_estimate_the_jacobian() -> None:
    layer = first_layer("active_token")
    exact, estimate = mixing.mixing_row(layer, probes=None), mixing.mixing_row(layer, probes=8)
    assert not torch.equal(exact, estimate)
    torch.testing.assert_close(estimate.square().sum(), exact.square().sum(), rtol=0.5, atol=0)


@pytest.mark.parametrize("mixer", ["active_token", "xca", "linformer", "super_token"])
def test_every_mixer_answers_in_a_pyramid(mixer: str) -> None:
    result = capture(pyramid(mixer), images(1))
    for layer in result:
        row = mixing.mixing_row(layer, probes=4)
        assert row.shape[2:] == layer.grid
        assert row.isfinite().all()
        assert 0 <= mixing.mixing_distance(layer).min() <= mixing.mixing_distance(layer).max() < math.hypot(32, 32)


def test_jacobian_of_one_image_of_a_batch() -> None:
    """ATMNet's blocks receive offsets of every image; each row uses those of its own."""
    model = timm.create_model("atmnet_xtiny", depths=(2, 1), dims=(8, 8), shares=(2, 2)).double().eval()
    batch = images(2, 32, 32)
    both, second = capture(model, batch)[1], capture(model, batch[1:])[1]
    torch.testing.assert_close(mixing.mixing_row(both, probes=4)[1:], mixing.mixing_row(second, probes=4))


def test_smaller_key_maps_divide_their_weight() -> None:
    model = timm.create_model("pvt_small", depths=(1, 1, 1, 1)).eval()
    layer = capture(model, torch.randn(1, 3, 64, 64))[0]  # 16x16 tokens, 2x2 keys
    row = mixing.mixing_row(layer, (0, 0))
    assert row.shape == (1, 1, 16, 16)
    torch.testing.assert_close(row.sum((-2, -1)), torch.ones(1, 1))
    weights = attention.attention_weights(layer, torch.tensor([0]))[0, 0, 0]
    torch.testing.assert_close(row[0, 0, ::8, ::8].flatten() * 64, weights)


def test_bad_input() -> None:
    layer = captured("active_token")[0]
    with pytest.raises(ValueError, match=r"\(active_token\) has no explicit weights; use method='jacobian'"):
        mixing.mixing_row(layer, method="weights")
    with pytest.raises(ValueError, match="unknown method 'x': choose one of weights, jacobian"):
        mixing.mixing_row(layer, method="x")
    with pytest.raises(ValueError, match=r"token \(8, 0\) is outside of the map of 8x8 tokens"):
        mixing.mixing_row(layer, (8, 0))
