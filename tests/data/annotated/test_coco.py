"""COCO's annotation files: what is in them, and what may be wrong with them."""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pycocotools import mask as tools

from tests.data.annotated.files import CATEGORIES, annotation, content, write_coco
from tests.data.conftest import noise
from tokamix.data import DataError, DatasetSplits, create_dataset
from tokamix.data.annotated.rle import encode_rle

L_SHAPE = [[2.0, 2, 10, 2, 10, 6, 6, 6, 6, 12, 2, 12]]


def opened(root: Path, train: dict, val: dict | None = None, task: str = "detect", options: str = "") -> DatasetSplits:
    write_coco(root, "train", train)
    write_coco(root, "val", val or content(2, [annotation(1, 10, [3, 4, 10, 8])]))
    return create_dataset(f"coco:{root}{options}", task)


def test_boxes_polygons_and_run_lengths(tmp_path: Path) -> None:
    drawn = torch.zeros(32, 40, dtype=torch.bool)
    drawn[5:9, 20:31] = True
    runs = encode_rle(drawn)
    packed = tools.encode(np.asfortranarray(drawn.numpy().astype(np.uint8)))
    packed = {"size": packed["size"], "counts": packed["counts"].decode()}
    several = [[1.0, 20, 5, 20, 5, 25, 1, 25], [30, 1, 36, 1, 36, 4, 30, 4]]
    coco = [
        annotation(5, 10, [2, 2, 8, 10], 3, segmentation=L_SHAPE),
        annotation(2, 10, [20, 5, 11, 4], 90, segmentation=runs),
        annotation(9, 11, [20, 5, 11, 4], 7, segmentation=packed, iscrowd=1),
        annotation(4, 11, [1, 1, 35, 24], 7, segmentation=several),
    ]
    data = opened(tmp_path, content(2, coco))
    assert data.classes == ("cat", "dog", "owl")
    assert data.train.category_ids == (3, 7, 90)
    first, second = (data.train.sample(i) for i in range(2))
    assert (first.image_id, second.image_id) == (10, 11)
    assert first.size == (32, 40)
    assert np.array_equal(first.image.permute(1, 2, 0).numpy(), np.asarray(Image.open(tmp_path / "train/10.png")))
    # in the order of ids; labels without the gaps
    assert first.labels.tolist() == [2, 0]
    assert first.boxes.tolist() == [[20, 5, 31, 9], [2, 2, 10, 12]]
    assert torch.equal(first.masks[0], drawn)
    assert first.masks[1].sum() == 8 * 4 + 4 * 6
    assert not first.masks[1, 8, 8]
    assert second.labels.tolist() == [1, 1]
    assert second.crowd.tolist() == [False, True]
    assert torch.equal(second.masks[1], drawn)
    assert second.masks[0].sum() == 4 * 5 + 6 * 3
    assert data.train.sample(0, masks=False).masks is None
    assert data.train.name_of(1) == second.name == str(tmp_path / "train/11.png")


def test_for_segmentation(tmp_path: Path) -> None:
    coco = [
        annotation(1, 10, [0, 0, 20, 20], 90),
        annotation(2, 10, [5, 5, 4, 4], 3),
        annotation(3, 10, [0, 0, 40, 32], 7, iscrowd=1),
    ]
    data = opened(tmp_path, content(1, coco), task="segment")
    assert data.classes == ("background", "cat", "dog", "owl")
    classes = data.train.sample(0, masks=False).segmentation
    assert classes.dtype == torch.uint8
    assert classes[6, 6] == 1
    assert classes[1, 1] == 3
    assert classes[30, 30] == 255


def test_images_without_objects(tmp_path: Path) -> None:
    coco = content(4, [annotation(1, 11, [1, 1, 5, 5]), annotation(2, 12, [1, 1, 5, 5], iscrowd=1)])
    data = opened(tmp_path, coco, coco)
    assert [data.train.image_id(i) for i in range(len(data.train))] == [11]  # a crowd alone is nothing to learn
    assert len(data.val) == 4
    empty = data.val.sample(0)
    assert (empty.boxes.shape, empty.labels.shape, empty.masks.shape) == ((0, 4), (0,), (0, 32, 40))
    assert len(create_dataset(f"coco:{tmp_path}?empty=keep", "detect").train) == 4
    with pytest.raises(DataError, match="has no annotation with an area, so that there is nothing to learn"):
        opened(tmp_path, content(4, []))


def test_over_the_edge_and_without_area(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    coco = [
        annotation(1, 10, [30, 20, 30, 30]),
        annotation(2, 10, [-5, -5, 10, 10]),
        annotation(3, 10, [50, 5, 10, 10]),  # wholly outside
        annotation(4, 10, [5, 5, 0, 10]),
        annotation(5, 10, [5, 5, 10, -1]),
        annotation(6, 10, [5, 5, 1, 1]),
        annotation(7, 10, [5, 5, 6, 6], segmentation=[[5, 5, 6, 6]]),  # a line is no outline
        annotation(8, 10, [5, 5, 6, 6], segmentation=[]),
    ]
    with caplog.at_level(logging.WARNING, "tokamix"):
        sample = opened(tmp_path, content(1, coco)).train.sample(0)
    assert sample.boxes.tolist() == [[30, 20, 40, 32], [0, 0, 5, 5], [5, 5, 6, 6]]
    assert sample.masks.sum((1, 2)).tolist() == [120, 25, 1]
    messages = [record.message for record in caplog.records]
    assert messages == [
        f"{tmp_path}/annotations/instances_train.json: 5 of 8 annotations are not used:"
        " 3 have no area in the image, 2 no outline"
    ]


def test_boxes_alone(tmp_path: Path) -> None:
    coco = [{k: v for k, v in annotation(1, 10, [3, 4, 10, 8]).items() if k not in ("segmentation", "area", "iscrowd")}]
    data = opened(tmp_path, content(1, coco), content(1, coco))
    assert not data.train.has_masks
    assert data.train.sample(0).masks is None
    assert not data.train.sample(0).crowd.any()
    assert data.val.coco_dict()["annotations"] == [coco[0] | {"area": 80, "iscrowd": 0}]
    with pytest.raises(DataError, match="has only boxes, no outlines; segmentation needs outlines"):
        create_dataset(f"coco:{tmp_path}", "segment")
    write_coco(tmp_path, "train", GOOD)
    write_coco(tmp_path, "val", content(1, []))
    with pytest.raises(DataError, match=r"val\.json has no annotations with an area; segmentation needs"):
        create_dataset(f"coco:{tmp_path}", "segment")


def test_the_form_goes_out_as_it_came_in(tmp_path: Path) -> None:
    coco = content(3, [annotation(0, 12, [3, 4, 10, 8], 90), annotation(77, 10, [1, 1, 5, 5], iscrowd=1)])
    form = opened(tmp_path, coco, coco).val.coco_dict()
    assert form["categories"] == CATEGORIES
    assert form["images"] == coco["images"]
    assert [entry.pop("id") for entry in form["annotations"]] == [1, 2]  # an id of 0 would be no match to the tools
    by_image = sorted(coco["annotations"], key=lambda entry: entry["image_id"])
    assert form["annotations"] == [{k: v for k, v in e.items() if k != "id"} for e in by_image]


def test_one_file_is_split(tmp_path: Path) -> None:
    coco = content(20, [annotation(i + 1, 10 + i, [3, 4, 10, 8]) for i in range(20)])
    path = write_coco(tmp_path, "all", coco)
    data = create_dataset(str(path), "detect")
    ids = [{part.image_id(i) for i in range(len(part))} for part in (data.train, data.val)]
    assert [len(part) for part in ids] == [16, 4]
    assert ids[0] | ids[1] == set(range(10, 30))
    assert {entry["id"] for entry in data.val.coco_dict()["images"]} == ids[1]
    assert {entry["image_id"] for entry in data.val.coco_dict()["annotations"]} == ids[1]
    both = create_dataset(f"coco:{path},{path}", "detect")
    assert (len(both.train), len(both.val)) == (20, 20)


def test_one_image_cannot_be_split(tmp_path: Path) -> None:
    path = write_coco(tmp_path, "all", content(1, [annotation(1, 10, [3, 4, 10, 8])]))
    with pytest.raises(DataError, match=r"instances_all\.json has only one image; two are needed to hold one out"):
        create_dataset(str(path), "detect")


@pytest.mark.parametrize("tag", range(1, 9))
@pytest.mark.parametrize("stored", [False, True], ids=["as shown", "as stored"])
@pytest.mark.parametrize("size", [(40, 32), (36, 36)], ids=["wide", "square"])
def test_as_the_camera_says(tmp_path: Path, tag: int, stored: bool, size: tuple[int, int]) -> None:
    """Where the file's size fits both ways, the tag decides."""
    shown = noise(1, *size)
    undo = {2: 0, 3: 3, 4: 1, 5: 5, 6: 2, 7: 6, 8: 4}  # Pillow's number of the way back
    raw = shown.transpose(Image.Transpose(undo[tag])) if tag > 1 else shown
    exif = Image.Exif()
    exif[0x0112] = tag
    coco = content(1, [annotation(1, 10, [3, 4, 10, 8])])
    coco["images"][0] |= dict(zip(("width", "height"), (raw if stored else shown).size, strict=True))
    data = opened(tmp_path, coco, coco)
    raw.save(tmp_path / "val/10.png", exif=exif)
    expected = raw if stored and raw.size != shown.size else shown
    assert np.array_equal(data.val.sample(0).image.permute(1, 2, 0), np.asarray(expected))


def test_fewer_categories_in_validation(tmp_path: Path) -> None:
    val = content(1, [annotation(1, 10, [3, 4, 10, 8], 90)], categories=CATEGORIES[2:])
    data = opened(tmp_path, content(1, [annotation(1, 10, [3, 4, 10, 8])]), val)
    assert data.val.sample(0).labels.tolist() == [2]
    assert data.val.classes == data.classes


@pytest.mark.parametrize("place", ["images/train", "images", "train", "."])
def test_images_are_found(tmp_path: Path, place: str) -> None:
    coco = content(1, [annotation(1, 10, [3, 4, 10, 8])])
    path = write_coco(tmp_path, "train", coco)
    (tmp_path / place).mkdir(parents=True, exist_ok=True)
    (tmp_path / "train/10.png").rename(tmp_path / place / "10.png")
    data = create_dataset(f"coco:{path},{path}", "detect")
    assert data.train.sample(0).size == (32, 40)


def test_images_beside_the_file(tmp_path: Path) -> None:
    for part in ("train", "valid"):
        coco = content(1, [annotation(1, 10, [3, 4, 10, 8])])
        write_coco(tmp_path, part, coco).rename(tmp_path / part / "_annotations.coco.json")
    (tmp_path / "annotations").rmdir()
    assert len(create_dataset(str(tmp_path), "detect").val) == 1


def wrong(coco: dict, **changes: object) -> dict:
    """A copy with one annotation's values replaced."""
    coco = json.loads(json.dumps(coco))
    coco["annotations"][0].update(changes)
    return coco


GOOD = content(2, [annotation(1, 10, [3, 4, 10, 8]), annotation(2, 11, [3, 4, 10, 8])])
ERRORS = {
    "a list": ([], "is a list, not a COCO file with images, annotations and categories"),
    "no images": ({"annotations": [], "categories": []}, "has no list of images; is it a COCO annotation file"),
    "empty": (content(0, []), "has an empty list of images"),
    "no box": (
        {**GOOD, "annotations": [{"id": 1, "image_id": 10, "category_id": 3}]},
        "entry 0 of annotations lacks 'bbox'",
    ),
    "no size": ({**GOOD, "images": [{"id": 1, "file_name": "1.png"}]}, "entry 0 of images lacks 'width'"),
    "same image": ({**GOOD, "images": [GOOD["images"][0]] * 2}, "the id 10 occurs twice in images"),
    "same object": (wrong(GOOD, id=2), "the id 2 occurs twice in annotations"),
    "same category": ({**GOOD, "categories": [CATEGORIES[0]] * 2}, "the id 3 occurs twice in categories"),
    "category": (wrong(GOOD, category_id=4), "annotation 1 has category_id 4, which is not in categories"),
    "a list as id": (wrong(GOOD, category_id=[3]), r"annotation 1 has category_id \[3\], which is not in categories"),
    "image": (wrong(GOOD, image_id=12), "annotation 1 has image_id 12, which is not in images"),
    "three": (
        wrong(GOOD, bbox=[1, 2, 3]),
        r"annotation 1 has the bbox \[1, 2, 3\]; it must be \[left, top, width, height\]",
    ),
    "words": (wrong(GOOD, bbox=["a", 2, 3, 4]), "annotation 1 has the bbox"),
    "nan": (wrong(GOOD, bbox=[float("nan"), 2, 3, 4]), "annotation 1 has the bbox"),
    "runs": (wrong(GOOD, segmentation={"counts": [1]}), "annotation 1 has run lengths without 'size' and 'counts'"),
    "no runs": (wrong(GOOD, segmentation={"size": None, "counts": [1]}), "annotation 1 has run lengths without 'size'"),
    "lists of runs": (
        wrong(GOOD, segmentation={"size": [32, 40], "counts": [[1], 2]}),
        "run lengths that are not whole",
    ),
    "negative runs": (
        wrong(GOOD, segmentation={"size": [32, 40], "counts": [-1, 1281]}),
        "are not whole numbers from 0",
    ),
    "huge": (wrong(GOOD, bbox=[10**400, 2, 3, 4]), "annotation 1 has the bbox"),
    "nan corners": (wrong(GOOD, segmentation=[[float("nan")] * 6]), "annotation 1 has a polygon whose corners are not"),
    "area": (wrong(GOOD, area="80"), "annotation 1 has the area '80'; it must be a number"),
    "kinds": (
        {**GOOD, "images": [GOOD["images"][0], {**GOOD["images"][1], "id": "11"}]},
        "the ids of images must be all numbers, or all text",
    ),
    "size": (
        {**GOOD, "images": [GOOD["images"][0], {**GOOD["images"][1], "width": None}]},
        "image 11 has the size Nonex32; it must be in pixels",
    ),
    "corners": (wrong(GOOD, segmentation=[["a"] * 6]), "annotation 1 has a polygon whose corners are not numbers"),
}


@pytest.mark.parametrize("kind", ERRORS)
def test_errors(tmp_path: Path, kind: str) -> None:
    coco, message = ERRORS[kind]
    write_coco(tmp_path, "train", GOOD)
    path = write_coco(tmp_path, "val", GOOD)
    path.write_text(json.dumps(coco))
    with pytest.raises(DataError, match=message) as caught:
        create_dataset(f"coco:{tmp_path}", "detect")
    assert "instances_val.json" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"the folder .*nowhere does not exist; use one with annotations/instances_train\*\.json"
    ):
        create_dataset(f"coco:{tmp_path}/nowhere", "detect")
    with pytest.raises(DataError, match=r"the annotation file .*a\.json does not exist"):
        create_dataset(f"{tmp_path}/a.json", "detect")
    write_coco(tmp_path, "train", GOOD)
    with pytest.raises(DataError, match=r"has no annotations/instances_val\*\.json; name the files"):
        create_dataset(f"coco:{tmp_path}", "detect")
    path = write_coco(tmp_path, "val", GOOD)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(DataError, match=r"instances_val\.json is broken or not a \.json file: "):
        create_dataset(f"coco:{tmp_path}", "detect")
    write_coco(tmp_path, "val", GOOD)
    write_coco(tmp_path, "val2", GOOD)
    with pytest.raises(DataError, match=r"has both instances_val\.json and instances_val2\.json; name the files"):
        create_dataset(f"coco:{tmp_path}", "detect")
    with pytest.raises(DataError, match=r"names 3 files; possible are two"):
        create_dataset(f"coco:{path},{path},{path}", "detect")
    (tmp_path / "train/11.png").unlink()
    with pytest.raises(DataError, match=r"1 of the 2 images of .*train\.json are missing, such as .*train/11\.png"):
        create_dataset(f"coco:{tmp_path}/annotations/instances_train.json,{path}", "detect")
    (tmp_path / "train/10.png").unlink()
    with pytest.raises(DataError, match=r"the image 10\.png of .* is not in .*/train, "):
        create_dataset(f"coco:{tmp_path}/annotations/instances_train.json,{path}", "detect")


def test_categories_that_disagree(tmp_path: Path) -> None:
    renamed = [{"id": 3, "name": "tiger"}]
    with pytest.raises(DataError, match=r"category 3 is 'tiger' in .*, but .* names it 'cat'; categories must agree"):
        opened(tmp_path, GOOD, content(1, [], categories=renamed))
    with pytest.raises(DataError, match=r"category 4 is 'elk' in .*, but .* does not have it"):
        opened(tmp_path, GOOD, content(1, [], categories=[{"id": 4, "name": "elk"}]))


def test_errors_on_decoding(tmp_path: Path) -> None:
    data = opened(tmp_path, GOOD)
    Image.new("RGB", (20, 10)).save(tmp_path / "train/10.png")
    with pytest.raises(DataError, match=r"train/10\.png is 20x10 px, but .*instances_train\.json states 40x32"):
        data.train.sample(0)
    Image.new("RGB", (32, 40)).save(tmp_path / "train/10.png")
    with pytest.raises(DataError, match=r"is 32x40 px, but .* states 40x32; one of the two is rotated"):
        data.train.sample(0)
    (tmp_path / "train/10.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"train/10\.png is empty"):
        data.train.sample(0)
    runs = {"size": [10, 20], "counts": [0, 200]}
    with pytest.raises(DataError, match=r"val/10\.png is 40x32 px, but one of its masks is 20x10"):
        opened(tmp_path, GOOD, wrong(GOOD, segmentation=runs)).val.sample(0)
    runs = {"size": [32, 40], "counts": [0, 200]}
    with pytest.raises(DataError, match=r"val/10\.png has 1280 px, but the runs of one of its masks sum to 200"):
        opened(tmp_path, GOOD, wrong(GOOD, segmentation=runs)).val.sample(0)


def test_without_the_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = opened(tmp_path, GOOD)
    monkeypatch.setitem(__import__("sys").modules, "pycocotools", None)
    assert data.train.sample(0, masks=False).labels.tolist() == [0]  # boxes need none
    with pytest.raises(ImportError, match=r"COCO masks need pycocotools: pip install 'tokamix\[detect\]'"):
        data.train.sample(0)
