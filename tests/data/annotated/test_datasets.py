"""Annotated images, where they come from by name, and the generated ones."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from pycocotools import mask as tools

from tests.data.annotated.files import annotation, blocks, content, write_coco, write_pair
from tokamix.data import DataError, create_dataset
from tokamix.data.annotated.datasets import AnnotatedImage, semantic_mask
from tokamix.data.annotated.rle import encode_rle
from tokamix.data.shapes import CLASSES, AnnotatedShapes, Shapes
from tokamix.data.splits import split_indices
from tokamix.tasks import IGNORE_INDEX


def test_shapes_for_both_tasks() -> None:
    detect, segment = (create_dataset("shapes", task) for task in ("detect", "segment"))
    assert (len(detect.train), len(detect.val), detect.num_classes) == (512, 128, 8)
    assert detect.classes == CLASSES
    assert segment.classes == ("background", *CLASSES)
    counts = []
    for i in range(24):
        sample = detect.train.sample(i)
        assert sample.image.shape == (3, 128, 128)
        assert sample.image.dtype == sample.segmentation.dtype == torch.uint8
        assert sample.masks.shape == (len(sample.labels), 128, 128)
        assert not sample.crowd.any()
        assert torch.equal(sample.image, segment.train.sample(i).image)
        assert torch.equal(sample.segmentation, (sample.masks * (1 + sample.labels)[:, None, None]).sum(0).byte())
        counts.append(int((sample.masks.sum((1, 2)) > 380).sum()))  # no small circle has more
    assert set(counts) == {1, 2, 3}  # large objects
    assert create_dataset("shapes:64", "detect").val.sample(0).size == (64, 64)
    assert not torch.equal(detect.val.sample(0).image, detect.train.sample(0).image)
    assert not torch.equal(detect.val.sample(0).image, create_dataset("shapes", "detect", seed=1).val.sample(0).image)


def test_further_large_shapes_change_nothing_else() -> None:
    plain, more = (Shapes(64, 64, 0, "train", large) for large in (1, 3))
    for i in range(32):
        before, after = plain.sample(i), more.sample(i)
        same = (before.image == after.image).all(0)
        added = after.masks[-1:].any(0) ^ before.masks[-1:].any(0)
        assert not added.any()  # the first large one is in front
        assert len(after.labels) >= len(before.labels) - 2
        assert same[before.masks[-1]].all()
        new = [mask for mask in after.masks[:-1] if mask.sum() > 60]
        assert same[~torch.stack([*new, torch.zeros(64, 64, dtype=torch.bool)]).any(0)].all()


def test_classification_of_shapes_is_as_ever() -> None:
    """The numbers are those of the version before samples had a type of their own."""
    sample = create_dataset("shapes:48").train.sample(7)
    assert sample.image.long().sum().item() == 942942
    assert sample.boxes.tolist() == [[23.0, 4.0, 29.0, 11.0], [5.0, 1.0, 29.0, 23.0]]
    assert sample.label == sample.labels[-1] == 2


def test_run_lengths_agree_with_pycocotools() -> None:
    draw = torch.Generator().manual_seed(0)
    masks = [torch.rand(h, w, generator=draw) > 0.5 for h, w in ((1, 1), (1, 9), (9, 1), (7, 5))]
    masks += [torch.zeros(4, 6, dtype=torch.bool), torch.ones(4, 6, dtype=torch.bool)]
    for mask in masks:
        assert sum(encode_rle(mask)["counts"]) == mask.numel()
        assert np.array_equal(tools.decode(tools.frPyObjects(encode_rle(mask), *mask.shape)), mask.numpy())


def test_coco_form_of_shapes() -> None:
    dataset = AnnotatedShapes(Shapes(20, 64, large=3), "detect")
    coco = dataset.coco_dict()
    assert [entry["id"] for entry in coco["categories"]] == list(range(1, 9))
    assert len(coco["images"]) == 20
    assert [entry["id"] for entry in coco["annotations"]] == list(range(1, 1 + len(coco["annotations"])))
    sample = dataset.sample(5)
    mine = [entry for entry in coco["annotations"] if entry["image_id"] == 5]
    assert [entry["category_id"] - 1 for entry in mine] == sample.labels.tolist()
    assert [entry["area"] for entry in mine] == sample.masks.sum((1, 2)).tolist()
    left, top, width, height = mine[0]["bbox"]
    assert [left, top, left + width, top + height] == sample.boxes[0].tolist()


def test_semantic_mask_of_overlapping_objects() -> None:
    masks = torch.zeros(3, 6, 6, dtype=torch.bool)
    masks[0, 2:4, 2:4] = True
    masks[1, :, :5] = True
    masks[2] = True
    none, image = torch.zeros(3, 4), torch.zeros(3, 6, 6)
    sample = AnnotatedImage(image, none, torch.tensor([4, 0, 7]), masks, torch.tensor([0, 0, 1]).bool(), None, 0, "x")
    drawn = semantic_mask(sample)
    assert drawn[2:4, 2:4].unique().tolist() == [5]  # the small one is in front
    assert drawn[0].tolist() == [1] * 5 + [IGNORE_INDEX]  # and the crowd behind all
    with pytest.raises(DataError, match="x has boxes, but no masks for segmentation"):
        semantic_mask(replace(sample, masks=None))
    assert sample.label == 7
    with pytest.raises(ValueError, match="x has no objects"):
        _ = replace(sample, labels=torch.zeros(0)).label


def test_split_indices() -> None:
    here = Path("here")
    train, val = split_indices(50, here)
    assert len(val) == 10
    assert sorted(train + val) == list(range(50))
    assert (train, val) == split_indices(50, here)
    with pytest.raises(DataError, match="here has only one image; two are needed to hold one out"):
        split_indices(1, here)
    assert [len(part) for part in split_indices(2, here)] == [1, 1]


def test_paths_are_looked_into(tmp_path: Path) -> None:
    for part in ("train", "val"):
        write_coco(tmp_path / "coco", part, content(2, [annotation(1, 10, [3, 4, 10, 8])]))
        write_pair(tmp_path / "masks/images" / part, tmp_path / "masks/annotations" / part, "a", blocks(0, 1))
    (tmp_path / "masks/classes.txt").write_text("ground\ntree\n")
    assert create_dataset(str(tmp_path / "coco"), "detect").classes == ("cat", "dog", "owl")
    assert create_dataset(str(tmp_path / "coco"), "segment").classes == ("background", "cat", "dog", "owl")
    assert create_dataset(str(tmp_path / "masks"), "segment").classes == ("ground", "tree")
    with pytest.raises(DataError, match="has semantic masks, but no objects to detect"):
        create_dataset(str(tmp_path / "masks"), "detect")
    with pytest.raises(DataError, match="has no COCO annotations"):
        create_dataset(str(tmp_path / "masks/images"), "detect")


def test_unknown_sources() -> None:
    with pytest.raises(DataError, match=r"there is no data set 'shape' with annotations; did you mean shapes"):
        create_dataset("shape", "detect")
    with pytest.raises(DataError, match=r"possible are shapes, coco:PATH, masks:PATH, a folder, a \.json file"):
        create_dataset("/nowhere/at/all", "detect")
    with pytest.raises(DataError, match="shapes:8 has no valid size; use a side of at least 16 px, such as shapes:128"):
        create_dataset("shapes:8", "detect")
    with pytest.raises(ValueError, match="the task is 'sort', but must be classify, segment or detect"):
        create_dataset("shapes", "sort")


def test_options(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"has no option 'nil'; possible are empty"):
        create_dataset(f"coco:{tmp_path}?nil=1", "detect")
    with pytest.raises(DataError, match=r"empty is 'maybe', but must be drop or keep"):
        create_dataset(f"coco:{tmp_path}?empty=maybe", "detect")


def test_too_many_classes(tmp_path: Path) -> None:
    for part in ("train", "val"):
        write_pair(tmp_path / "images" / part, tmp_path / "masks" / part, "a", blocks(0, 1))
    (tmp_path / "classes.txt").write_text("\n".join(map(str, range(256))))
    with pytest.raises(DataError, match="has 256 classes; masks of 8 bits have room for 255"):
        create_dataset(str(tmp_path), "segment")
