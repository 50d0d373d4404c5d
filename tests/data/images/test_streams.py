"""Shards: every image exactly once where it counts, and an order that no number of processes changes."""

import json
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image

from tests.data.conftest import encoded, eval_config, noise, recipe, write_shards, write_tar
from tokamix.data import DataError, create_dataset, decode_image
from tokamix.data.images.loader import create_eval_loader, create_train_loader
from tokamix.data.images.tar_shards import TarShards, expand

PLAIN = recipe(image_size=20, crop_pct=1.0, crop_scale=None, hflip=0.0, label_smoothing=0.0)
PLAIN_EVAL = eval_config(image_size=20, crop_pct=1.0, mean=(0.0,) * 3, std=(1 / 255,) * 3)
RAW = {"mean": (0.0,) * 3, "std": (1 / 255,) * 3}  # pixels as they are


def numbers(images: torch.Tensor) -> list[int]:
    """The number that each image's colour spells."""
    colours = images[:, :, 0, 0].round().long()
    return (colours[:, 0] + 256 * colours[:, 1]).tolist()


@pytest.fixture
def source(tmp_path: Path) -> str:
    write_shards(tmp_path, "train", 4, 30)
    write_shards(tmp_path, "val", 3, 7)
    return f"wds:{tmp_path}/train-{{0000..0003}}.tar,{tmp_path}/val-{{0000..0002}}.tar"


def test_patterns() -> None:
    assert expand("a-{08..11}.tar") == ["a-08.tar", "a-09.tar", "a-10.tar", "a-11.tar"]
    assert expand("{x,y}/{0..1}") == ["x/0", "x/1", "y/0", "y/1"]
    assert expand("plain.tar") == ["plain.tar"]


def test_open(source: str) -> None:
    data = create_dataset(source)
    assert (len(data.train), len(data.val)) == (120, 21)
    assert data.classes == ("0", "1", "2")
    assert data.train.arrays() is None
    item = next(data.val.read(0, 0, 0, 1, shuffle=False))
    assert item.name.endswith("val-0000.tar:val-0000/0000")
    assert data.val.decode(item)[0].size == (20, 20)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_evaluation_yields_each_image_once(source: str, world_size: int) -> None:
    data = create_dataset(source)
    seen, labels = [], []
    for rank in range(world_size):
        loader = create_eval_loader(data.val, PLAIN_EVAL, batch_size=4, rank=rank, world_size=world_size)
        batches = list(loader.epoch(0))
        assert len(batches) == len(loader)
        for images, y in batches:
            seen += numbers(images)
            labels += y.tolist()
    assert sorted(seen) == list(range(21))
    assert labels == [number % 3 for number in seen]


def train_numbers(
    source: str, world_size: int, rank: int, epoch: int = 0, start: int = 0, workers: int = 0
) -> list[list[int]]:
    loader = create_train_loader(
        create_dataset(source).train,
        PLAIN,
        batch_size=12 // world_size,
        rank=rank,
        world_size=world_size,
        workers=workers,
        **RAW,
    )
    return [numbers(images) for images, _ in loader.epoch(epoch, start)]


def test_training_order(source: str) -> None:
    whole = train_numbers(source, 1, 0)
    assert len(whole) == 10
    assert sorted(n for batch in whole for n in batch) == list(range(120))  # shards of one size: exactly once
    assert whole != train_numbers(source, 1, 0, epoch=1)
    assert whole == train_numbers(source, 1, 0)
    assert whole[4:] == train_numbers(source, 1, 0, start=4)
    assert whole == train_numbers(source, 1, 0, workers=2)


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_split_each_batch(source: str, world_size: int) -> None:
    """2 divides the number of lanes (4), so each process reads its own shards; 3 does not, and each reads them all."""
    whole = train_numbers(source, 1, 0)
    parts = [train_numbers(source, world_size, rank) for rank in range(world_size)]
    for step, batch in enumerate(whole):
        assert [batch[rank::world_size] for rank in range(world_size)] == [part[step] for part in parts]


def test_a_process_reads_only_its_shards(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = create_dataset(source)
    opened = set()
    original = type(data.train).items
    monkeypatch.setattr(type(data.train), "items", lambda self, shard: opened.add(shard) or original(self, shard))
    loader = create_train_loader(data.train, PLAIN, batch_size=6, rank=1, world_size=2)
    list(loader.epoch(0))
    assert len(opened) == 2


def test_resuming_reads_but_does_not_decode(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Mock(side_effect=decode_image)
    monkeypatch.setattr("tokamix.data.images.streams.decode_image", spy)
    train_numbers(source, 1, 0, start=8)
    assert spy.call_count == 2 * 12


def test_a_short_lane_starts_again(tmp_path: Path) -> None:
    write_shards(tmp_path, "train", 1, 3)
    (tmp_path / "train-0000.tar").rename(tmp_path / "train-short.tar")
    write_shards(tmp_path, "train", 1, 30)
    write_shards(tmp_path, "val", 1, 2)
    found = train_numbers(f"wds:{tmp_path}/train-{{short,0000}}.tar,{tmp_path}/val-0000.tar", 1, 0)
    assert [len(batch) for batch in found] == [12, 12]


def test_sizes_and_classes_may_lie_beside_the_shards(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {path.name: 30 if "train" in path.name else 7 for path in tmp_path.glob("*.tar")}
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    with monkeypatch.context() as patch:
        patch.setattr(TarShards, "items", lambda *args, **kwargs: pytest.fail("searched"))
        data = create_dataset(source)
    assert data.classes == ("ant", "bee", "cat")
    assert len(data.train) == 120
    del sizes["train-0002.tar"]
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    with pytest.raises(DataError, match=r"sizes\.json has no number of images for .*train-0002\.tar"):
        create_dataset(source)
    (tmp_path / "sizes.json").unlink()
    (tmp_path / "classes.txt").write_text("ant\nbee")
    loader = create_eval_loader(create_dataset(source).val, PLAIN_EVAL, batch_size=4)
    with pytest.raises(DataError, match=r"val-0000\.tar:val-0000/0002 has label 2, but there are 2 classes"):
        list(loader.epoch(0))


def test_classes_of_shards_in_two_folders(tmp_path: Path) -> None:
    """Names beside the training shards are those of the others, too; different ones are an error."""
    for part in ("train", "val"):
        (tmp_path / part).mkdir()
        write_shards(tmp_path / part, part, 1, 6)
    source = f"wds:{tmp_path}/train/train-0000.tar,{tmp_path}/val/val-0000.tar"
    assert create_dataset(source).val.classes == ("0", "1", "2")
    (tmp_path / "train" / "classes.txt").write_text("ant\nbee\ncat\ndog")
    assert create_dataset(source).val.classes == ("ant", "bee", "cat")
    (tmp_path / "val" / "classes.txt").write_text("ant\ncat\nbee")
    with pytest.raises(DataError, match=r"class 1 of wds:.* is 'bee' for training, but 'cat' for validation"):
        create_dataset(source)
    (tmp_path / "train" / "classes.txt").write_text("ant\nbee")
    (tmp_path / "val" / "classes.txt").unlink()
    with pytest.raises(DataError, match="has 2 classes for training, but 3 for validation"):
        create_dataset(source)


@pytest.mark.parametrize(("stated", "message"), [(9, "only 7"), (3, "more than 3")])
@pytest.mark.parametrize("world_size", [1, 5])
def test_stated_numbers_that_are_wrong(source: str, tmp_path: Path, stated: int, message: str, world_size: int) -> None:
    """Otherwise some images would not be evaluated, or fewer than the result says."""
    sizes = {path.name: 30 if "train" in path.name else stated for path in tmp_path.glob("*.tar")}
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    (tmp_path / "sizes.json").write_text(json.dumps(sizes))
    loader = create_eval_loader(create_dataset(source).val, PLAIN_EVAL, batch_size=4, world_size=world_size)
    with pytest.raises(DataError, match=rf"val-0000\.tar has {message} images, but its stated number is {stated} \("):
        list(loader.epoch(0))


def test_errors_of_shards(source: str, tmp_path: Path) -> None:
    train, _ = source.removeprefix("wds:").split(",")
    with pytest.raises(DataError, match="has no shards for validation"):
        create_dataset(f"wds:{train}")
    with pytest.raises(DataError, match=r"the shard .*val-0009\.tar does not exist"):
        create_dataset(f"wds:{train},{tmp_path}/val-0009.tar")
    bad = tmp_path / "val-bad.tar"
    for samples, message in (
        ([{"png": encoded(noise(0))}], r"val-bad\.tar:val-bad/0000 has no label"),
        ([{"png": encoded(noise(0)), "cls": b"ant"}], "has no label: expected a number"),
        ([{"cls": b"1", "txt": b"ant"}], "has no image, only cls, txt"),
    ):
        write_tar(bad, samples)
        with pytest.raises(DataError, match=message):
            create_dataset(f"wds:{train},{bad}")
    bad.write_bytes(b"")
    with pytest.raises(DataError, match=r"val-bad\.tar is corrupt, truncated or not a tar file"):
        create_dataset(f"wds:{train},{bad}")
    for name, content, message in (
        ("sizes.json", b"{", r"sizes\.json of .*train-0000\.tar is broken; expected"),
        ("sizes.json", b"[]", "is broken; expected"),
        ("sizes.json", b'{"train-0000.tar": "7"}', "has '7' for train-0000.tar, but must have a number of images"),
        ("sizes.json", b'{"train-0000.tar": -1}', "has -1 for train-0000.tar"),
        ("sizes.json", f'{{"train-0000.tar": {10**400}}}'.encode(), "has 1000000.* for train-0000.tar"),
        ("classes.txt", b"\xff\xfe", r"classes\.txt is not a text file in UTF-8"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(DataError, match=message):
            create_dataset(f"wds:{tmp_path}/train-0000.tar,{tmp_path}/val-0000.tar")
        (tmp_path / name).unlink()
    (tmp_path / "classes.txt").write_text("0\n1\n2")
    (tmp_path / "sizes.json").write_text('{"train-0000.tar": 0, "val-0000.tar": 7}')
    with pytest.raises(DataError, match=r"train-0000\.tar has no images"):
        create_dataset(f"wds:{tmp_path}/train-0000.tar,{tmp_path}/val-0000.tar")


def test_corrupt_images_and_shards(source: str, tmp_path: Path) -> None:
    write_tar(tmp_path / "val-0001.tar", [{"cls": b"0", "png": b"nothing"}, {"cls": b"1", "png": encoded(noise(0))}])
    data = create_dataset(source)
    loader = create_eval_loader(data.val, PLAIN_EVAL, batch_size=4)
    with pytest.raises(DataError, match=r"val-0001\.tar:val-0001/0000 is not an image, or corrupt; remove it, or skip"):
        list(loader.epoch(0))
    loader = create_eval_loader(data.val, PLAIN_EVAL, batch_size=4, corrupt="skip")
    assert sum(len(y) for _, y in loader.epoch(0)) == 7 + 1 + 7
    assert len(loader.skipped) == 1
    shard = tmp_path / "val-0000.tar"
    shard.write_bytes(shard.read_bytes()[:2000])  # cut off after it was counted
    with pytest.raises(DataError, match=r"val-0000\.tar is corrupt, truncated"):
        list(loader.epoch(0))


@pytest.mark.parametrize(("world_size", "batch_size"), [(1, 1), (2, 1), (1, 2)])
def test_training_survives_bad_images_in_small_batches(
    source: str, tmp_path: Path, world_size: int, batch_size: int
) -> None:
    """The next good image of the stream takes the place of a bad one, also if a batch has no other image."""
    for shard in range(4):
        samples = [
            {"cls": str(i % 3).encode(), "png": encoded(Image.new("RGB", (20, 20), (i, 0, 0)))} for i in range(9)
        ]
        samples[4]["png"] = b"broken"
        write_tar(tmp_path / f"train-{shard:04d}.tar", samples)
    data = create_dataset(source).train
    for rank in range(world_size):
        place = {"batch_size": batch_size, "rank": rank, "world_size": world_size, **RAW}
        with pytest.raises(DataError, match="is not an image"):
            list(create_train_loader(data, PLAIN, **place).epoch(0))
        loader = create_train_loader(data, PLAIN, **place, corrupt="skip")
        whole = list(loader.epoch(0))
        assert [len(labels) for _, labels in whole] == [batch_size] * (36 // (batch_size * world_size))
        assert loader.skipped
        assert all(labels.tolist() == [n % 3 for n in numbers(images)] for images, labels in whole)
        order = [int(n) for images, _ in whole for n in numbers(images)]
        assert order == [int(n) for images, _ in loader.epoch(0) for n in numbers(images)]
        rest = list(create_train_loader(data, PLAIN, **place, corrupt="skip").epoch(0, start=5))
        assert order[5 * batch_size :] == [int(n) for images, _ in rest for n in numbers(images)]  # resumed


def test_files_beside_shards_of_the_current_folder(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat\n")
    monkeypatch.chdir(tmp_path)
    assert create_dataset("wds:train-{0000..0003}.tar,val-{0000..0002}.tar").classes == ("ant", "bee", "cat")


def test_webdataset_reads_our_shards(source: str, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    samples = list(webdataset.WebDataset(str(tmp_path / "val-0000.tar"), shardshuffle=False))
    assert len(samples) == 7
    assert samples[1]["cls"] == b"1"
    piped = f"wds:pipe:cat {tmp_path}/train-0000.tar,pipe:cat {tmp_path}/val-0000.tar"
    with pytest.raises(DataError, match=r"is remote: put sizes\.json and classes\.txt beside"):
        create_dataset(piped)
    (tmp_path / "classes.txt").write_text("ant\nbee\ncat")
    (tmp_path / "sizes.json").write_text(json.dumps({"train-0000.tar": 30, "val-0000.tar": 7}))
    data = create_dataset(piped)
    loader = create_eval_loader(data.val, PLAIN_EVAL, batch_size=4)
    assert [n for images, _ in loader.epoch(0) for n in numbers(images)] == list(range(7))
