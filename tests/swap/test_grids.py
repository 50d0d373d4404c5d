"""Grids of tokens of swapped mixers: of the image, of windows, and of none."""

import pytest
import timm
import torch
from torch import Tensor, nn

import tokamix
from tests.swap.hosts import host, images
from tokamix.swap import attention, swap_mixer


def test_grids_of_two_swaps() -> None:
    """The second swap leaves the first one's mixers informed of the image size."""
    twice, once = host(), host()
    for to in (twice, once):
        torch.manual_seed(1)
        for where in ([0], [0]) if to is twice else ([0, 1],):
            swap_mixer(to, "active_token", where=where)
    x = torch.randn(1, 3, 64, 256, dtype=torch.float64)  # 4 x 16 patches, which could be 8 x 8
    torch.testing.assert_close(twice(x), once(x))


def test_image_size_of_the_host(tmp_path) -> None:
    """A size that the model does not tell must be given, and travels with the weights."""
    create = {"num_classes": 5, "img_size": 64}
    model = timm.create_model("levit_128s", **create).eval()
    with pytest.raises(ValueError, match=r"did not run on an image of 224x224.*give image_size"):
        swap_mixer(model, "performer")
    swap_mixer(model, "performer", image_size=64)
    assert model(images()).isfinite().all()
    timm.models.save_for_hf(model, tmp_path, model_args=create)
    loaded = tokamix.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    x = images()
    assert torch.equal(loaded(x), model(x))


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("naflexvit_base_patch16_gap", {"depth": 1, "embed_dim": 24, "num_heads": 3}, {(4, 16)}),  # no convolution
        ("cait_xxs24_224", {"img_size": (64, 256), "depth": 1, "embed_dim": 24, "num_heads": 3}, {(4, 16)}),
        ("deit_tiny_distilled_patch16_224", {"img_size": (64, 256), "depth": 1}, {(4, 16)}),
        # windows have grids of their own, whatever the image
        (
            "tiny_vit_5m_224",
            {"depths": (1, 1), "embed_dims": (8, 16), "num_heads": (1, 2), "window_sizes": (4, 6)},
            {(6, 6)},
        ),
        ("twins_svt_small", {"depths": (1,), "embed_dims": (8,), "num_heads": (1,), "img_size": (64, 256)}, {(7, 7)}),
        ("tnt_s_patch16_224", {"img_size": (64, 256), "depth": 1, "image_size": (64, 256)}, {(4, 4), (4, 16)}),
    ],
)
def test_grids_of_wide_images(monkeypatch, name: str, options: dict, expected: set) -> None:
    """The grid of the tokens follows from the image, or from the window."""
    size = options.pop("image_size", None)
    model = timm.create_model(name, num_classes=5, **options).eval()
    swap_mixer(model, "linformer", image_size=size, where=[0, 1] if "tnt" in name else [0])
    grids = set()
    find = attention.token_grid
    monkeypatch.setattr(attention, "token_grid", lambda *args: grids.add(grid := find(*args)) or grid)
    model(torch.randn(1, 3, 64, 256))
    assert grids == expected


def test_patches_of_naflex_have_no_grid() -> None:
    """Images of different grids come as patches with a mask, which mixers on a grid refuse."""
    for to in ("active_token", "linformer", "super_token"):
        model = timm.create_model("naflexvit_base_patch16_gap", num_classes=5, depth=1, embed_dim=24, num_heads=3)
        swap_mixer(model, to)
        places = torch.cartesian_prod(torch.arange(2), torch.arange(8)).expand(1, -1, -1)
        with pytest.raises(ValueError, match="cannot exclude masked tokens"):
            model(torch.randn(1, 16, 16 * 16 * 3), places, torch.ones(1, 16, dtype=torch.bool))


@pytest.mark.parametrize(
    ("count", "size", "grid"),
    [
        (16, (64, 64), (4, 4)),
        (24, (64, 100), (4, 6)),
        (7 * 31, (64, 256), (7, 31)),  # patches that overlap
        (15, (250, 20), (15, 1)),
        (40, (640, 31), (40, 1)),
        (49, None, (7, 7)),
    ],
)
def test_token_grid(count: int, size: tuple[int, int] | None, grid: tuple[int, int]) -> None:
    assert attention.token_grid(count, size) == grid


def test_wide_images_without_a_convolution(monkeypatch) -> None:
    """Patches that a linear layer embeds: the model itself sees the size of the image."""

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attn = nn.Linear(48, 8), timm.layers.Attention(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            patches = x.unflatten(3, (-1, 4)).unflatten(2, (-1, 4)).permute(0, 2, 4, 1, 3, 5)
            return self.attn(self.embed(patches.flatten(3).flatten(1, 2)))

    model, grids = Linear(), []
    swap_mixer(model, "pooling", image_size=(16, 64))
    find = attention.token_grid
    monkeypatch.setattr(attention, "token_grid", lambda *args: grids.append(grid := find(*args)) or grid)
    model(torch.randn(1, 3, 16, 64))
    model(x=torch.randn(1, 3, 8, 16))
    assert grids == [(4, 16), (2, 4)]
