"""Batches depend on their place in the epoch alone: not on workers, ranks, resuming, or the state of any generator."""

import gc
import logging
import os
import random
import signal
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from timm.data import create_transform
from torch import Tensor
from torchvision.transforms.functional import to_pil_image

from tests.data.conftest import encoded, eval_config, noise, recipe
from tokamix.data import ArrayDataset, DataError, ImageDataset, Loader, create_dataset, decode_image
from tokamix.data.images.loader import create_eval_loader, create_train_loader
from tokamix.data.images.resident import ResidentLoader
from tokamix.data.loading import WorkerLoader
from tokamix.recipes import Recipe

RAW = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3}  # pixels as they are
STRONG = {"augment": "rand-m9-mstd0.5-inc1", "random_erasing": 0.5, "repeated_augmentation": 2}
RECIPES = {
    "crop": recipe(),
    "strong": recipe(**STRONG),
    "three": recipe(augment="3-augment", color_jitter=0.3),
    "padded": recipe(crop_scale=None, crop_padding=2, hflip=0.0),
}


@pytest.fixture(params=["resident", "worker"])
def dataset(request: pytest.FixtureRequest) -> ImageDataset:
    """45 images of 20 px: as an array, and as a data set without arrays."""
    images = torch.randint(256, (45, 3, 20, 20), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    made = ArrayDataset(images, torch.arange(45) % 5, tuple("abcde"))
    if request.param == "worker":
        made.arrays = lambda: None
    return made


def same(a: list[tuple[Tensor, Tensor]], b: list[tuple[Tensor, Tensor]]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) for p, q in zip(a, b, strict=True) for x, y in zip(p, q, strict=True)
    )


def batches(
    dataset: ImageDataset, values: Recipe, epoch: int = 0, start: int = 0, **kwargs
) -> list[tuple[Tensor, Tensor]]:
    loader = create_train_loader(dataset, values, **{"batch_size": 8} | kwargs)
    found = list(loader.epoch(epoch, start))
    assert len(found) == len(loader) - start
    return found


def eval_batches(dataset: ImageDataset, batch_size: int = 8, **kwargs) -> list[tuple[Tensor, Tensor]]:
    config = {key: kwargs.pop(key) for key in ("image_size", "crop_pct", "mean", "std") if key in kwargs}
    loader = create_eval_loader(dataset, eval_config(**config), batch_size=batch_size, **kwargs)
    found = list(loader.epoch(0))
    assert len(found) == len(loader)
    return found


@pytest.mark.parametrize("name", RECIPES)
def test_resuming_yields_the_remaining_batches(dataset: ImageDataset, name: str) -> None:
    whole = batches(dataset, RECIPES[name], epoch=3)
    assert len(whole) == 5
    assert whole[0][0].shape == (8, 3, 16, 16)
    random.seed(5), np.random.seed(5), torch.manual_seed(5)  # nothing of this may matter
    assert same(whole[2:], batches(dataset, RECIPES[name], epoch=3, start=2))
    assert not torch.equal(whole[0][0], batches(dataset, RECIPES[name], epoch=4)[0][0])
    other = RECIPES[name].replace(seed=1)
    assert not torch.equal(whole[0][0], batches(dataset, other, epoch=3)[0][0])


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_split_each_batch(dataset: ImageDataset, name: str, world_size: int) -> None:
    whole = batches(dataset, RECIPES[name])
    parts = [
        batches(dataset, RECIPES[name], batch_size=8 // world_size, rank=rank, world_size=world_size)
        for rank in range(world_size)
    ]
    for step, (images, labels) in enumerate(whole):
        for rank, part in enumerate(parts):
            assert torch.equal(part[step][1], labels[rank::world_size])
            torch.testing.assert_close(part[step][0], images[rank::world_size], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_global_generators_do_not_change(dataset: ImageDataset, name: str) -> None:
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    batches(dataset, RECIPES[name])
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_workers_change_nothing(folder: Path) -> None:
    data = create_dataset(str(folder)).train
    values = recipe(**STRONG)
    alone = batches(data, values, epoch=1)
    loader = create_train_loader(data, values, batch_size=8, workers=2)
    assert same(alone, list(loader.epoch(1)))
    assert same(alone[1:], list(loader.epoch(1, start=1)))  # the same workers, once more
    iterator = loader.epoch(0)
    next(iterator)  # left in the middle
    del iterator
    assert same(alone, list(loader.epoch(1)))


def check_endless(dataset: ImageDataset, values: Recipe, workers: int) -> None:
    epochs = [batches(dataset, values, epoch) for epoch in (1, 2, 3)]
    expected = [*epochs[0][1:], *epochs[1], *epochs[2][:1]]
    loader = create_train_loader(dataset, values, batch_size=8, workers=workers)
    assert same(list(islice(loader.endless(1, start=1), len(expected))), expected)


@pytest.mark.parametrize("name", ["crop", "strong"])
def test_endless_is_epoch_after_epoch(dataset: ImageDataset, name: str) -> None:
    check_endless(dataset, RECIPES[name], workers=0)


def test_endless_with_workers(folder: Path) -> None:
    check_endless(create_dataset(folder).train, RECIPES["strong"], workers=2)


def test_each_image_comes_once_an_epoch(dataset: ImageDataset) -> None:
    numbered = ArrayDataset(torch.zeros(45, 3, 20, 20, dtype=torch.uint8), range(45), [str(i) for i in range(45)])
    numbered.arrays = type(dataset).arrays.__get__(numbered) if dataset.arrays() else dataset.arrays
    first, second = (torch.cat([y for _, y in batches(numbered, recipe(), e, batch_size=9)]) for e in (0, 1))
    assert first.sort().values.tolist() == second.sort().values.tolist() == list(range(45))
    assert first.tolist() != second.tolist()
    copies = [y.tolist() for _, y in batches(numbered, recipe(repeated_augmentation=3), batch_size=9)]
    assert [len(set(batch)) for batch in copies] == [3] * 5
    assert len({y for batch in copies for y in batch}) == 15
    ranks = [batches(numbered, recipe(repeated_augmentation=3), batch_size=3, rank=r, world_size=3) for r in range(3)]
    assert all(len({tuple(part[step][1].tolist()) for part in ranks}) == 1 for step in range(5))  # one copy for each


def test_copies_differ(dataset: ImageDataset) -> None:
    images, labels = batches(dataset, recipe(repeated_augmentation=4))[0]
    assert labels.tolist() == [labels[0]] * 4 + [labels[4]] * 4
    assert not torch.equal(images[0], images[1])


@pytest.mark.parametrize("world_size", [1, 2, 7])
def test_evaluation_yields_each_image_once_in_order(dataset: ImageDataset, world_size: int) -> None:
    found = {}
    for rank in range(world_size):
        part = eval_batches(dataset, 2, image_size=20, crop_pct=1.0, rank=rank, world_size=world_size, **RAW)
        for step, (images, labels) in enumerate(part):
            assert len(images)
            for i, (image, label) in enumerate(zip(images, labels, strict=True)):
                found[step * 2 * world_size + i * world_size + rank] = image, int(label)
    assert sorted(found) == list(range(45))
    for position, (image, label) in found.items():
        assert label == position % 5
        torch.testing.assert_close(image, dataset[position][0].float(), rtol=0, atol=1e-3)


@pytest.mark.parametrize(("size", "crop"), [(16, 1.0), (16, 0.8), (24, 0.875), (20, 1.0)])
def test_evaluation_is_timms(dataset: ArrayDataset, size: int, crop: float) -> None:
    """Held as arrays they are resized in one go, which Pillow does in two, each rounded and clipped."""
    ramp = torch.arange(20) * 5.0
    dataset.images[:8] = (ramp + ramp[:, None] + 60 * dataset.images[:8, :, :1, :1] / 255).byte()
    config = eval_config(image_size=size, crop_pct=crop, interpolation="bicubic")
    loader = create_eval_loader(dataset, config, batch_size=8)
    images, _ = next(loader.epoch(0))
    transform = create_transform(size, interpolation="bicubic", crop_pct=crop)
    expected = torch.stack([transform(to_pil_image(dataset[i][0])) for i in range(8)])
    torch.testing.assert_close(images, expected, rtol=0, atol=0.04 if isinstance(loader, ResidentLoader) else 1e-5)


def test_images_that_are_not_square() -> None:
    images = torch.randint(256, (9, 3, 12, 30), dtype=torch.uint8)
    data = ArrayDataset(images, [0] * 9, ("a",))
    for values in (recipe(), recipe(crop_scale=None), recipe(crop_scale=None, crop_padding=2)):
        assert batches(data, values)[0][0].shape == (8, 3, 16, 16)
    shown = eval_batches(data, 9, image_size=12, crop_pct=1.0, **RAW)[0][0]
    torch.testing.assert_close(shown, images[..., 9:21].float(), rtol=0, atol=1e-3)


@pytest.mark.parametrize("crop", [1.0, 0.8])
def test_squashed_images(crop: float) -> None:
    """timm's other way to make images square; without augmentation, training does the same."""
    ramp = torch.arange(30) * 5.0
    images = (ramp[:20, None] + ramp + torch.arange(3.0)[:, None, None] * 4).byte().repeat(8, 1, 1, 1)
    data = ArrayDataset(images, [0] * 8, ("a",))
    transform = create_transform(16, interpolation="bicubic", crop_pct=crop, crop_mode="squash")
    expected = transform(to_pil_image(images[0])).expand(8, -1, -1, -1)
    config = eval_config(crop_pct=crop, crop_mode="squash", interpolation="bicubic")
    plain = recipe(crop_scale=None, hflip=0.0, augment=None, color_jitter=None, interpolation="bicubic")
    for resident, tolerance in ((None, 0.04), (False, 1e-5)):
        loader = create_eval_loader(data, config, batch_size=8, resident=resident)
        torch.testing.assert_close(next(loader.epoch(0))[0], expected, rtol=0, atol=tolerance)
        crops = {"crop_pct": crop, "crop_mode": "squash"}
        ((trained, _),) = batches(data, plain, **crops, resident=resident)
        torch.testing.assert_close(trained, expected, rtol=0, atol=tolerance)


def test_channels(dataset: ImageDataset) -> None:
    assert batches(dataset, recipe(), in_chans=1)[0][0].shape == (8, 1, 16, 16)
    digits = create_dataset("digits").train
    for resident in (None, False):
        three = next(create_eval_loader(digits, eval_config(**RAW), batch_size=4, resident=resident).epoch(0))[0]
        grey = eval_config(mean=(0.5,), std=(0.5,))
        one = next(create_eval_loader(digits, grey, batch_size=4, resident=resident).epoch(0))[0]
        assert torch.equal(three[:, 0], three[:, 2])
        assert one.shape == (4, 1, 16, 16)
    five = ArrayDataset(torch.zeros(9, 5, 8, 8, dtype=torch.uint8), [0] * 9, ("a",))
    assert batches(five, recipe(**STRONG), in_chans=5)[0][0].shape == (8, 5, 16, 16)
    with pytest.raises(DataError, match="images of 5 channels cannot be converted to 3; set in_chans=5"):
        batches(five, recipe())
    with pytest.raises(ValueError, match="image files have 1 or 3 channels, not 5"):
        create_train_loader(digits, recipe(), batch_size=4, in_chans=5, resident=False)
    with pytest.raises(ValueError, match="mean and std have 2 values, but the images have 3 channels"):
        create_train_loader(digits, recipe(), batch_size=4, mean=(0.5, 0.5))


def test_normalisation(dataset: ImageDataset) -> None:
    images, _ = eval_batches(dataset, image_size=20, crop_pct=1.0, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))[0]
    expected = torch.stack([dataset[i][0] for i in range(8)]) / 255
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6)))
    torch.testing.assert_close(images, (expected - mean) / std, rtol=1e-5, atol=1e-5)


def test_choice_of_the_loader() -> None:
    digits = create_dataset("digits").train
    assert isinstance(create_train_loader(digits, recipe(), batch_size=8), ResidentLoader)
    assert isinstance(create_train_loader(digits, recipe(augment="original"), batch_size=8), WorkerLoader)
    assert isinstance(create_eval_loader(digits, eval_config(), batch_size=8), ResidentLoader)
    with pytest.raises(ValueError, match="cannot be kept on the device"):
        create_train_loader(digits, recipe(augment="augmix-m5"), batch_size=8, resident=True)


@pytest.mark.parametrize("policy", ["original", "v0", "augmix-m5-w4-d2", "3a", "rand-m9-n4-t3aw-p1"])
def test_timms_other_policies(policy: str) -> None:
    digits = create_dataset("digits").train
    loader = create_train_loader(digits, recipe(augment=policy), batch_size=64, resident=False)
    images, _ = next(loader.epoch(0))
    assert images.isfinite().all()


def test_posterize_with_zero_bits(folder: Path) -> None:
    """timm's level 10 asks for 0 bits, which Pillow 13 refuses."""
    data = create_dataset(str(folder)).train
    found = batches(data, recipe(augment="rand-m10-n8-inc1-p1.0"), batch_size=24)
    assert found[0][0].isfinite().all()


def test_impossible_sizes() -> None:
    digits = create_dataset("digits").train
    with pytest.raises(ValueError, match="1438 training images do not fill one batch of 4096; lower batch_size"):
        create_train_loader(digits, recipe(), batch_size=2048, world_size=2)
    assert len(create_eval_loader(digits, eval_config(), batch_size=2048)) == 1
    with pytest.raises(ValueError, match="batch_size is 0, but must be at least 1"):
        create_train_loader(digits, recipe(), batch_size=0)
    with pytest.raises(ValueError, match="rank 2 of 2"):
        create_train_loader(digits, recipe(), batch_size=8, rank=2, world_size=2)
    with pytest.raises(DataError, match="the training split is empty"):
        create_train_loader(ArrayDataset(torch.zeros(0, 3, 8, 8), [], ("a",)), recipe(), batch_size=8)


@pytest.fixture
def broken(folder: Path) -> ImageDataset:
    """24 images, three of which are broken in different ways."""
    (folder / "train" / "ant" / "0.png").write_bytes(b"")
    (folder / "train" / "bee" / "1.jpg").write_bytes(encoded(noise(0), "JPEG")[:600])
    (folder / "train" / "cat" / "2.png").write_text("no image")
    return create_dataset(str(folder)).train


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_file_stops_training_in_one_sentence(broken: ImageDataset, workers: int) -> None:
    loader = create_train_loader(broken, recipe(), batch_size=24, workers=workers)
    with pytest.raises(
        DataError, match=r"(ant/0\.png is empty|bee/1\.jpg is corrupt|cat/2\.png is not).*\(--corrupt skip, "
    ):
        list(loader.epoch(0))


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_files_are_skipped_and_counted(
    broken: ImageDataset, workers: int, caplog: pytest.LogCaptureFixture
) -> None:
    loader = create_train_loader(broken, recipe(), batch_size=8, workers=workers, corrupt="skip")
    with caplog.at_level(logging.WARNING, "tokamix"):
        first = list(loader.epoch(0))
        list(loader.epoch(1))
    assert [len(images) for images, _ in first] == [8] * 3
    assert len(loader.skipped) == 3
    assert len(caplog.records) == 3  # each is logged once
    assert same(first, batches(broken, recipe(), corrupt="skip"))
    loader = create_eval_loader(broken, eval_config(), batch_size=8, workers=workers, corrupt="skip")
    assert sum(len(labels) for _, labels in loader.epoch(0)) == 21
    assert len(loader.skipped) == 3


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 1), (1, 8), (2, 1), (2, 4)])
def test_the_next_image_of_the_epoch_replaces_a_bad_one(broken: ImageDataset, world_size: int, batch_size: int) -> None:
    """Also where a process has one image a batch; what stands where depends on neither."""
    loader: Any = create_train_loader(broken, recipe(), batch_size=8, resident=False)
    order = loader.order.indices(0).tolist()
    bad = [i for i in range(24) if broken.name_of(i).endswith(("ant/0.png", "bee/1.jpg", "cat/2.png"))]
    assert len(bad) == 3
    expected = [next(i for i in [*order[p:], *order] if i not in bad) for p in range(24)]
    shown = [
        list(create_train_loader(broken, recipe(), **place, corrupt="skip").epoch(0))
        for place in (
            {"batch_size": batch_size, "rank": rank, "world_size": world_size, "resident": False}
            for rank in range(world_size)
        )
    ]
    labels = torch.stack([torch.stack([labels for _, labels in part]) for part in shown], -1).flatten()
    assert labels.tolist() == [int(broken.labels[i]) for i in expected]


def test_batches_without_decodable_images(broken: ImageDataset, tmp_path: Path) -> None:
    for file in (tmp_path / "train").rglob("*.*"):
        file.write_bytes(b"")
    loader = create_train_loader(broken, recipe(), batch_size=8, corrupt="skip")
    with pytest.raises(DataError, match=r"too many images cannot be decoded: .* is empty"):
        list(loader.epoch(0))
    assert list(create_eval_loader(broken, eval_config(), batch_size=8, corrupt="skip").epoch(0)) == []


def test_resuming_does_not_decode_earlier_batches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = create_dataset(str(folder)).train
    spy = Mock(side_effect=decode_image)
    monkeypatch.setattr("tokamix.data.images.datasets.decode_image", spy)
    batches(data, recipe(), start=2)
    assert spy.call_count == 8


class Deadly(ArrayDataset):
    """A data set whose images kill whoever asks for them."""

    def image(self, i: int, min_size: int | None = None) -> Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def arrays(self) -> None:
        return None


def test_a_killed_worker_ends_with_a_clear_error() -> None:
    loader = create_train_loader(Deadly(torch.zeros(9, 3, 8, 8), [0] * 9, ("a",)), recipe(), batch_size=8, workers=1)
    with pytest.raises(ChildProcessError, match=r"a data worker died \(.*\); the usual cause is too little memory"):
        list(loader.epoch(0))


@pytest.mark.gpu
@pytest.mark.parametrize("name", RECIPES)
def test_a_gpu_gets_the_batches_of_a_cpu(dataset: ImageDataset, name: str) -> None:
    """ResidentLoader: the same numbers for all but rounding; nothing in an epoch waits for the device."""
    here, there = (batches(dataset, RECIPES[name], device=device) for device in ("cpu", "cuda"))
    for (x, y), (u, v) in zip(here, there, strict=True):
        assert torch.equal(y, v.cpu())
        assert ((x - u.cpu()).abs() > 0.05).float().mean() < 1e-3  # a value at the edge of a step may fall elsewhere
    loader: Loader = create_train_loader(dataset, RECIPES[name], batch_size=8, device="cuda")
    list(loader.epoch(0))
    if isinstance(loader, ResidentLoader):
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in loader.epoch(0, start=1):
                pass
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_a_capture_survives_the_loaders_before_it(dataset: ImageDataset) -> None:
    """Garbage collection frees the graphs of earlier loaders, which is not allowed during a capture."""
    for _ in range(3):
        loader: Any = create_train_loader(dataset, RECIPES["padded"], batch_size=8, device="cuda")
        list(loader.epoch(0))
        loader.itself = loader  # only the garbage collector can free it
    thresholds = gc.get_threshold()
    loader = create_train_loader(dataset, RECIPES["padded"], batch_size=8, device="cuda")
    gc.set_threshold(1, 1, 1)
    try:
        assert len(list(loader.epoch(0))) == len(loader)
    finally:
        gc.set_threshold(*thresholds)
