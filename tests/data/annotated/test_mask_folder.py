"""Folders of masks, in their several layouts."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.data.annotated.files import blocks, write_pair
from tests.data.conftest import noise
from tokamix.data import DataError, create_dataset
from tokamix.data.annotated.mask_folder import VOC


def make_voc(root: Path) -> Path:
    images, masks, lists = root / "JPEGImages", root / "SegmentationClass", root / "ImageSets/Segmentation"
    for name, values in (("a", (0, 20, 255)), ("bb", (3, 0, 0)), ("ccc", (1, 1, 1))):
        write_pair(images, masks, name, blocks(*values), palette=True)
    write_pair(images, root / "elsewhere", "not_labelled", blocks(0))
    lists.mkdir(parents=True)
    (lists / "train.txt").write_text("a\nccc\n")
    (lists / "val.txt").write_text("bb\n")
    return root


def test_photos_that_a_camera_turned(tmp_path: Path) -> None:
    """They go with their masks, whichever way these lie."""
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    photo = noise(0, 8, 12)
    for name in ("shown", "stored"):
        write_pair(tmp_path / "images", tmp_path / "masks", name, blocks(0, 1, 2)[:, :12])
        photo.save(tmp_path / "images" / f"{name}.jpg", "PNG", exif=exif)
    Image.fromarray(blocks(0, 1, 2).T).save(tmp_path / "masks/stored.png")
    (tmp_path / "classes.txt").write_text("a\nb\nc\n")
    data = create_dataset(str(tmp_path), "segment")
    samples = {Path(part.name_of(0)).stem: part.sample(0) for part in (data.train, data.val)}
    turned = np.asarray(photo.transpose(Image.Transpose.ROTATE_270))
    assert np.array_equal(samples["shown"].image.permute(1, 2, 0), turned)
    assert np.array_equal(samples["stored"].image.permute(1, 2, 0), np.asarray(photo))
    Image.fromarray(blocks(0, 1, 2).T).save(tmp_path / "masks/stored.png")
    photo.transpose(Image.Transpose.ROTATE_90).save(tmp_path / "images/stored.jpg", "PNG")
    part = data.train if Path(data.train.name_of(0)).stem == "stored" else data.val
    with pytest.raises(DataError, match=r"is 12x8 px, but its mask .*stored\.png is 8x12; one of the two is rotated"):
        part.sample(0)


@pytest.mark.parametrize("inner", [".", "VOC2012", "VOCdevkit/VOC2012"])
def test_voc(tmp_path: Path, inner: str) -> None:
    make_voc(tmp_path / inner)
    data = create_dataset(f"masks:{tmp_path}", "segment")
    assert data.classes == VOC
    assert len(VOC) == 21
    assert [data.train.name_of(i).rpartition("/")[2] for i in range(2)] == ["a.jpg", "ccc.jpg"]
    sample = data.train.sample(0)
    assert sample.segmentation.dtype == torch.uint8
    assert torch.equal(sample.segmentation, torch.from_numpy(blocks(0, 20, 255)))  # indices, whatever the palette
    assert sample.size == (8, 12)
    assert sample.boxes.shape == (0, 4)
    assert data.val.sample(0).segmentation[0].tolist() == [3] * 4 + [0] * 8
    with pytest.raises(DataError, match="have semantic masks, but no objects"):
        data.val.coco_dict()


def test_ade(tmp_path: Path) -> None:
    """0 counts for nothing there, and the classes start at 1."""
    for part in ("training", "validation"):
        write_pair(tmp_path / "images" / part, tmp_path / "annotations" / part, "x", blocks(0, 1, 150))
    rows = [f"{i}\t0.1\t10\t1\tobject {i}, and more words" for i in range(1, 151)]
    (tmp_path / "objectInfo150.txt").write_text("\n".join(["Idx\tRatio\tTrain\tVal\tName", *rows]))
    data = create_dataset(str(tmp_path), "segment")
    assert data.num_classes == 150
    assert data.classes[:2] == ("object 1", "object 2")
    assert data.train.category_ids == tuple(range(1, 151))
    assert data.val.sample(0).segmentation[0].tolist() == [255] * 4 + [0] * 4 + [149] * 4
    kept = create_dataset(f"masks:{tmp_path}?zero=class&classes=151", "segment")
    assert kept.val.sample(0).segmentation[0].tolist() == [0] * 4 + [1] * 4 + [150] * 4
    with pytest.raises(DataError, match="zero is 'no', but must be ignore or class"):
        create_dataset(f"masks:{tmp_path}?zero=no", "segment")


def test_zero_and_255_are_both_ignored(tmp_path: Path) -> None:
    for part in ("train", "val"):
        write_pair(tmp_path / "img_dir" / part, tmp_path / "ann_dir" / part, "x", blocks(0, 255, 1, 2))
    data = create_dataset(f"masks:{tmp_path}?zero=ignore&classes=2", "segment")
    assert data.classes == ("0", "1")
    assert data.train.sample(0).segmentation[0, ::4].tolist() == [255, 255, 0, 1]


def test_lists_beside_the_folders(tmp_path: Path) -> None:
    for name in ("p", "qq", "rrr"):
        write_pair(tmp_path / "images", tmp_path / "masks", name, blocks(0, 1))
    (tmp_path / "train.txt").write_text("rrr\np\n")
    (tmp_path / "val.txt").write_text("qq\n")
    (tmp_path / "classes.json").write_text(json.dumps({"classes": ["ground", "tree"], "ignore": 255}))
    data = create_dataset(str(tmp_path), "segment")
    assert data.classes == ("ground", "tree")
    assert [Path(data.train.name_of(i)).stem for i in range(len(data.train))] == ["rrr", "p"]
    (tmp_path / "val.txt").unlink()
    with pytest.raises(DataError, match="has either a training or a validation split; it must have both or none"):
        create_dataset(str(tmp_path), "segment")
    (tmp_path / "train.txt").unlink()
    data = create_dataset(str(tmp_path), "segment")  # a part is held out
    assert (len(data.train), len(data.val)) == (2, 1)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for part in ("train", "val"):
        for name in ("p", "qq"):
            write_pair(tmp_path / "images" / part, tmp_path / "masks" / part, name, blocks(0, 1, 255))
    (tmp_path / "classes.txt").write_text("ground\n\ntree\n")
    return tmp_path


def test_values_out_of_range(folder: Path) -> None:
    write_pair(folder / "images/train", folder / "masks/train", "p", blocks(0, 1, 7))
    data = create_dataset(str(folder), "segment")
    with pytest.raises(
        DataError, match=r"masks/train/p\.png has the value 7, but the 2 classes are 0 to 1 \(255 is ignored\)"
    ):
        data.train.sample(0)
    data = create_dataset(f"masks:{folder}?zero=ignore", "segment")
    with pytest.raises(DataError, match=r"has the value 7, but the 2 classes are 1 to 2"):
        data.train.sample(0)


@pytest.mark.parametrize("value", [np.int32(-1), np.int32(-3), np.float32(0.5)])
def test_values_that_are_no_class(folder: Path, value: np.generic) -> None:
    """As 8 bits, -3 would be class 253, and 0.5 class 0."""
    (folder / "masks/val/p.png").unlink()
    Image.fromarray(np.full((8, 12), value)).save(folder / "masks/val/p.tif")
    with pytest.raises(DataError, match=rf"p\.tif has the value {value}, but the 2 classes are 0 to 1"):
        create_dataset(str(folder), "segment").val.sample(0)


def test_masks_of_the_same_name(folder: Path) -> None:
    """Such as a coloured preview beside a mask: which one would be used depended on the file system."""
    noise(0).save(folder / "masks/val/p.jpg")
    with pytest.raises(DataError, match=r"masks/val/p\.jpg and p\.png have the same name, by which masks are found"):
        create_dataset(str(folder), "segment")


def test_masks_of_another_size(folder: Path) -> None:
    Image.fromarray(blocks(0, 1)).save(folder / "masks/val/qq.png")
    data = create_dataset(str(folder), "segment")
    assert data.val.sample(0).size == (8, 12)
    with pytest.raises(DataError, match=r"val/qq\.jpg is 12x8 px, but its mask .*masks/val/qq\.png is 8x8"):
        data.val.sample(1)


def test_invalid_masks(folder: Path) -> None:
    data = create_dataset(str(folder), "segment")
    Image.new("RGB", (12, 8)).save(folder / "masks/val/p.png")
    with pytest.raises(DataError, match=r"p\.png has 3 channels \(RGB\), but a mask has one"):
        data.val.sample(0)
    (folder / "masks/val/p.png").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"p\.png is not a readable mask: "):
        data.val.sample(0)
    (folder / "masks/val/p.png").unlink()
    with pytest.raises(DataError, match=r"p\.png does not exist"):
        data.val.sample(0)


def test_sixteen_bits(folder: Path) -> None:
    Image.fromarray(np.array([[0, 1], [255, 1]], dtype=np.uint16)).save(folder / "masks/val/p.png")
    Image.new("RGB", (2, 2)).save(folder / "images/val/p.jpg")
    data = create_dataset(str(folder), "segment")
    assert data.val.sample(0).segmentation.tolist() == [[0, 1], [255, 1]]
    Image.fromarray(np.array([[0, 256], [255, 1]], dtype=np.uint16)).save(folder / "masks/val/p.png")
    with pytest.raises(DataError, match="has the value 256"):
        data.val.sample(0)


def test_missing_files(folder: Path) -> None:
    (folder / "masks/train/p.png").unlink()
    with pytest.raises(DataError, match=r"images/train/p\.jpg has no mask in .*masks/train \(1 of 2 have none\)"):
        create_dataset(str(folder), "segment")
    for name in ("p", "qq"):
        (folder / f"images/train/{name}.jpg").unlink()
    with pytest.raises(DataError, match=r"images/train has no images"):
        create_dataset(str(folder), "segment")
    with pytest.raises(DataError, match=r"has no folders of images \(JPEGImages, images, .*\) and masks"):
        create_dataset(f"masks:{folder}/images", "segment")
    with pytest.raises(DataError, match=r"the folder .*nowhere does not exist"):
        create_dataset(f"masks:{folder}/nowhere", "segment")


def test_listed_files_that_are_missing(tmp_path: Path) -> None:
    make_voc(tmp_path)
    (tmp_path / "ImageSets/Segmentation/val.txt").write_text("bb\nzebra\n")
    with pytest.raises(DataError, match=r"zebra of .*val\.txt is not in .*JPEGImages \(1 images are missing\)"):
        create_dataset(str(tmp_path), "segment")
    (tmp_path / "ImageSets/Segmentation/val.txt").write_text("bb\nnot_labelled\n")
    with pytest.raises(DataError, match=r"not_labelled\.jpg has no mask in .*SegmentationClass \(1 of 2 have none\)"):
        create_dataset(str(tmp_path), "segment")


def test_names_of_classes(folder: Path) -> None:
    assert create_dataset(str(folder), "segment").classes == ("ground", "tree")
    (folder / "classes.txt").write_bytes(b"ground\ntr\xe4d\n")
    with pytest.raises(DataError, match=r"classes\.txt is not a text file in UTF-8"):
        create_dataset(str(folder), "segment")
    (folder / "classes.txt").unlink()
    with pytest.raises(DataError, match=r"has no class names; write classes\.txt with one name per line"):
        create_dataset(str(folder), "segment")
    (folder / "classes.json").write_text('["a", "b", "c"]')
    assert create_dataset(str(folder), "segment").classes == ("a", "b", "c")
    (folder / "classes.json").write_text("{}")
    with pytest.raises(DataError, match=r"classes\.json is neither a list of names nor"):
        create_dataset(str(folder), "segment")
    for count in ("0", "256", "many"):
        with pytest.raises(DataError, match=f"classes is '{count}', but must be a number from 1 to 255"):
            create_dataset(f"masks:{folder}?classes={count}", "segment")
