"""COCO's average precision (AP) of detectors, computed by pycocotools."""

import contextlib
import io
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tokamix.data.annotated.datasets import AnnotatedDataset
from tokamix.data.annotated.rle import compress_masks
from tokamix.data.decode import DataError
from tokamix.evaluate.batches import group_by_size
from tokamix.inference import evaluation_mode

# indices into COCOeval.stats
STATS = {"ap": 0, "ap50": 1, "ap75": 2, "ap_small": 3, "ap_medium": 4, "ap_large": 5, "ar": 8}


class JoinedAnnotations:
    """Annotations of several splits as one data set, as far as `CocoAP` needs it; images are numbered anew.

    Args:
        parts: of one source, with the same classes.
    """

    def __init__(self, parts: Sequence[AnnotatedDataset]) -> None:
        self.parts = parts
        self.classes, self.category_ids = parts[0].classes, parts[0].category_ids
        self.has_masks = all(part.has_masks for part in parts)

    def has_objects(self) -> bool:
        """Whether any split has an annotation that counts."""
        return any(part.has_objects() for part in self.parts)

    def image_id(self, i: int) -> int:
        """The id of image i, counted over all splits."""
        return i

    def coco_dict(self) -> dict[str, Any]:
        """All annotations in COCO's format."""
        images: list[dict[str, Any]] = []
        annotations: list[dict[str, Any]] = []
        categories: dict[int, dict[str, Any]] = {}  # the validation file may list fewer
        for part in self.parts:
            content = part.coco_dict()
            categories |= {entry["id"]: entry for entry in content["categories"]}
            ids = {part.image_id(i): len(images) + i for i in range(len(part))}
            images += [entry | {"id": ids[entry["id"]]} for entry in content["images"]]
            for entry in content["annotations"]:
                annotations.append(entry | {"id": len(annotations) + 1, "image_id": ids[entry["image_id"]]})
        return {"images": images, "annotations": annotations, "categories": list(categories.values())}


@torch.no_grad()
def measure_ap(model: Any, loader: Any, dataset: AnnotatedDataset | JoinedAnnotations) -> dict[str, float]:
    """Compute COCO's average precisions in percent over all processes; of masks too if the model predicts them."""
    metric = CocoAP(dataset, masks=model.has_masks)
    with evaluation_mode(model):
        for images, targets in loader.epoch(0):
            for group in group_by_size(images, targets):
                sizes = [targets[i]["size"] for i in group]
                for i, detections in zip(group, model([images[i] for i in group], sizes=sizes), strict=True):
                    metric.update(targets[i]["index"], detections)
    return metric.compute(seen_only=True)  # images that could not be decoded do not count


def check_detection(dataset: AnnotatedDataset | JoinedAnnotations, masks: bool) -> None:
    """Raise if the AP of boxes, or of masks, cannot be computed for a data set; reads no images."""
    _import_tools()
    if not dataset.has_objects():
        raise DataError("there is nothing to detect: no image of the validation set has an annotation that counts")
    if masks and not dataset.has_masks:
        raise DataError(
            "mask AP needs annotations with outlines, but the validation set has boxes only; add outlines, or use"
            " retinanet"
        )


class _Detections(NamedTuple):
    """Detections in one image."""

    boxes: np.ndarray  # (n, 4) left, top, width, height
    labels: np.ndarray
    scores: np.ndarray
    masks: list[dict[str, Any]] | None  # compressed run lengths, which are small


class CocoAP:
    """Average precision of boxes and masks; every process returns the numbers of all images.

    Args:
        dataset: the images that `update` refers to by index.
        masks: measure masks too.
    """

    def __init__(self, dataset: AnnotatedDataset | JoinedAnnotations, masks: bool = False) -> None:
        check_detection(dataset, masks)
        self.dataset, self.masks = dataset, masks
        self.detections: dict[int, _Detections] = {}

    def update(self, index: int, detections: Mapping[str, Tensor]) -> None:
        """Add the detections in image `index`, in pixels of the original image.

        Args:
            index: of the image in the data set.
            detections: `boxes` (n, 4) left, top, right, bottom; `labels` (n,) from 0; `scores` (n,); `masks` (n, H, W).
        """
        boxes, labels, scores = (detections[name].detach().cpu().numpy() for name in ("boxes", "labels", "scores"))
        boxes = boxes.astype(np.float64).reshape(-1, 4)
        boxes[:, 2:] -= boxes[:, :2]
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(self.dataset.classes):
            raise ValueError(f"a label is {labels.max()}, but there are {len(self.dataset.classes)} classes, from 0")
        masks = None
        if self.masks:
            if "masks" not in detections:
                raise ValueError("mask AP was requested, but the detections have no masks")
            masks = compress_masks(detections["masks"])
        self.detections[index] = _Detections(boxes, labels, scores, masks)

    def compute(self, seen_only: bool = False) -> dict[str, float]:
        """Return `box_ap`, `box_ap50`, `box_ap75`, `box_ap_small`, `_medium`, `_large`, `box_ar`, and `mask_` likewise.

        All are in percent. The AP of a size class without annotations is left out.

        Args:
            seen_only: leave out images for which `update` was not called; otherwise they count as without detections.
        """
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return self._compute(self.detections, seen_only)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.detections)
        result: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                seen = {index: entry for part in parts for index, entry in part.items()}
                result = [self._compute(seen, seen_only)]
            except Exception as error:  # broadcast it: the other ranks would wait for ever
                result = [error]
        dist.broadcast_object_list(result)
        if isinstance(result[0], Exception):
            raise result[0]
        return result[0]

    def _results(self, detections: dict[int, _Detections], kind: str) -> list[dict[str, Any]]:
        """Convert detections to COCO's result format, of boxes ("bbox") or masks ("segm")."""
        rows = []
        for index in sorted(detections):
            boxes, labels, scores, masks = detections[index]
            for n in range(len(labels)):
                row = {"image_id": self.dataset.image_id(index), "category_id": self.dataset.category_ids[labels[n]]}
                row["score"] = float(scores[n])
                # results of masks have no box: pycocotools would take the area of the object from it
                rows.append(row | ({"bbox": boxes[n].tolist()} if kind == "bbox" else {"segmentation": masks[n]}))  # type: ignore[index]
        return rows

    def _compute(self, detections: dict[int, _Detections], seen_only: bool) -> dict[str, float]:
        coco_class, evaluation_class = _import_tools()
        result: dict[str, float] = {}
        with contextlib.redirect_stdout(io.StringIO()):
            ground_truth = coco_class()
            ground_truth.dataset = self.dataset.coco_dict()
            ground_truth.createIndex()
            self._check_sizes(detections, ground_truth.dataset["images"])
            for kind, name in (("bbox", "box"), ("segm", "mask"))[: 1 + self.masks]:
                results = _load_results(coco_class, ground_truth, self._results(detections, kind))
                evaluation = evaluation_class(ground_truth, results, kind)
                if seen_only:
                    evaluation.params.imgIds = sorted(map(self.dataset.image_id, detections))
                evaluation.evaluate()
                evaluation.accumulate()
                evaluation.summarize()
                stats = {f"{name}_{key}": float(evaluation.stats[i]) for key, i in STATS.items()}
                result |= {key: 100 * value for key, value in stats.items() if value > -1}
        if not result:
            raise DataError("no image that was evaluated has an annotation that counts")
        return result

    def _check_sizes(self, detections: dict[int, _Detections], images: list[dict[str, Any]]) -> None:
        """Raise if a mask has a different size than its image, which pycocotools would count as a miss."""
        sizes = {entry["id"]: [entry["height"], entry["width"]] for entry in images}
        for index, entry in detections.items():
            height, width = sizes[self.dataset.image_id(index)]
            for mask in entry.masks or ():
                if list(mask["size"]) != [height, width]:
                    wrong = f"{mask['size'][1]}x{mask['size'][0]}"
                    raise ValueError(f"image {index} is {width}x{height} px, but one of its masks {wrong}")


def _load_results(coco_class: Any, ground_truth: Any, results: list[dict[str, Any]]) -> Any:
    """Load results as pycocotools does; its own function fails on an empty list."""
    if results:
        return ground_truth.loadRes(results)
    empty = coco_class()
    empty.dataset = {**ground_truth.dataset, "annotations": []}
    empty.createIndex()
    return empty


def _import_tools() -> tuple[Any, Any]:
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError:
        raise ImportError("average precision needs pycocotools: pip install 'tokamix[detect]'") from None
    return COCO, COCOeval
