"""COCO's average precision, compared with pycocotools called directly on COCO's format."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pycocotools import mask as tools
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from tests.data.annotated.files import CATEGORIES, annotation, content, write_coco
from tests.train.tiny_dense import run, tiny_scenes
from tokamix.data import AnnotatedImage, DataError, create_dataset
from tokamix.data.annotated.loader import create_eval_loader
from tokamix.evaluate import CocoAP, check_detection, measure_ap
from tokamix.evaluate.detection import JoinedAnnotations
from tokamix.evaluate.run import ChainedLoader
from tokamix.inference import InferenceConfig

NAMES = ("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large")
SIZE = (200, 260)


def write_dataset(root: Path, images: int = 12) -> dict:
    """Write a data set with objects of all sizes, crowds, images without objects, and ids with gaps."""
    draw = np.random.default_rng(0)
    annotations = []
    for i in range(images - 2):
        for _ in range(draw.integers(1, 6)):
            width, height = draw.uniform(3, 8) * 2 ** draw.uniform(0, 4.2, 2)
            left, top = draw.uniform(0, SIZE[1] - width), draw.uniform(0, SIZE[0] - height)
            box = [round(float(v), 2) for v in (left, top, width, height)]
            category = int(draw.choice([3, 7, 90]))
            annotations.append(annotation(100 + 7 * len(annotations), 10 + i, box, category))
    annotations += [annotation(3000 + i, 10 + i, [20.0 + i, 30, 150, 120 + i], 7) for i in range(3)]
    drawn = np.zeros(SIZE, dtype=np.uint8, order="F")
    drawn[20:150, 30:220] = 1
    runs = tools.encode(drawn)
    runs = {"size": runs["size"], "counts": runs["counts"].decode()}
    annotations.append(annotation(5000, 10, [30, 20, 190, 130], 3, segmentation=runs, iscrowd=1))
    coco = content(images, annotations)
    for entry in coco["images"]:
        entry |= {"height": SIZE[0], "width": SIZE[1]}
    for part in ("train", "val"):
        write_coco(root, part, coco)
    return coco


def detections(sample: AnnotatedImage, seed: int) -> dict[str, torch.Tensor]:
    """The ground truth, shifted; some objects are missed, some doubled, some have a wrong class."""
    draw = torch.Generator().manual_seed(seed)
    boxes, labels, masks = sample.boxes.repeat(2, 1), sample.labels.repeat(2), sample.masks.repeat(2, 1, 1)
    keep = torch.rand(len(labels), generator=draw) < 0.6
    boxes, labels, masks = boxes[keep], labels[keep].clone(), masks[keep]
    sides = (boxes[:, 2:] - boxes[:, :2]).repeat(1, 2)
    boxes = boxes + sides * torch.randn(boxes.shape, generator=draw) * 0.07
    moved = [mask.roll(tuple(torch.randint(-2, 3, (2,), generator=draw).tolist()), (0, 1)) for mask in masks]
    other = torch.rand(len(labels), generator=draw) < 0.2
    labels[other] = (labels[other] + 1) % 3
    false = {"boxes": torch.tensor([[40.0, 30, 90, 80]]), "labels": torch.tensor([0])}
    false["masks"] = torch.zeros(1, *sample.size)
    false["masks"][0, 30:80, 40:90] = 1  # ignored inside the crowd of the first image
    return {
        "boxes": torch.cat([boxes, false["boxes"]]),
        "labels": torch.cat([labels, false["labels"]]),
        "scores": torch.rand(len(labels) + 1, generator=draw),
        "masks": torch.cat([torch.stack(moved), false["masks"].bool()]) if moved else false["masks"].bool(),
    }


def by_pycocotools(
    ground_truth: dict, predicted: dict[int, dict[str, torch.Tensor]], ids: list[int], masks: bool
) -> dict[str, float]:
    """Metrics by pycocotools from COCO's formats of annotations and results."""
    coco = COCO()
    coco.dataset = json.loads(json.dumps(ground_truth))
    coco.createIndex()
    categories = [entry["id"] for entry in ground_truth["categories"]]
    answer = {}
    for kind, name in (("bbox", "box"), ("segm", "mask"))[: 1 + masks]:
        results = []
        for index, detection in predicted.items():
            for n, (left, top, right, bottom) in enumerate(detection["boxes"].double().tolist()):
                row = {"image_id": ids[index], "category_id": categories[detection["labels"][n]]}
                row["score"] = detection["scores"][n].item()
                if kind == "bbox":
                    row["bbox"] = [left, top, right - left, bottom - top]
                else:
                    row["segmentation"] = tools.encode(np.asfortranarray(detection["masks"][n].byte().numpy()))
                results.append(row)
        run = COCOeval(coco, coco.loadRes(results), kind)
        run.evaluate()
        run.accumulate()
        run.summarize()
        answer |= {f"{name}_{key}": 100 * value for key, value in zip(NAMES, run.stats, strict=False) if value > -1}
        answer |= {f"{name}_ar": 100 * run.stats[8]}
    return answer


@pytest.mark.parametrize("folder", [None, *filter(None, [os.environ.get("TOKAMIX_COCO")])])
def test_agrees_with_pycocotools(tmp_path: Path, capsys: pytest.CaptureFixture, folder: str | None) -> None:
    """On generated annotations, and on COCO's own if TOKAMIX_COCO names their folder."""
    write_dataset(tmp_path)
    dataset: Any = create_dataset(folder or str(tmp_path), "detect").val
    ground_truth = json.loads(dataset.file.path.read_text())
    predicted = {i: detections(dataset.sample(i), i) for i in range(len(dataset))}
    expected = by_pycocotools(ground_truth, predicted, [dataset.image_id(i) for i in range(len(dataset))], masks=True)
    capsys.readouterr()
    metric = CocoAP(dataset, masks=True)
    for index in reversed(predicted):  # in any order
        metric.update(index, predicted[index])
    result = metric.compute()
    assert result == pytest.approx(expected, abs=1e-9)
    assert set(result) == {f"{kind}_{name}" for kind in ("box", "mask") for name in (*NAMES, "ar")}
    assert 10 < result["box_ap"] < 60
    assert 10 < result["mask_ap"] < 60
    with capsys.disabled():
        print(f"\n{len(predicted)} images of {folder}: {result}" if folder else "", end="")
    boxes = CocoAP(dataset)
    for index in predicted:
        boxes.update(index, {k: v for k, v in predicted[index].items() if k != "masks"})
    assert boxes.compute() == {key: value for key, value in result.items() if key.startswith("box")}
    assert capsys.readouterr().out == ""


def test_detections_in_crowds_are_ignored(tmp_path: Path) -> None:
    """A detection inside a crowd of its class does not count."""
    ground_truth = write_dataset(tmp_path)
    dataset = create_dataset(str(tmp_path), "detect").val
    perfect = {}
    for i in range(len(dataset)):
        sample = dataset.sample(i)
        objects = ~sample.crowd
        perfect[i] = {"boxes": sample.boxes[objects], "labels": sample.labels[objects], "masks": sample.masks[objects]}
        perfect[i]["scores"] = torch.full((int(objects.sum()),), 0.5)
    metric = CocoAP(dataset, masks=True)
    for i, detection in perfect.items():
        metric.update(i, detection)
    assert metric.compute()["box_ap"] == metric.compute()["mask_ap"] == 100
    inside = {"boxes": torch.tensor([[60.0, 60, 70, 70]]), "labels": torch.tensor([0]), "scores": torch.tensor([0.9])}
    inside["masks"] = torch.zeros(1, *SIZE, dtype=torch.bool)
    inside["masks"][0, 60:70, 60:70] = True
    assert ground_truth["annotations"][-1]["iscrowd"]
    metric.update(0, {k: torch.cat([v, inside[k]]) for k, v in perfect[0].items()})
    assert metric.compute()["box_ap"] == metric.compute()["mask_ap"] == 100
    metric.update(1, {k: torch.cat([v, inside[k]]) for k, v in perfect[1].items()})  # an image without a crowd
    assert metric.compute()["box_ap"] < 100


def test_no_detections(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    dataset = create_dataset(str(tmp_path), "detect").val
    nothing = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0).long(), "scores": torch.zeros(0)}
    nothing["masks"] = torch.zeros(0, *SIZE, dtype=torch.bool)
    metric = CocoAP(dataset, masks=True)
    zeros = {f"{kind}_{name}": 0.0 for kind in ("box", "mask") for name in (*NAMES, "ar")}
    assert metric.compute() == zeros
    metric.update(0, nothing)
    assert metric.compute() == zeros
    assert metric._results(metric.detections, "bbox") == []


def test_missing_size_classes(tmp_path: Path) -> None:
    for part in ("train", "val"):
        write_coco(tmp_path, part, content(1, [annotation(1, 10, [3, 4, 1, 1])]))  # one pixel
    dataset = create_dataset(str(tmp_path), "detect").val
    metric = CocoAP(dataset, masks=True)
    sample = dataset.sample(0)
    metric.update(0, {"boxes": sample.boxes, "labels": sample.labels, "scores": torch.ones(1), "masks": sample.masks})
    small = {f"{kind}_{name}": 100.0 for kind in ("box", "mask") for name in ("ap", "ap50", "ap75", "ap_small", "ar")}
    assert metric.compute() == pytest.approx(small)


def test_annotation_id_0(tmp_path: Path) -> None:
    """pycocotools treats its match as none, so it gets another id."""
    for part in ("train", "val"):
        write_coco(tmp_path, part, content(1, [annotation(0, 10, [3, 4, 10, 10])]))
    dataset = create_dataset(str(tmp_path), "detect").val
    metric = CocoAP(dataset)
    metric.update(0, {"boxes": dataset.sample(0).boxes, "labels": torch.tensor([0]), "scores": torch.ones(1)})
    assert metric.compute()["box_ap"] == pytest.approx(100)


CORNERS = annotation(1, 10, [3, 4, 10, 8])["segmentation"][0]
ODD = {
    "a single point first": {"segmentation": [[1, 2, 3, 4], CORNERS]},
    "a single point last": {"segmentation": [CORNERS, [1, 2, 3, 4]]},
    "half a corner": {"segmentation": [[*CORNERS, 5]]},
    "no area": {"area": None},
    "no crowd": {"iscrowd": None},
    "another without a size": {"id": 2, "bbox": [3, 4, 0, 0]},
    "another outside": {"id": 2, "bbox": [50, 4, 5, 5]},
    "another without an outline": {"id": 2, "segmentation": []},
    "another with an invalid outline": {"id": 2, "segmentation": 5},
    "text": {"image_id": "x1"},
    "all text": {"image_id": "x1", "category_id": "cat"},
}


@pytest.mark.parametrize("kind", ODD)
def test_unusual_annotations(tmp_path: Path, kind: str) -> None:
    """Invalid annotations are left out; the others count."""
    changed = annotation(1, 10, [3, 4, 10, 8]) | ODD[kind]
    coco = content(1, [changed] if changed["id"] == 1 else [annotation(1, 10, [3, 4, 10, 8]), changed])
    if "image_id" in ODD[kind]:
        coco["images"][0] |= {"id": "x1", "file_name": "10.png"}
    if "category_id" in ODD[kind]:
        coco["categories"] = [{"id": "cat", "name": "cat"}, {"id": "dog", "name": "dog"}]
    for part in ("train", "val"):
        write_coco(tmp_path, part, coco | {"images": [{**coco["images"][0], "id": 10}]}).write_text(json.dumps(coco))
    dataset = create_dataset(str(tmp_path), "detect").val
    sample = dataset.sample(0)
    assert sample.boxes.tolist() == [[3, 4, 13, 12]]
    metric = CocoAP(dataset, masks=True)
    metric.update(0, {"boxes": sample.boxes, "labels": sample.labels, "masks": sample.masks, "scores": torch.ones(1)})
    assert metric.compute()["box_ap"] == metric.compute()["mask_ap"] == pytest.approx(100)


def test_generated_images() -> None:
    dataset = create_dataset("shapes:48", "detect").val
    metric = CocoAP(dataset, masks=True)
    for i in range(len(dataset)):
        sample = dataset.sample(i)
        predicted = {"boxes": sample.boxes, "labels": sample.labels, "masks": sample.masks}
        metric.update(i, {**predicted, "scores": torch.ones(len(sample.labels))})
    assert metric.compute()["box_ap"] == metric.compute()["mask_ap"] == pytest.approx(100)


def test_result_files(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    dataset = create_dataset(str(tmp_path), "detect").val
    metric = CocoAP(dataset, masks=True)
    predicted = {"boxes": torch.tensor([[1.0, 2, 11, 22]]), "labels": torch.tensor([2]), "scores": torch.tensor([0.25])}
    metric.update(3, predicted | {"masks": torch.ones(1, *SIZE)})
    (row,) = metric._results(metric.detections, "bbox")
    assert row == {"image_id": 13, "category_id": 90, "score": 0.25, "bbox": [1.0, 2.0, 10.0, 20.0]}
    (row,) = metric._results(metric.detections, "segm")
    assert tools.decode(row["segmentation"]).all()
    assert tools.decode(row["segmentation"]).shape == SIZE
    held = sum(len(mask["counts"]) for mask in metric.detections[3].masks)
    assert held < 20  # not 52,000 pixels


def test_data_that_cannot_be_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ("train", "val"):
        annotations = [annotation(1, 10, [3, 4, 10, 8], iscrowd=int(part == "val"))]
        write_coco(tmp_path, part, content(1, annotations))
    with pytest.raises(DataError, match="there is nothing to detect: no image of the validation set has an annotation"):
        check_detection(create_dataset(str(tmp_path), "detect").val, masks=False)
    metric = CocoAP(create_dataset(str(tmp_path), "detect").train)
    one = {"boxes": torch.zeros(1, 4), "labels": torch.tensor([3]), "scores": torch.ones(1)}
    with pytest.raises(ValueError, match="a label is 3, but there are 3 classes, from 0"):
        metric.update(0, one)
    with pytest.raises(ValueError, match="mask AP was requested, but the detections have no masks"):
        CocoAP(create_dataset(str(tmp_path), "detect").train, masks=True).update(
            0, {**one, "labels": torch.tensor([0])}
        )
    annotations = [{k: v for k, v in annotation(1, 10, [3, 4, 10, 8]).items() if k != "segmentation"}]
    for part in ("train", "val"):
        write_coco(tmp_path, part, content(1, annotations, categories=CATEGORIES))
    with pytest.raises(
        DataError, match="mask AP needs annotations with outlines, but the validation set has boxes only"
    ):
        CocoAP(create_dataset(str(tmp_path), "detect").val, masks=True)
    check_detection(create_dataset(str(tmp_path), "detect").val, masks=False)
    write_coco(tmp_path, "val", content(1, []))
    for masks in (True, False):
        with pytest.raises(DataError, match="there is nothing to detect"):
            CocoAP(create_dataset(str(tmp_path), "detect").val, masks)
    monkeypatch.setitem(sys.modules, "pycocotools.coco", None)
    with pytest.raises(ImportError, match=r"average precision needs pycocotools: pip install 'tokamix\[detect\]'"):
        CocoAP(create_dataset("shapes", "detect").val)


def test_training_is_refused_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at its first evaluation."""
    good = annotation(1, 10, [3, 4, 10, 8])
    bare = {key: value for key, value in good.items() if key != "segmentation"}

    def refused(annotations: list[dict], message: str, **settings: Any) -> None:
        write_coco(tmp_path, "train", content(1, [good]))
        write_coco(tmp_path, "val", content(1, annotations))
        with pytest.raises((DataError, ImportError), match=message):
            run("detect", tmp_path / "run", create_dataset(str(tmp_path), "detect"), batch_size=1, **settings)
        assert not (tmp_path / "run/metrics.jsonl").exists()

    refused([], "there is nothing to detect: no image of the validation set has an annotation that counts")
    masks = {"method": "mask_rcnn", "method_kwargs": {"width": 16, "rois_per_image": 16}}
    refused([bare], "mask AP needs annotations with outlines, but the validation set has boxes only", **masks)
    monkeypatch.setitem(sys.modules, "pycocotools.coco", None)
    refused([good], "average precision needs pycocotools")


def test_masks_of_a_different_size(tmp_path: Path) -> None:
    write_dataset(tmp_path)
    dataset = create_dataset(str(tmp_path), "detect").val
    metric = CocoAP(dataset, masks=True)
    predicted = detections(dataset.sample(0), 0)
    metric.update(0, {**predicted, "masks": predicted["masks"][:, :100]})
    with pytest.raises(ValueError, match=r"image 0 is 260x200 px, but one of its masks 260x100"):
        metric.compute()


class GroundTruth(torch.nn.Module):
    """A detector that returns the annotations of the samples, in their order."""

    has_masks = True

    def __init__(self, parts: list[Any]) -> None:
        super().__init__()
        self.samples = (part.sample(i) for part in parts for i in range(len(part)))

    def forward(self, images: list[torch.Tensor], sizes: list[tuple[int, int]]) -> list[dict[str, torch.Tensor]]:
        samples = [next(self.samples) for _ in images]
        fields = ("boxes", "labels", "masks")
        return [{k: getattr(s, k) for k in fields} | {"scores": torch.ones(len(s.labels))} for s in samples]


class Parts(list):
    """Samples as a data set."""

    sample = list.__getitem__


def test_splits_are_joined() -> None:
    """Images of both splits are matched with their own annotations, although their ids are the same."""
    data = tiny_scenes("detect", train=3, val=2)
    parts = [data.train, data.val]
    config = InferenceConfig(task="detect", class_names=data.classes)
    loaders = [create_eval_loader(part, config, batch_size=1) for part in parts]
    loader = ChainedLoader(loaders, torch.device("cpu"))
    result = measure_ap(GroundTruth(parts), loader, JoinedAnnotations(parts))
    assert result["box_ap"] == result["mask_ap"] == pytest.approx(100)
    assert len(JoinedAnnotations(parts).coco_dict()["images"]) == 5


def test_joined_splits_have_the_categories_of_all(tmp_path: Path) -> None:
    """Objects of a category that only the training file lists count, too."""
    training = [annotation(1, 10, [3, 4, 10, 8], 7), annotation(2, 11, [3, 4, 10, 8], 3)]
    write_coco(tmp_path, "train", content(2, training))
    write_coco(tmp_path, "val", content(1, [annotation(1, 10, [3, 4, 10, 8], 3)], categories=CATEGORIES[:1]))
    data = create_dataset(str(tmp_path), "detect")
    joined = JoinedAnnotations([data.train, data.val])
    assert [entry["id"] for entry in joined.coco_dict()["categories"]] == [3, 7, 90]
    metric = CocoAP(joined)
    samples = [data.train.sample(0), data.train.sample(1), data.val.sample(0)]
    for i, sample in enumerate(samples):
        metric.update(
            i, {"boxes": sample.boxes, "labels": torch.zeros(1).long(), "scores": torch.tensor([1.0 - i / 9])}
        )
    assert metric.compute()["box_ar"] == pytest.approx(50)  # no dog is found


def test_skipped_images_do_not_count(tmp_path: Path) -> None:
    """Objects in an image that cannot be decoded are not missed; mIoU and accuracy leave such images out, too."""
    for part in ("train", "val"):
        write_coco(tmp_path, part, content(3, [annotation(i, 9 + i, [3, 4, 10, 8]) for i in (1, 2)]))
    data = create_dataset(str(tmp_path), "detect").val
    Path(data.name_of(1)).write_bytes(b"")
    config = InferenceConfig(task="detect", class_names=data.classes)
    loader = create_eval_loader(data, config, batch_size=1, corrupt="skip")
    kept = Parts([data.sample(0), data.sample(2)])
    result = measure_ap(GroundTruth([kept]), loader, data)
    assert list(loader.skipped) == [data.name_of(1)]
    assert [result[name] for name in ("box_ap", "box_ar", "mask_ap")] == pytest.approx([100] * 3)
    Path(data.name_of(0)).write_bytes(b"")
    with pytest.raises(DataError, match="no image that was evaluated has an annotation that counts"):
        measure_ap(GroundTruth([Parts([kept.sample(1)])]), loader, data)
    Path(data.name_of(2)).write_bytes(b"")
    with pytest.raises(DataError, match="no image that was evaluated has an annotation that counts"):
        measure_ap(GroundTruth([]), loader, data)
