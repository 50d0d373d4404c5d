"""Batches of annotated images are a function of seed, epoch and position, for any number of workers and processes."""

import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data._utils.pin_memory import pin_memory

from tests.data.annotated.files import annotation, blocks, content, dense_config, dense_recipe, write_coco, write_pair
from tokamix.data import AnnotatedDataset, DataError, create_dataset
from tokamix.data.annotated.loader import _pack, _unpack, create_eval_loader, create_train_loader
from tokamix.data.shapes import AnnotatedShapes, Shapes

RAW = {"mean": (0.0, 0.0, 0.0), "std": (1 / 255,) * 3}  # pixels from 0 to 255
AUGMENTED = {
    "segment": {"scale": (80, 40), "scale_range": (0.5, 2.0), "cat_max": 0.75, "photometric": True},
    "detect": {"scale": (80, 60), "scales": (32, 40, 48), "crop_then_scale": True, "photometric": True},
}


@pytest.fixture(scope="module")
def sets() -> dict[str, AnnotatedDataset]:
    """26 images: three batches of 8, and two images that do not fill one."""
    shapes = Shapes(26, 48, part="val scenes", large=3)
    return {task: AnnotatedShapes(shapes, task) for task in AUGMENTED}


def batches(
    dataset: AnnotatedDataset, task: str, epoch: int = 0, start: int = 0, train: bool = True, **kwargs: Any
) -> list:
    values = kwargs.pop("values", {})
    if train:
        recipe = dense_recipe(task, **{"seed": kwargs.pop("seed", 0), **AUGMENTED[task], **values})
        loader = create_train_loader(dataset, recipe, **{"batch_size": 8} | kwargs)
    else:
        loader = create_eval_loader(dataset, dense_config(task, **values), **{"batch_size": 8} | kwargs)
    return list(loader.epoch(epoch, start))


def same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


@pytest.mark.parametrize("task", AUGMENTED)
def test_batches_are_a_function_of_seed_epoch_and_position(sets: dict, task: str) -> None:
    whole = batches(sets[task], task, epoch=3)
    assert [len(images) for images, _ in whole] == [8] * 3
    assert same(whole, batches(sets[task], task, epoch=3))
    assert same(whole[1:], batches(sets[task], task, epoch=3, start=1))  # resumed
    assert not same(whole[0], batches(sets[task], task, epoch=4)[0])
    assert not same(whole[0], batches(sets[task], task, epoch=3, seed=1)[0])


@pytest.mark.parametrize("task", AUGMENTED)
def test_each_epoch_augments_a_sample_differently(sets: dict, task: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sample = sets[task].sample(0)
    monkeypatch.setattr(type(sets[task]), "sample", lambda self, i, masks=True: sample)
    first, second = (
        torch.cat([image.flatten() for image in batches(sets[task], task, epoch)[0][0]]) for epoch in (0, 1)
    )
    assert first.shape != second.shape or not torch.equal(first, second)


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("task", AUGMENTED)
def test_workers_change_nothing(sets: dict, task: str, train: bool) -> None:
    expected = batches(sets[task], task, epoch=1, train=train)
    assert len(expected) == (3 if train else 4)
    assert same(expected[1:], batches(sets[task], task, epoch=1, start=1, train=train, workers=2))


@pytest.mark.parametrize("task", AUGMENTED)
@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_split_each_batch(sets: dict, task: str, world_size: int) -> None:
    whole = batches(sets[task], task)
    for rank in range(world_size):
        part = batches(sets[task], task, batch_size=8 // world_size, rank=rank, world_size=world_size)
        for (images, targets), (mine, my_targets) in zip(whole, part, strict=True):
            assert same(list(images[rank::world_size]), list(mine))
            assert same(list(targets[rank::world_size]), list(my_targets))


@pytest.mark.parametrize("task", AUGMENTED)
def test_global_generators_do_not_change(sets: dict, task: str) -> None:
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    batches(sets[task], task)
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_batches_to_train_a_segmenter(sets: dict) -> None:
    seen = set()
    for images, classes in batches(sets["segment"], "segment", **RAW):
        assert images.shape == (8, 3, 32, 32)
        assert images.dtype == torch.float32
        assert classes.shape == (8, 32, 32)
        assert classes.dtype == torch.int64
        seen |= set(classes.unique().tolist())
    assert seen == {*range(9), 255}


@pytest.mark.parametrize("norm", [RAW, {}])
def test_padding(norm: dict) -> None:
    """An image smaller than the crop is in its upper left corner; the rest is 0 after normalisation, and 255."""
    dataset = AnnotatedShapes(Shapes(4, 16), "segment")
    sample = dataset.sample(0)
    loader: Any = create_train_loader(dataset, dense_recipe("segment", hflip=0.0), batch_size=4, **norm)
    images, classes = next(iter(loader.epoch(0)))
    position = loader.order.indices(0).tolist().index(0)
    assert torch.equal(classes[position, :16, :16], sample.segmentation.long())
    assert (classes[:, 16:] == 255).all()
    assert (classes[:, :, 16:] == 255).all()
    assert (images[:, :, 16:] == 0).all()
    assert (images[:, :, :, 16:] == 0).all()
    mean, std = (torch.tensor(v)[:, None, None] for v in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    expected = sample.image.float() if norm else (sample.image / 255 - mean) / std
    torch.testing.assert_close(images[position, :, :16, :16], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_batches_to_evaluate_a_segmenter(sets: dict, world_size: int) -> None:
    """Every sample comes once, in order, with its target at the original size."""
    dataset, indices = sets["segment"], []
    for rank in range(world_size):
        for images, targets in batches(
            dataset, "segment", train=False, batch_size=5, rank=rank, world_size=world_size, values={"scale": (200, 64)}
        ):
            assert len(images) == len(targets) <= 5
            for image, target in zip(images, targets, strict=True):
                assert image.shape == (3, 64, 64)
                assert target["size"] == (48, 48)
                assert target["scale"] == (64 / 48, 64 / 48)
                assert torch.equal(target["segmentation"], dataset.sample(target["index"]).segmentation.long())
                indices.append(target["index"])
    assert sorted(indices) == list(range(26))
    assert world_size > 1 or indices == list(range(26))


def test_batches_to_train_a_detector(sets: dict) -> None:
    dataset = sets["detect"]
    plain = {"hflip": 0.0, "photometric": False, "scales": (96,), "scale": (96, 96), "crop_then_scale": False}
    for images, targets in batches(dataset, "detect", values=plain, **RAW):
        for image, target in zip(images, targets, strict=True):
            assert set(target) == {"boxes", "labels", "masks", "image_id", "index", "size", "scale"}
            sample = dataset.sample(target["index"])
            assert image.shape == (3, 96, 96)
            assert torch.equal(target["boxes"], 2 * sample.boxes)
            assert torch.equal(target["labels"], sample.labels)
            assert target["masks"].dtype == torch.bool
            assert torch.equal(target["masks"][:, ::2, ::2], sample.masks)
            assert target["scale"] == (2.0, 2.0)
            # images are not resized by the nearest pixel, but their means stay
            torch.testing.assert_close(image.mean((1, 2)), sample.image.float().mean((1, 2)), rtol=0, atol=0.6)


def test_batches_to_evaluate_a_detector(sets: dict) -> None:
    images, targets = batches(sets["detect"], "detect", train=False, values={"scale": (96, 96)})[0]
    assert images[0].shape == (3, 96, 96)
    assert set(targets[0]) == {"boxes", "labels", "crowd", "image_id", "index", "size", "scale"}
    assert torch.equal(targets[0]["boxes"], 2 * sets["detect"].sample(0).boxes)
    with_masks = batches(sets["detect"], "detect", train=False, masks=True)[0][1]
    assert torch.equal(with_masks[0]["masks"], sets["detect"].sample(0).masks)


def test_masks_only_for_methods_that_learn_them(sets: dict, tmp_path: Path) -> None:
    assert "masks" not in batches(sets["detect"], "detect", values={"method": "retinanet"})[0][1][0]
    boxes_only = [
        {k: v for k, v in annotation(i, 10 + i, [3, 4, 10, 8]).items() if k != "segmentation"} for i in range(8)
    ]
    for part in ("train", "val"):
        write_coco(tmp_path, part, content(8, boxes_only))
    dataset = create_dataset(str(tmp_path), "detect").train
    assert "masks" not in batches(dataset, "detect", values={"method": "retinanet"})[0][1][0]
    with pytest.raises(DataError, match="mask_rcnn learns masks, but the annotations have only boxes; use retinanet"):
        batches(dataset, "detect")


def test_images_without_objects(tmp_path: Path) -> None:
    for part in ("train", "val"):
        write_coco(tmp_path, part, content(8, [annotation(1, 10, [3, 4, 10, 8])]))
    data = create_dataset(f"coco:{tmp_path}?empty=keep", "detect")
    for train in (True, False):
        counts = []
        for images, targets in batches(data.train if train else data.val, "detect", train=train, masks=True):
            for image, target in zip(images, targets, strict=True):
                assert target["boxes"].shape == (len(target["labels"]), 4)
                size = target["size"] if not train else image.shape[-2:]
                assert target["masks"].shape == (len(target["labels"]), *size)
                counts.append(len(target["labels"]))
        assert sorted(counts) == [0] * 7 + [1]


def test_undecodable_samples_are_named_or_skipped(tmp_path: Path) -> None:
    for part in ("train", "val"):
        for name in ("p", "qq", "rrr", "ssss"):
            write_pair(tmp_path / "images" / part, tmp_path / "masks" / part, name, blocks(0, 1))
        Image.fromarray(blocks(0, 9)).save(tmp_path / "masks" / part / "qq.png")
    (tmp_path / "classes.txt").write_text("ground\ntree\n")
    data = create_dataset(str(tmp_path), "segment")
    for train in (True, False):
        part = data.train if train else data.val
        with pytest.raises(DataError, match=r"qq\.png has the value 9.*; remove it, or skip such images"):
            batches(part, "segment", train=train, batch_size=4, workers=1)
        if train:
            loader = create_train_loader(part, dense_recipe("segment"), batch_size=4, corrupt="skip")
        else:
            loader = create_eval_loader(part, dense_config("segment"), batch_size=4, corrupt="skip")
        images, _ = next(iter(loader.epoch(0)))
        assert len(images) == (4 if train else 3)
        assert [Path(name).name for name in loader.skipped] == ["qq.jpg"]


def test_impossible_batches(sets: dict) -> None:
    with pytest.raises(ValueError, match="26 training images do not fill one batch of 130; lower batch_size"):
        batches(sets["detect"], "detect", batch_size=130)
    with pytest.raises(ValueError, match="rank 2 of 2 processes does not exist"):
        batches(sets["detect"], "detect", rank=2, world_size=2)


def test_packing() -> None:
    targets = [
        {"a": torch.arange(6).view(2, 3), "n": 4, "size": (3, 5), "m": torch.rand(2, 2) > 0.5},
        {"a": torch.zeros(0, 3, dtype=torch.int64), "n": 5, "size": (1, 1), "m": torch.rand(0, 7) > 0.5},
        {"a": torch.rand(3).t(), "n": 6, "size": (2, 2), "m": (torch.rand(4, 3) > 0.5).t()},
    ]
    layout, tensors = _pack(targets)
    assert sorted(str(tensor.dtype) for tensor in tensors) == ["torch.bool", "torch.float32", "torch.int64"]
    assert same(_unpack(layout, tensors), targets)
    assert len(_pack([])[0]) == 0


def test_packing_survives_pinning(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's thread that pins memory rebuilds lists and tuples."""
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor, device=None: tensor.clone())
    targets = [{"a": torch.arange(6).view(2, 3), "size": (3, 5)}, {"a": torch.arange(2).view(1, 2), "size": (1, 2)}]
    assert same(_unpack(*pin_memory(_pack(targets))), targets)


def test_workers_end_with_their_loader(sets: dict) -> None:
    loader = create_eval_loader(sets["detect"], dense_config("detect"), batch_size=8, workers=2)
    next(iter(loader.epoch(0)))
    processes = multiprocessing.active_children()
    assert len(processes) >= 2
    start = time.monotonic()
    del loader
    assert not any(process.is_alive() for process in processes)
    assert time.monotonic() - start < 4  # with a reference cycle, each worker was waited for five seconds


@pytest.mark.gpu
@pytest.mark.parametrize("task", AUGMENTED)
def test_a_gpu_gets_the_same_batches(sets: dict, task: str) -> None:
    on_cpu, on_gpu = batches(sets[task], task), batches(sets[task], task, device="cuda", workers=2)
    for (images, targets), (gpu_images, gpu_targets) in zip(on_cpu, on_gpu, strict=True):
        for image, gpu_image in zip(images, gpu_images, strict=True):
            assert gpu_image.device.type == "cuda"
            torch.testing.assert_close(gpu_image.cpu(), image, rtol=0, atol=1e-5)
        assert same(targets, to_cpu(gpu_targets))


def to_cpu(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        return batch.cpu()
    if isinstance(batch, dict):
        return {name: to_cpu(value) for name, value in batch.items()}
    return [to_cpu(value) for value in batch] if isinstance(batch, list) else batch
