"""`tokamix embed` and `tokamix neighbours`."""

import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tokamix
from tests.command import call
from tests.processes import ROOT, TWO_PROCESSES, finish, torchrun
from tokamix.data import create_dataset
from tokamix.embed import FeatureIndex, embed, find_neighbours, neighbours
from tokamix.embed import run as embed_run
from tokamix.inference import load_model


def picture(i: int) -> Image.Image:
    """A picture of its own for each number."""
    pixels = np.random.default_rng(i).integers(0, 256, (3, 3, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((24, 24), Image.Resampling.BICUBIC)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    for i in range(11):
        path = folder / ("trips" if i % 3 else ".") / f"{i:02}.png"
        path.parent.mkdir(exist_ok=True)
        picture(i).save(path)
    return folder


def test_a_folder_in_shards(classifier_run: Path, photos: Path, tmp_path: Path) -> None:
    """Every image once, with the features of the model; the same command continues, several formats agree."""
    index = embed(classifier_run, photos, tmp_path / "a", shard_size=4, batch_size=3, device="cpu", parquet=True)
    assert index.sizes == [4, 4, 3]
    paths = [index.path(i) for i in range(len(index))]
    assert sorted(paths) == sorted(str(p.relative_to(photos)) for p in photos.rglob("*.png"))
    model, config = load_model(classifier_run)
    mean, std = (torch.tensor(v)[:, None, None] for v in (config.mean, config.std))
    image = Image.open(photos / paths[5]).resize((config.image_size,) * 2, Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255
    features = torch.cat(list(index.features()))
    with torch.no_grad():
        expected = model.forward_head(model.forward_features(((pixels - mean) / std)[None]), pre_logits=True)
    torch.testing.assert_close(features[5], expected[0], rtol=1e-4, atol=1e-4)
    table = pytest.importorskip("pyarrow.parquet").read_table(tmp_path / "a" / "index.parquet").to_pydict()
    assert table["path"] == paths
    assert table["row"][4:6] == [0, 1]
    kept = tmp_path / "a" / "shard-00000.safetensors"
    written = kept.stat().st_mtime_ns
    (tmp_path / "a" / "shard-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has 2 of 3 shards; run the same `tokamix embed` command again"):
        FeatureIndex(tmp_path / "a")
    again = embed(classifier_run, photos, tmp_path / "a", shard_size=4, batch_size=3, device="cpu")
    assert torch.equal(torch.cat(list(again.features())), features)
    assert kept.stat().st_mtime_ns == written
    half = embed(classifier_run, photos, tmp_path / "b", dtype="fp16", file_format="npy", workers=1, device="cpu")
    array = np.load(tmp_path / "b" / "shard-00000.npy")
    assert array.dtype == np.float16
    assert len(half) == 11
    torch.testing.assert_close(torch.from_numpy(array).float(), features, rtol=1e-2, atol=1e-2)


def test_shards_that_do_not_fit_together_are_refused(classifier_run: Path, tmp_path: Path) -> None:
    """Other images, or a new size of the shards, would give some images twice and leave out others."""
    folder, out = tmp_path / "photos", tmp_path / "features"
    folder.mkdir()
    for i in range(5):
        picture(i).save(folder / f"{i}.png")
    embed(classifier_run, folder, out, shard_size=3, device="cpu")
    (out / "shard-00001.safetensors").unlink()
    with pytest.raises(ValueError, match=r"different settings: shard_size was 3 and is 4; use the same ones"):
        embed(classifier_run, folder, out, shard_size=4, device="cpu")
    (folder / "0.png").rename(folder / "9.png")
    with pytest.raises(ValueError, match=r"are not those that .* was made for: some were added, removed or renamed"):
        embed(classifier_run, folder, out, shard_size=3, device="cpu")
    (folder / "9.png").rename(folder / "0.png")
    assert len(embed(classifier_run, folder, out, shard_size=3, device="cpu")) == 5


def test_shards_of_tar_files_and_packs(classifier_run: Path, tmp_path: Path) -> None:
    """Each tar is a shard; a data set has labels and splits."""
    numbers = {"train-0": range(5), "train-1": range(5, 8), "val-0": range(8, 10)}
    for name, part in numbers.items():
        with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
            for i in part:
                content = io.BytesIO()
                picture(i).save(content, format="png")
                for member, data in ((f"{i:03}.png", content.getvalue()), (f"{i:03}.cls", str(i % 4).encode())):
                    info = tarfile.TarInfo(member)
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))
    source = f"wds:{tmp_path}/train-{{0..1}}.tar,{tmp_path}/val-0.tar"
    index = embed(classifier_run, source, tmp_path / "tar", batch_size=2, device="cpu")
    assert index.sizes == [5, 3, 2]
    assert index.names(1)["labels"] == [5 % 4, 6 % 4, 7 % 4]
    assert index.path(6).endswith("train-1.tar:006")
    photo = tmp_path / "photo.png"
    picture(9).save(photo)
    text = call("neighbours", photo, "--index", tmp_path / "tar", "--k", "3", "-o", tmp_path / "sheet.png")
    assert "1.0000" in text
    assert "val-0.tar:009" in text
    assert Image.open(tmp_path / "sheet.png").width > 4 * 180
    val = embed(classifier_run, source, tmp_path / "val", split="val", device="cpu")
    assert val.sizes == [2]


def test_a_photo_of_16_bits(classifier_run: Path, photos: Path, tmp_path: Path) -> None:
    """The same as an image and as a file."""
    index = embed(classifier_run, photos, tmp_path / "index", device="cpu")
    photo = Image.fromarray(np.arange(64, dtype=np.uint16).reshape(8, 8) * 1000)
    photo.save(tmp_path / "deep.png")
    assert find_neighbours(photo, index, device="cpu") == find_neighbours(tmp_path / "deep.png", index, device="cpu")


def test_splits_with_the_same_names() -> None:
    """Arrays call their images by number in each split; the sheet shows the right ones."""
    splits = create_dataset("digits")
    assert [prefix for prefix, _ in embed_run.open_splits("digits", "all")] == ["train/", "val/"]
    found = neighbours._read_images("digits", "all", ["train/image 3", "val/image 3"])
    for part, dataset in (("train", splits.train), ("val", splits.val)):
        assert np.array_equal(np.asarray(found[f"{part}/image 3"]), dataset.images[3, 0].numpy())


def test_images_that_cannot_be_decoded(classifier_run: Path, photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    folder.mkdir()
    for i in range(4):
        picture(i).save(folder / f"{i}.png")
    (folder / "1.png").write_bytes(b"no image")
    assert "1.png" in call("embed", classifier_run, folder, "-o", tmp_path / "a", "--workers", 0, code=1)
    assert len(embed(classifier_run, photos, tmp_path / "a", device="cpu")) > 4  # that folder has no features yet
    index = embed(classifier_run, folder, tmp_path / "b", corrupt="skip", device="cpu")
    assert [index.path(i) for i in range(len(index))] == ["0.png", "2.png", "3.png"]
    assert len(torch.cat(list(index.features()))) == 3


def test_bad_input_is_one_sentence(classifier_run: Path, segmenter_run: Path, photos: Path, tmp_path: Path) -> None:
    out = tmp_path / "index"
    assert "11 images, 16 features each" in call("embed", classifier_run, photos, "-o", out, "--workers", 0)
    photo = photos / "00.png"
    other = tmp_path / "other"
    changed = load_model(classifier_run)[0]
    with torch.no_grad():
        changed.norm.weight.add_(0.1)
    with pytest.raises(ValueError, match=r"holds features of another model, .*; use another folder \(-o\)"):
        embed(changed, photos, out, device="cpu")
    with pytest.raises(ValueError, match="was made by another model than this one: its weights differ"):
        find_neighbours(photo, out, source=changed, device="cpu")
    for arguments, message in (
        (
            ("embed", classifier_run, photos, "-o", out, "--pool", "avg"),
            "different settings: pool was 'model' and is 'avg'",
        ),
        (
            ("embed", classifier_run, photos, "-o", out, "--image-size", 16),
            "different settings: image_size was 8 and is 16; use the same ones",
        ),
        (("embed", classifier_run, tmp_path / "none", "-o", other), "there is no data set"),
        (("embed", segmenter_run, photos, "-o", other), "the model's task is segment"),
        (("embed", "resnet1888", photos, "-o", other), "there is no model 'resnet1888'"),
        (("neighbours", photo, "--index", other), "has no features: it has no index.json"),
        (("neighbours", photos / "99.png", "--index", out), "99.png"),
        (("neighbours", photo, "--index", out, "-o", out / "sheet.txt"), "written to a .png or .jpg file, not to"),
    ):
        assert message in call(*arguments, code=1), arguments
    (out / "index.json").write_text("{")
    assert "index.json is damaged" in call("neighbours", photo, "--index", out, code=1)
    assert not (other / "index.json").exists()


@pytest.mark.xdist_group("processes")
def test_two_processes_share_the_shards(classifier_run: Path, photos: Path, tmp_path: Path) -> None:
    one = embed(classifier_run, photos, tmp_path / "one", shard_size=3, device="cpu")
    command = [*TWO_PROCESSES, str(ROOT / "tokamix" / "__main__.py"), "embed", str(classifier_run), str(photos)]
    command += ["-o", str(tmp_path / "two"), "--shard-size", "3", "--workers", "0", "--device", "cpu"]
    code, output = finish(tmp_path / "log", torchrun, command)
    assert code == 0, output[-2000:]
    assert output.count("written") == 1
    two = FeatureIndex(tmp_path / "two")
    assert torch.equal(torch.cat(list(one.features())), torch.cat(list(two.features())))


def test_memory_is_bounded_by_a_shard(classifier_run: Path, photos: Path, tmp_path: Path, monkeypatch) -> None:
    """A shard is written before the next one is read."""
    written: list[int] = []
    real = embed_run._create_loader

    def create_loader(*args):
        written.append(len(list((tmp_path / "a").glob("shard-*.safetensors"))))
        return real(*args)

    monkeypatch.setattr(embed_run, "_create_loader", create_loader)
    tokamix.embed(classifier_run, photos, tmp_path / "a", shard_size=4, device="cpu")
    assert written == [0, 1, 2]
    assert json.loads((tmp_path / "a" / "index.json").read_text())["images"] == 11
