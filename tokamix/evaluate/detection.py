"""COCO's average precision, by the reference tools."""

import contextlib
import io
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from tokamix.data.annotated.coco import mask_tools
from tokamix.data.annotated.datasets import AnnotatedDataset
from tokamix.data.decode import DataError

# places in the tools' list of twelve numbers
NUMBERS = {"ap": 0, "ap50": 1, "ap75": 2, "ap_small": 3, "ap_medium": 4, "ap_large": 5, "ar": 8}


class _Found(NamedTuple):
    """What was detected in one image."""

    boxes: np.ndarray  # (n, 4) left, top, width, height
    labels: np.ndarray
    scores: np.ndarray
    masks: list[dict[str, Any]] | None  # compressed run lengths, which are small


def check_detection(dataset: AnnotatedDataset, masks: bool) -> None:
    """Raise where detections in a data set, or their masks, could not be measured; it takes no time."""
    _tools()
    if not dataset.has_things():
        raise DataError("there is nothing to find: no image of the validation set has an annotation that counts")
    if masks and not dataset.has_masks:
        raise DataError(
            "the average precision of masks needs annotations with outlines, and those of the validation set have none;"
            " add them, or use retinanet"
        )


class CocoAP:
    """Average precision of boxes and masks; each process has its share of the images, and all get the same numbers.

    Args:
        dataset: the scenes that `update` counts by their index.
        masks: whether masks are measured, too.
    """

    def __init__(self, dataset: AnnotatedDataset, masks: bool = False) -> None:
        check_detection(dataset, masks)
        self.dataset, self.masks = dataset, masks
        self.found: dict[int, _Found] = {}

    def update(self, index: int, detection: Mapping[str, Tensor]) -> None:
        """Add what was detected in scene `index`, in pixels of the original image.

        Args:
            index: of the scene in the data set.
            detection: `boxes` (n, 4) left, top, right, bottom; `labels` (n,) from 0; `scores` (n,); `masks` (n, H, W).
        """
        boxes, labels, scores = (detection[name].detach().cpu().numpy() for name in ("boxes", "labels", "scores"))
        boxes = boxes.astype(np.float64).reshape(-1, 4)
        boxes[:, 2:] -= boxes[:, :2]
        if len(labels) and not 0 <= labels.min() <= labels.max() < len(self.dataset.classes):
            raise ValueError(f"a label is {labels.max()}, but there are {len(self.dataset.classes)} classes, from 0")
        masks = None
        if self.masks:
            if "masks" not in detection:
                raise ValueError("masks are to be measured, but the detections have none")
            masks = encode(detection["masks"])
        self.found[index] = _Found(boxes, labels, scores, masks)

    def compute(self) -> dict[str, float]:
        """`box_ap`, `box_ap50`, `box_ap75`, `box_ap_small`, `_medium`, `_large`, `box_ar`, likewise `mask_`.

        All are in percent; what cannot be measured, since no thing has that size, is left out.
        """
        if not (dist.is_initialized() and dist.get_world_size() > 1):
            return self._computed(self.found)
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, self.found)
        answer: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                answer = [self._computed({index: found for part in parts for index, found in part.items()})]
            except Exception as error:  # or the others would wait for ever
                answer = [error]
        dist.broadcast_object_list(answer)
        if isinstance(answer[0], Exception):
            raise answer[0]
        return answer[0]

    def _results(self, found: dict[int, _Found], kind: str) -> list[dict[str, Any]]:
        """Detections in the form of COCO's result files, of boxes ("bbox") or masks ("segm")."""
        rows = []
        for index in sorted(found):
            boxes, labels, scores, masks = found[index]
            for n in range(len(labels)):
                row = {"image_id": self.dataset.image_id(index), "category_id": self.dataset.category_ids[labels[n]]}
                row["score"] = float(scores[n])
                # with a box in it, the tools would take the size of a thing from there
                rows.append(row | ({"bbox": boxes[n].tolist()} if kind == "bbox" else {"segmentation": masks[n]}))  # type: ignore[index]
        return rows

    def _computed(self, found: dict[int, _Found]) -> dict[str, float]:
        coco, evaluation = _tools()
        result: dict[str, float] = {}
        with contextlib.redirect_stdout(io.StringIO()):
            truth = coco()
            truth.dataset = self.dataset.coco_dict()
            truth.createIndex()
            self._check_sizes(found, truth.dataset["images"])
            for kind, name in (("bbox", "box"), ("segm", "mask"))[: 1 + self.masks]:
                run = evaluation(truth, _loaded(coco, truth, self._results(found, kind)), kind)
                run.evaluate()
                run.accumulate()
                run.summarize()
                measured = {f"{name}_{key}": float(run.stats[place]) for key, place in NUMBERS.items()}
                result |= {key: 100 * value for key, value in measured.items() if value > -1}
        return result

    def _check_sizes(self, found: dict[int, _Found], images: list[dict[str, Any]]) -> None:
        """Raise where a mask has another size than its image, which the tools would count as a miss."""
        sizes = {entry["id"]: [entry["height"], entry["width"]] for entry in images}
        for index, detected in found.items():
            height, width = sizes[self.dataset.image_id(index)]
            for mask in detected.masks or ():
                if list(mask["size"]) != [height, width]:
                    wrong = f"{mask['size'][1]}x{mask['size'][0]}"
                    raise ValueError(f"scene {index} is {width}x{height} px, but a mask of it {wrong}")


def _loaded(coco: Any, truth: Any, results: list[dict[str, Any]]) -> Any:
    """Results as the tools want them; they cannot load none at all."""
    if results:
        return truth.loadRes(results)
    empty = coco()
    empty.dataset = {**truth.dataset, "annotations": []}
    empty.createIndex()
    return empty


def encode(masks: Tensor) -> list[dict[str, Any]]:
    """Masks (n, H, W) as compressed run lengths."""
    if not len(masks):
        return []
    columns = masks.to(torch.uint8).transpose(1, 2).contiguous().cpu().numpy()  # the tools go column by column
    return mask_tools().encode(columns.transpose(2, 1, 0))


def _tools() -> tuple[Any, Any]:
    try:
        from pycocotools.coco import COCO
        from pycocotools.cocoeval import COCOeval
    except ImportError:
        raise ImportError("average precision needs pycocotools: pip install 'tokamix[detect]'") from None
    return COCO, COCOeval
