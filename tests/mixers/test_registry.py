"""The mixer registry, and properties of every registered mixer."""

import pytest
import timm
import torch
from torch import nn

from tokamix.mixers import Site, create_mixer, list_mixers, register_mixer
from tokamix.mixers.registry import get_mixer, watch_mixers

# sites of the bodies: a column, and the four stages of a pyramid
SITES = [
    Site(48, 3, (6, 6)),
    Site(24, 3, (24, 24), stage=0),
    Site(48, 3, (12, 12), stage=1, index=1),
    Site(96, 6, (6, 6), stage=2, index=1),
    Site(96, 6, (3, 3), stage=3),
]


@pytest.fixture(params=list_mixers())
def name(request: pytest.FixtureRequest) -> str:
    return request.param


def test_number_of_mixers() -> None:
    paper = ["softmax", "xca", "sima", "active_token", "super_token", "weight_mixing"]
    table_2 = ["linformer", "performer", "nystrom", "soft", "efficient", "cosformer"]
    assert list_mixers()[:14] == [*paper, *table_2, "pooling", "identity"]
    assert all(get_mixer(n).paper_ids and get_mixer(n).paper_name for n in list_mixers()[:14])


@pytest.mark.parametrize("site", SITES, ids=lambda s: f"stage{s.stage}")
def test_mixes_at_any_site(name: str, site: Site) -> None:
    """Output shape on the site's grid and on other grids; images of a batch are independent."""
    mixer = create_mixer(name, site).eval()
    for grid in (site.grid, (5, 7), (1, 1)):
        x = torch.randn(2, grid[0] * grid[1], site.dim)
        out = mixer(x, grid)
        assert out.shape == x.shape
        assert out.isfinite().all()
        torch.testing.assert_close(mixer(x[:1], grid), out[:1])


def test_a_width_in_place_of_a_site() -> None:
    with pytest.raises(TypeError, match=r"needs a Site\(dim, num_heads, grid\), got 64"):
        create_mixer("sima", 64)


def test_gradients_reach_tokens_and_parameters(name: str) -> None:
    mixer = create_mixer(name, SITES[0])
    with torch.no_grad():
        for p in mixer.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    x = torch.randn(2, 36, 48, requires_grad=True)
    mixer(x, (6, 6)).square().sum().backward()
    assert x.grad.any()
    assert x.grad.isfinite().all()
    dead = [n for n, p in mixer.named_parameters() if p.grad is None or not p.grad.any() or not p.grad.isfinite().all()]
    assert not dead


def test_device_and_dtype_reach_every_parameter(name: str) -> None:
    mixer = create_mixer(name, SITES[2], device="meta", dtype=torch.float64)
    tensors = [*mixer.parameters(), *mixer.buffers()]
    assert all(t.device.type == "meta" and (t.dtype == torch.float64 or not t.is_floating_point()) for t in tensors)
    x = torch.randn(1, 144, 48, dtype=torch.float64, device="meta")
    assert mixer(x, (12, 12)).shape == x.shape


def test_tokens_are_mixed(name: str) -> None:
    """A change of one token changes others, except with the identity."""
    mixer = create_mixer(name, SITES[0]).double().eval()
    x = torch.randn(1, 36, 48, dtype=torch.float64)
    other = x.clone()
    other[:, 7] += 1
    changed = (mixer(other, (6, 6)) - mixer(x, (6, 6))).abs().amax(-1)[0] > 1e-12
    assert changed[7]
    assert changed.sum() == 1 if name == "identity" else changed.sum() > 1


def test_registering() -> None:
    seen: list[str] = []
    watch_mixers(seen.append)
    assert seen == list_mixers()
    with pytest.raises(ValueError, match="mixer 'sima' is already registered"):
        register_mixer("sima", lambda site, **options: nn.Identity())
    with pytest.raises(ValueError, match="'my mixer' cannot be part of a model name"):
        register_mixer("my mixer", lambda site, **options: nn.Identity())
    assert seen == list_mixers()


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="there is no mixer 'soft_max'; did you mean softmax"):
        create_mixer("soft_max", SITES[0])
    with pytest.raises(ValueError, match="there is no mixer 'zzz'; choose one of softmax, xca"):
        create_mixer("zzz", SITES[0])


def test_every_mixer_is_in_every_body(name: str) -> None:
    bodies = ("columnar_tiny", "columnar_small", "pyramid_tiny", "pyramid_small")
    assert all(timm.is_model(f"{body}_{name}") for body in bodies)
