"""Multi-crop: crops, colours, and loaders on the device and with workers."""

from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import Tensor

from tests.train.tiny_dino import TINY_DINO
from tokamix.data import ArrayDataset, create_dataset
from tokamix.data.images.multicrop import MultiCrop, _hue_matrices, create_multicrop_loader
from tokamix.data.rng import generator

CPU = torch.device("cpu")
PLAIN = {"color_jitter": (0.0, 0.0, 0.0, 0.0), "hflip": 0.0}
STATISTICS = {"mean": (0.5, 0.5, 0.5), "std": (0.25, 0.25, 0.25)}


def crops_of(images: Tensor, seed: int = 0, **settings) -> tuple[list[Tensor], dict[str, Tensor]]:
    multicrop = MultiCrop(TINY_DINO.replace(**settings), images.shape[1], CPU)
    table = multicrop.plan(len(images), tuple(images.shape[-2:]), generator(seed))
    return multicrop(images, table), table


def test_crops_show_their_part_of_the_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without colours, a crop of a ramp is a ramp between the ends of its box; sizes and order are as documented."""
    for name in ("BLUR", "SOLARIZE"):
        monkeypatch.setattr(f"tokamix.data.images.multicrop.{name}", {"global": (0.0,), "local": (0.0,)})
    monkeypatch.setattr("tokamix.data.images.multicrop.TO_GREY", 0.0)
    ramp = torch.arange(0, 256, 4).byte().expand(4, 3, 64, 64).contiguous()
    (large, small), table = crops_of(ramp, image_size=32, local_size=16, local_crops=3, **PLAIN)
    assert large.shape == (8, 3, 32, 32)
    assert small.shape == (12, 3, 16, 16)
    for crops, name, number in ((large, "global", 2), (small, "local", 3)):
        matrix = table[f"{name}.matrix"]
        assert matrix.shape == (4, number, 2, 3)
        for i in range(4):
            for n in range(number):
                centre = 126 + 128 * matrix[i, n, 0, 2]  # brightness at the centre of the box
                assert crops[n * 4 + i].mean() == pytest.approx(float(centre), abs=2.5)
    areas = table["local.matrix"][..., 0, 0] * table["local.matrix"][..., 1, 1]
    assert TINY_DINO.local_scale[0] - 1e-4 <= areas.min() <= areas.max() <= TINY_DINO.local_scale[1] + 1e-4


def test_colours() -> None:
    images = torch.randint(256, (400, 3, 12, 12), dtype=torch.uint8)
    multicrop = MultiCrop(TINY_DINO, 3, CPU)
    table = multicrop.plan(2000, (12, 12), generator(1))
    shares = {name: (table[name] != neutral).float().mean(0) for name, neutral in (
        ("global.sigma", 0), ("local.sigma", 0), ("global.threshold", 256), ("local.threshold", 256),
        ("global.to_grey", 0), ("local.keep", 1),
    )}  # fmt: skip
    expected = {"global.sigma": (1.0, 0.1), "local.sigma": (0.5, 0.5), "global.threshold": (0.0, 0.2)}
    expected |= {"local.threshold": (0.0, 0.0), "global.to_grey": (0.2, 0.2), "local.keep": (0.8, 0.8)}
    for name, share in expected.items():
        torch.testing.assert_close(shares[name], torch.tensor(share), atol=0.04, rtol=0, msg=name)
    crops, table = crops_of(images)
    grey = table["global.to_grey"].T.flatten() > 0
    spread = crops[0].amax(1) - crops[0].amin(1)
    assert spread[grey].max() < 1.5
    assert spread[~grey].amax((1, 2)).min() > 10
    assert all(x.min() >= 0 and x.max() <= 255 for x in crops)


def test_hue_keeps_the_brightness_and_full_turns_change_nothing() -> None:
    matrices = _hue_matrices(torch.tensor([0.0, 0.1, -0.3, 1.0]))
    grey = torch.tensor([0.299, 0.587, 0.114])
    torch.testing.assert_close(grey @ matrices, grey.expand(4, 3), atol=1e-4, rtol=0)
    torch.testing.assert_close(matrices[[0, 3]], torch.eye(3).expand(2, 3, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(matrices @ torch.ones(3), torch.ones(4, 3), atol=1e-4, rtol=0)
    assert (matrices[1] - torch.eye(3)).abs().max() > 0.3


def loader_of(dataset, rank: int = 0, world_size: int = 1, batch_size: int = 8, **settings):
    recipe = TINY_DINO.replace(**settings)
    options = {"batch_size": batch_size, "rank": rank, "world_size": world_size}
    return create_multicrop_loader(dataset, recipe, **STATISTICS, **options)


def test_batches_depend_on_epoch_and_step_alone() -> None:
    """A loader that starts later, or is split over processes, gives the same crops."""
    images = torch.randint(256, (40, 3, 10, 10), dtype=torch.uint8)
    dataset = ArrayDataset(images, torch.arange(40) % 4, list("abcd"))
    whole = list(loader_of(dataset).epoch(1))
    assert len(whole) == 5
    later = next(iter(loader_of(dataset).epoch(1, start=3)))
    for one, two in zip(whole[3][0], later[0], strict=True):
        assert torch.equal(one, two)
    parts = [list(loader_of(dataset, rank, 2, batch_size=4).epoch(1)) for rank in (0, 1)]
    for rank in (0, 1):
        assert torch.equal(parts[rank][2][1], whole[2][1][rank::2])
        for number, one, two in zip((2, 2), parts[rank][2][0], whole[2][0], strict=True):
            assert torch.equal(one.unflatten(0, (number, 4)), two.unflatten(0, (number, 8))[:, rank::2])


@pytest.mark.parametrize("workers", [0, 1])
def test_files_are_cropped_where_they_are_decoded(tmp_path: Path, workers: int) -> None:
    for i in range(6):
        folder = tmp_path / "ab"[i % 2]
        folder.mkdir(exist_ok=True)
        Image.fromarray(torch.full((20, 30, 3), 40 * i, dtype=torch.uint8).numpy()).save(folder / f"{i}.png")
    train = create_dataset(tmp_path).train
    recipe = TINY_DINO.replace(**PLAIN)
    loader = create_multicrop_loader(train, recipe, batch_size=2, workers=workers, **STATISTICS)
    batches = [list(loader.epoch(number)) for number in (0, 0, 1)]
    (large, small), labels = batches[0][0]
    assert large.shape == (4, 3, 8, 8)
    assert small.shape == (4, 3, 4, 4)
    assert labels.shape == (2,)
    first_of_each = large.unflatten(0, (2, 2)).mean((2, 3, 4))
    assert not torch.equal(first_of_each[:, 0], first_of_each[:, 1])  # two images
    assert all(torch.equal(a, b) for a, b in zip(batches[0][0][0], batches[1][0][0], strict=True))


def test_any_folder_opens_without_labels(tmp_path: Path) -> None:
    for name in ("one.png", "trips/two.png", "trips/far/three.png", "four.jpg"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    splits = create_dataset(tmp_path, labels=False)
    assert len(splits.train) + len(splits.val) == 4
    assert splits.num_classes == 1
    classes = create_dataset(tmp_path / "trips", labels=False)  # an image beside the folder: not class folders
    assert len(classes.train) + len(classes.val) == 2
