"""Every kind of source opens, and says what is wrong with it."""

import json
import logging
import pickle
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import tokamix
from tests.data.conftest import encoded, eval_config, noise, recipe, write_pack
from tokamix.data import ArrayDataset, DataError, create_dataset
from tokamix.data.images.loader import create_eval_loader, create_train_loader
from tokamix.data.splits import split_by_class
from tokamix.inference import imagenet_classes


def test_digits() -> None:
    data = create_dataset("digits")
    assert (len(data.train), len(data.val)) == (1438, 359)
    assert data.classes == tuple("0123456789")
    images, labels = data.train.arrays()
    assert images.shape == (1438, 1, 8, 8)
    assert images.dtype == torch.uint8
    assert (images.min(), images.max()) == (0, 255)
    assert (labels.bincount() > 130).all()
    again = create_dataset("digits").train.arrays()
    other = create_dataset("digits", seed=1).train.arrays()  # what is held out is held out from every run
    assert torch.equal(images, again[0])
    assert torch.equal(images, other[0])


def test_a_split_keeps_classes_and_loses_nothing() -> None:
    labels = [0] * 50 + [1] * 2 + [2]
    train, val = split_by_class(labels)
    assert sorted(train + val) == list(range(53))
    assert [sum(labels[i] == c for i in val) for c in range(3)] == [10, 1, 0]


def test_folder(folder: Path) -> None:
    data = create_dataset(str(folder))
    assert data.classes == ("ant", "bee", "cat")
    assert (len(data.train), len(data.val)) == (24, 9)
    image, label = data.train[9]
    assert label == 1
    assert image.mode == "RGB"
    assert np.asarray(image).mean((0, 1)).argmax() == 1
    assert data.train.name_of(9).endswith("bee/1.jpg")
    assert data.train.arrays() is None


def test_a_folder_without_parts_is_split(folder: Path) -> None:
    data = create_dataset(str(folder / "train"))
    assert (len(data.train), len(data.val)) == (18, 6)
    names = [d.name_of(i) for d in (data.train, data.val) for i in range(len(d))]
    assert len(set(names)) == 24
    assert create_dataset(str(folder / "train")).val.labels.tolist() == [0, 0, 1, 1, 2, 2]


def test_a_path_has_one_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    for source in (
        "train",
        "train/",
        "./train",
        f"{folder}/train",
        f"{folder}/train/",
        Path("train"),
        folder / "train",
    ):
        data = create_dataset(source)
        assert data.name == str(folder / "train")
        assert len(data.train) == 18


def test_names_are_not_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "digits" / "a").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert create_dataset("digits").name == "digits"
    with pytest.raises(DataError, match=r"class folder .*digits/a has no images"):
        create_dataset(Path("digits"))


def test_a_class_without_validation_images(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tokamix"):
        create_dataset(folder)
        assert not caplog.records
        shutil.rmtree(folder / "val" / "bee")
        data = create_dataset(folder)
    assert data.val.labels.tolist() == [0] * 3 + [2] * 3
    assert [r.getMessage() for r in caplog.records] == [
        f"{folder}: 1 of 3 classes have no validation images (bee); accuracy does not measure them"
    ]


def test_annotations_need_their_task(tmp_path: Path) -> None:
    """images/ and masks/ are not two classes."""
    for name in ("images", "masks"):
        (tmp_path / "voc" / name).mkdir(parents=True)
        noise(0).save(tmp_path / "voc" / name / "a.png")
        noise(0).save(tmp_path / "voc" / name / "b.png")
    with pytest.raises(DataError, match=r"voc has masks, but no folder for each class; use task='segment' \("):
        create_dataset(tmp_path / "voc")
    for name in ("annotations", "train", "val"):
        (tmp_path / "coco" / name).mkdir(parents=True)
        noise(0).save(tmp_path / "coco" / name / "a.png")
    (tmp_path / "coco" / "annotations" / "instances_train.json").write_text("{}")
    with pytest.raises(DataError, match=r"coco has COCO annotations, .*; use task='detect' \(--task detect\)"):
        create_dataset(tmp_path / "coco")


def test_errors_of_folders(folder: Path, tmp_path: Path) -> None:
    (folder / "train" / "bee" / "notes.txt").write_text("no image")
    (folder / "train" / "bee" / ".hidden.png").write_bytes(b"")
    assert len(create_dataset(str(folder)).train) == 24
    (folder / "val" / "dog").mkdir()
    with pytest.raises(DataError, match=r"class folder .*val/dog has no images \(.*\.jpg.*\); fill or remove it"):
        create_dataset(str(folder))
    noise(0).save(folder / "val" / "dog" / "x.png")
    with pytest.raises(DataError, match=r"val/dog is a class that .*train does not have"):
        create_dataset(str(folder))
    (folder / "train" / "empty").mkdir()
    with pytest.raises(DataError, match=r"class folder .*train/empty has no images"):
        create_dataset(str(folder))
    (tmp_path / "bare").mkdir()
    with pytest.raises(DataError, match="bare has no class folders"):
        create_dataset(str(tmp_path / "bare"))
    (tmp_path / "half" / "train" / "a").mkdir(parents=True)
    noise(0).save(tmp_path / "half" / "train" / "a" / "x.png")
    with pytest.raises(DataError, match=r"half has train/, but no val/ or test/"):
        create_dataset(str(tmp_path / "half"))


def test_validation_folders_are_not_classes(folder: Path) -> None:
    (folder / "train").rename(folder / "test")
    (folder / ".cache").mkdir()
    for left in (r"val/", r"test/"):
        with pytest.raises(DataError, match=rf"has {left}, but no train/; add one, or use .*{left[:-1]} \(to evaluate"):
            create_dataset(folder)
        shutil.rmtree(folder / "val", ignore_errors=True)
    (folder / "test").rename(folder / "valid")  # a class beside this one
    (folder / "invalid").mkdir()
    noise(0).save(folder / "invalid" / "x.png")
    assert create_dataset(folder).classes == ("invalid", "valid")


def test_packs(tmp_path: Path) -> None:
    originals = [noise(i, 24, 20) for i in range(10)]
    a = write_pack(tmp_path / "a.npz", [encoded(p) for p in originals[:4]], [0, 1, 0, 1])
    b = write_pack(tmp_path / "b.npz", [encoded(p) for p in originals[4:7]], [1, 1, 0])
    val = write_pack(tmp_path / "c_test.npz", [encoded(p) for p in originals[7:]], [0, 0, 1])
    data = create_dataset(f"{a},{val},{b}")
    assert data.classes == ("a", "b")
    images, labels = data.train.arrays()
    assert images.shape == (7, 3, 20, 24)
    assert labels.tolist() == [0, 1, 0, 1, 1, 1, 0]
    for i, image in enumerate(originals[:7]):
        assert np.array_equal(images[i].permute(1, 2, 0), image)
        assert np.array_equal(data.train[i][0], image)
    assert len(data.val) == 3
    split = create_dataset(str(a))
    assert (len(split.train), len(split.val)) == (2, 2)


def test_classes_in_a_different_order(tmp_path: Path) -> None:
    """The labels of packs are numbers, which would mean different classes in training and validation."""
    images = [encoded(noise(i)) for i in range(4)]
    train = write_pack(tmp_path / "a.npz", images, [0, 1, 0, 1], ("cat", "dog"))
    for i, classes in enumerate((("dog", "cat"), ("cat", "horse"))):
        val = write_pack(tmp_path / "a_val.npz", images, [0, 1, 0, 1], classes)
        with pytest.raises(
            DataError, match=rf"class {i} of .* is '{('cat', 'dog')[i]}' for training, but '{classes[i]}'"
        ):
            create_dataset(f"{train},{val}")
    val = write_pack(tmp_path / "a_val.npz", images, [0] * 4, ("cat",))
    assert create_dataset(f"{train},{val}").classes == ("cat", "dog")


def test_a_pack_of_many_sizes_is_decoded_on_demand(tmp_path: Path) -> None:
    pack = write_pack(tmp_path / "a.npz", [encoded(noise(i, 20 + i, 20)) for i in range(6)], [0, 1] * 3)
    data = create_dataset(str(pack))
    assert data.train.arrays() is None
    assert data.train[0][0].size[1] == 20


def test_a_broken_image_is_named_by_its_number_in_the_pack(tmp_path: Path) -> None:
    """Also after a fifth was held out, and if several packs were joined."""
    images = [encoded(noise(i)) for i in range(10)]
    images[7] = images[7][:50]
    packs = [write_pack(tmp_path / f"{name}.npz", images, [0, 1] * 5) for name in "ab"]
    for source in (str(packs[0]), ",".join(map(str, packs))):
        data = create_dataset(source)
        names = [split.name_of(i) for split in (data.train, data.val) for i in range(len(split))]
        assert sorted(names) == sorted(f"image {i} of {pack}" for pack in source.split(",") for i in range(10))
        for split in (data.train, data.val):
            for i in range(len(split)):
                if split.name_of(i).startswith("image 7 "):
                    with pytest.raises(DataError, match=r"image 7 of .*\.npz is (corrupt|not)"):
                        split.image(i)
                else:
                    split.image(i)


def test_errors_of_packs(tmp_path: Path) -> None:
    good = [encoded(noise(i)) for i in range(4)]
    with pytest.raises(DataError, match=r"the file .*none\.npz"):
        create_dataset(str(tmp_path / "none.npz"))
    path = write_pack(tmp_path / "a.npz", good, [0, 1, 2, -1])
    with pytest.raises(DataError, match=r"image 2 of .*a\.npz has label 2, but there are 2 classes .*; 2 of 4"):
        create_dataset(str(path))
    write_pack(path, good, [0, 1, 0])
    with pytest.raises(DataError, match=r"a\.npz is inconsistent: 3 labels, 5 offsets"):
        create_dataset(str(path))
    fields = dict(np.load(write_pack(path, good, [0, 1, 0, 1])))
    np.savez(path, **(fields | {"offsets": fields["offsets"].astype(float)}))
    with pytest.raises(DataError, match=r"a\.npz has offsets or labels that are not whole numbers"):
        create_dataset(str(path))
    np.savez(path, **(fields | {"offsets": fields["offsets"][[0, 2, 1, 3, 4]].astype(np.uint64)}))
    with pytest.raises(DataError, match=r"a\.npz is inconsistent"):
        create_dataset(str(path))
    np.savez(path, images=np.zeros(3))
    with pytest.raises(DataError, match=r"a\.npz is not a pack of images"):
        create_dataset(str(path))
    path.write_bytes(write_pack(tmp_path / "b.npz", good, [0, 1, 0, 1]).read_bytes()[:-200])
    with pytest.raises(DataError, match=r"a\.npz is corrupt, truncated or not an \.npz file"):
        create_dataset(str(path))
    np.save(tmp_path / "pickled.npy", np.array([{}], dtype=object), allow_pickle=True)
    (tmp_path / "pickled.npy").rename(path)
    with pytest.raises(DataError, match=r"a\.npz is"):
        create_dataset(str(path))
    write_pack(tmp_path / "only_val.npz", good, [0, 1, 0, 1])
    only_val = create_dataset(str(tmp_path / "only_val.npz"))
    assert (len(only_val.train), len(only_val.val)) == (0, 4)
    with pytest.raises(DataError, match="the training split is empty"):
        create_train_loader(only_val.train, recipe(), batch_size=2)
    with pytest.raises(DataError, match=r"only_val\.npz has 4 validation images, but none for training; name both"):
        tokamix.train(None, str(tmp_path / "only_val.npz"), device="cpu", output=tmp_path / "run")
    with pytest.raises(DataError, match=r"only_val\.npz has no images in the split train; choose another one, or all"):
        tokamix.evaluate(
            tokamix.create_model("columnar_tiny_sima", num_classes=2), only_val, split="train", device="cpu"
        )
    other = write_pack(tmp_path / "c.npz", good, [0, 1, 0, 1], ("x", "y"))
    with pytest.raises(DataError, match="have different classes"):
        create_dataset(f"{tmp_path / 'b.npz'},{other}")
    write_pack(path, [*good[:3], good[3][:50]], [0, 1, 0, 1])
    data = create_dataset(f"{path},{write_pack(tmp_path / 'd_val.npz', good, [0, 1, 0, 1])}")
    with pytest.raises(DataError, match=r"image 3 of .*a\.npz is (corrupt|not)"):
        create_train_loader(data.train, recipe(), batch_size=2)
    loader = create_train_loader(data.train, recipe(), batch_size=2, corrupt="skip")
    assert len(list(loader.epoch(0))) == 2
    assert len(loader.skipped) == 1


def test_labels_out_of_range() -> None:
    with pytest.raises(DataError, match=r"image 1 has label 7, but there are 2 classes \(0 to 1\); 1 of 2"):
        ArrayDataset(torch.zeros(2, 3, 8, 8, dtype=torch.uint8), [0, 7], ("a", "b"))


def test_unknown_names() -> None:
    with pytest.raises(DataError, match=r"there is no data set 'nowhere/'; no file or folder has this path"):
        create_dataset("nowhere/")
    with pytest.raises(DataError, match=r"there is no data set 'digitz'; did you mean digits\?"):
        create_dataset("digitz")
    with pytest.raises(DataError, match=r"did you mean CIFAR100\?"):
        create_dataset("CIFAR1000")
    with pytest.raises(DataError, match=r"possible are a folder, a \.npz file, digits, shapes, wds:, hf:, CIFAR10"):
        create_dataset("no_such_folder")
    with pytest.raises(DataError, match="shapes:x has no valid size"):
        create_dataset("shapes:x")


@pytest.fixture
def cifar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """CIFAR-100's own files, with few images; torchvision's check of their sums is switched off."""
    from torchvision import datasets

    folder = tmp_path / datasets.CIFAR100.base_folder
    folder.mkdir()
    draw = np.random.default_rng(0)
    for name, count in (("train", 20), ("test", 10)):
        pixels = draw.integers(0, 256, (count, 3072), dtype=np.uint8)
        content = {"data": pixels, "fine_labels": list(range(count))}
        (folder / name).write_bytes(pickle.dumps(content))
    (folder / "meta").write_bytes(pickle.dumps({"fine_label_names": [f"class {i}" for i in range(100)]}))
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
    return tmp_path


def test_torchvision_by_name(cifar: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKAMIX_DATA", str(cifar))
    data = create_dataset("cifar100")
    assert len(data.classes) == 100
    assert data.train.arrays()[0].shape == (20, 3, 32, 32)
    assert data.val.labels.tolist() == list(range(10))
    assert len(create_dataset(f"CIFAR100:{cifar}").train) == 20


def test_torchvision_with_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Flowers: both small parts are for training."""
    from torchvision import datasets

    class Flowers:
        classes = ("rose", "tulip")

        def __init__(self, root: Path, split: str) -> None:
            file = Path(root) / f"{split}.png"
            noise(len(split)).save(file)
            self._image_files, self._labels = [file], [int(split == "val")]

    monkeypatch.setattr(datasets, "Flowers102", Flowers)
    data = create_dataset(f"Flowers102:{tmp_path}")
    assert data.train.labels.tolist() == [0, 1]
    assert np.array_equal(data.train[1][0], noise(3))
    assert data.val.name_of(0).endswith("test.png")


def test_torchvisions_imagenet_has_the_classes_of_timm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision lists synonyms; the first of them are not unique."""
    from torchvision import datasets

    ids, names = zip(*imagenet_classes(1000), strict=True)

    class ImageNet:
        wnids = ids
        classes = tuple(tuple(name.partition(" (n")[0].split(", ")) for name in names)

        def __init__(self, root: Path, split: str) -> None:
            self.samples = [(f"{split}.png", 134)]

    monkeypatch.setattr(datasets, "ImageNet", ImageNet)
    assert len({name[0] for name in ImageNet.classes}) < 1000
    assert create_dataset(f"ImageNet:{tmp_path}").classes == names


def test_torchvision_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision import datasets

    monkeypatch.setenv("TOKAMIX_DATA", str(tmp_path))
    with pytest.raises(DataError, match=rf"ImageNet is not in {tmp_path}; set TOKAMIX_DATA .* cannot be downloaded"):
        create_dataset("ImageNet")

    def offline(*args, **kwargs) -> None:
        raise OSError("no route to host\nmore")

    monkeypatch.setattr(datasets, "CIFAR10", offline)
    with pytest.raises(DataError, match=r"CIFAR10 is not in .*downloading failed: no route to host\)$"):
        create_dataset("CIFAR10")


def test_optional_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    for package in ("sklearn.datasets", "datasets", "webdataset"):
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=r"tokamix\[demo\]"):
        create_dataset("digits")
    with pytest.raises(ImportError, match=r"tokamix\[data\]"):
        create_dataset("hf:user/name")
    with pytest.raises(ImportError, match=r"tokamix\[data\]"):
        create_dataset("wds:https://example.org/train-{0..1}.tar,https://example.org/val-0.tar")


def test_shapes() -> None:
    data = create_dataset("shapes")
    assert (len(data.train), len(data.val), data.num_classes) == (2000, 500, 8)
    assert (data.train.labels.bincount() == 250).all()
    sample, again = data.train.sample(5), create_dataset("shapes").train.sample(5)
    pairs = zip(vars(sample).values(), vars(again).values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs if isinstance(a, torch.Tensor))
    assert not torch.equal(sample.image, create_dataset("shapes", seed=1).train.sample(5).image)
    assert not torch.equal(sample.image, data.val.sample(5).image)
    assert torch.equal(data.train[5][0], sample.image)
    for i in range(30):
        sample = create_dataset("shapes:48").val.sample(i)
        assert sample.image.shape == (3, 48, 48)
        assert sample.masks.dtype == torch.bool
        assert len(sample.boxes) == len(sample.labels) == len(sample.masks) >= 1
        assert (sample.masks.sum(0) <= 1).all()  # nothing is owned twice
        areas = sample.masks.sum((1, 2))
        assert sample.label == sample.labels[areas.argmax()] == data_label(i)
        for box, mask in zip(sample.boxes, sample.masks, strict=True):
            left, top, right, bottom = box.int().tolist()
            assert mask[top:bottom, left:right].sum() == mask.sum()
            assert mask[top].any()
            assert mask[:, right - 1].any()
        assert set(sample.segmentation.unique().tolist()) == {0, *(1 + sample.labels).tolist()}


def data_label(i: int) -> int:
    return int(create_dataset("shapes:48").val.labels[i])


def test_shapes_are_drawn_as_they_are_called() -> None:
    from tokamix.data.shapes import CLASSES, _inside

    u, v = np.meshgrid(*[np.linspace(-1, 1, 401)] * 2)
    areas = {kind: _inside(kind, u, v).mean() * 4 for kind in CLASSES}
    star = 5 * 0.42 * np.sin(np.pi / 5)  # ten triangles between the centre, a point and a dent
    expected = {"circle": np.pi * 0.85**2, "square": 1.96, "triangle": 3 * 3**0.5 / 4, "star": star}
    expected |= {"ring": np.pi * (0.95**2 - 0.55**2), "cross": 4 * 0.28 * 2 * 0.95 - 0.56**2, "bar": 4 * 0.95 * 0.25}
    for kind, area in expected.items():
        assert abs(areas[kind] - area) < 0.02, kind
    with pytest.raises(ValueError, match="no shape blob"):
        _inside("blob", u, v)


def test_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write_hub(datasets, tmp_path, {"train": 24, "validation": 9}, shards=4)
    data = create_dataset(f"hf:{tmp_path}")
    assert data.classes == ("x", "y", "z")
    assert (len(data.train), len(data.val)) == (24, 9)
    assert len(data.train.shards) == 4
    loader = create_eval_loader(data.val, eval_config(image_size=20, crop_pct=1.0), batch_size=4)
    labels = torch.cat([labels for _, labels in loader.epoch(0)])
    assert labels.tolist() == [i % 3 for i in range(9)]
    halves = [
        create_eval_loader(data.val, eval_config(), batch_size=2, rank=rank, world_size=2).epoch(0) for rank in range(2)
    ]
    assert sorted(y for half in halves for _, labels in half for y in labels.tolist()) == sorted(labels.tolist())
    one, two = ([y for _, y in create_train_loader(data.train, recipe(), batch_size=8).epoch(e)] for e in (0, 1))
    assert len(one) == 3
    assert not torch.equal(torch.cat(one), torch.cat(two))


def test_hugging_face_without_validation_holds_out_a_fifth(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write_hub(datasets, tmp_path, {"train": 30}, shards=4)
    data = create_dataset(f"hf:{tmp_path}")
    assert (len(data.train), len(data.val)) == (24, 6)
    config = eval_config(image_size=20, crop_pct=1.0, mean=(0.0,) * 3, std=(1 / 255,) * 3)
    numbers, labels = [], []
    for split in (data.train, data.val):
        batches = list(create_eval_loader(split, config, batch_size=4).epoch(0))
        numbers.append([int(n) for images, _ in batches for n in images[:, 0, 0, 0].round()])  # the colour of an image
        labels.append([int(y) for _, part in batches for y in part])
    assert sorted(numbers[0] + numbers[1]) == list(range(30))  # nothing is lost or in both
    assert sorted(labels[1]) == [0, 0, 1, 1, 2, 2]  # a fifth of each class
    assert labels == [[n % 3 for n in part] for part in numbers]
    assert numbers[1] == split_by_class([n % 3 for n in range(30)])[1]  # the same images as of a folder
    trained = [y for _, part in create_train_loader(data.train, recipe(), batch_size=8).epoch(0) for y in part.tolist()]
    assert len(trained) == 24


def test_errors_of_hugging_face(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    write_hub(datasets, tmp_path / "a", {"test": 4}, shards=1)
    with pytest.raises(DataError, match=r"has the splits test, but no training split \('train'\)"):
        create_dataset(f"hf:{tmp_path / 'a'}")
    (tmp_path / "b").mkdir()
    for split in ("train", "test"):
        (tmp_path / "b" / f"{split}.json").write_text(json.dumps({"text": "hello", "label": 1}))
    with pytest.raises(DataError, match=r"needs one column of type Image and one of type ClassLabel; it has text"):
        create_dataset(f"hf:{tmp_path / 'b'}")
    (tmp_path / "c").mkdir()
    with pytest.raises(DataError, match=r"hf:.*c cannot be opened"):
        create_dataset(f"hf:{tmp_path / 'c'}")


def write_hub(datasets, root: Path, sizes: dict[str, int], shards: int) -> None:
    root.mkdir(exist_ok=True)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y", "z"])})
    for split, size in sizes.items():
        count = shards if split == "train" else 1
        for shard in range(count):
            numbers = range(shard * size // count, (shard + 1) * size // count)
            images = [{"bytes": encoded(Image.new("RGB", (20, 20), (i, 0, 0))), "path": None} for i in numbers]
            rows = {"image": images, "label": [i % 3 for i in numbers]}
            part = datasets.Dataset.from_dict(rows, features=features)
            part.to_parquet(root / f"{split}-{shard:05d}-of-{count:05d}.parquet")
