"""The check after writing: an exported file must give what PyTorch gives, at every size and batch that it takes."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tokamix.export.graph import Graph, Size
from tokamix.runtimes import first_reason, load_exported

# relative RMSE of an output against float32 in PyTorch; int8 is judged by its accuracy on labelled images
TOLERANCE = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 5e-2, "int8": 1.0}
SAME_IOU, SAME_SCORE, SAME_DETECTIONS = 0.95, 1e-2, 0.98  # two detections are one; the fraction that must be found


class Difference(NamedTuple):
    """One comparison of a file with PyTorch."""

    size: Size
    batch: int
    error: float  # the largest relative RMSE of an output; of a detector, the fraction of detections that differ
    detections: int | None = None  # of a detector in PyTorch: if there are none, nothing was compared


def check_file(path: Path, exact: Graph, cases: Sequence[tuple[Size, int]], precision: str) -> list[Difference]:
    """Run a file in its runtime on random images and compare it with the graph in float32.

    Raises ValueError if it differs, or cannot take a size or batch that it claims.

    Args:
        path: of the file.
        exact: the graph in float32.
        cases: sizes and batches to try.
        precision: of the file.
    """
    model = load_exported(path)
    generator = torch.random.fork_rng()
    with generator, torch.no_grad():
        torch.manual_seed(0)
        differences = []
        for size, batch in cases:
            label = f"{batch} image{'s'[: batch > 1]} of {size[0]}x{size[1]}"
            images = draw_images(exact, size, batch)
            expected = exact(images)
            if any(not torch.isfinite(value).all() for value in expected if value.is_floating_point()):
                raise ValueError(f"not written: in PyTorch, the model itself gives NaN or infinite values for {label}")
            try:
                actual = [torch.as_tensor(value).cpu() for value in model.run(images)]
            except Exception as error:  # whatever the runtime raises, the file is not good
                raise ValueError(
                    f"not written: the exported file claims to take {label}, but fails: {first_reason(error)}"
                ) from None
            difference = compare_outputs(expected, actual, exact.task)
            limit = largest_difference(exact.task, precision)
            if not difference <= limit:
                raise ValueError(
                    f"not written: the exported file differs from PyTorch for {label}, by {difference:.1e} (relative),"
                    f" over the limit of {limit:.0e} for {precision}"
                )
            found = int((expected[2] > 0).sum()) if exact.task == "detect" else None
            differences.append(Difference(size, batch, difference, found))
    return differences


def draw_images(graph: Graph, size: Size, batch: int) -> Tensor:
    """Random images; for a detector, such in which it finds something, if there are any."""
    noise = graph.example(size, batch)
    if graph.task != "detect":
        return noise
    for grain in (1, 8, 32):  # px; detectors that see no object in noise may see some in blobs
        coarse = tuple(max(1, side // grain) for side in size)
        blobs = F.interpolate(torch.randn(batch, graph.in_chans, *coarse), size, mode="bilinear")
        images = (64 * blobs + 128).clamp(0, 255).byte().permute(0, 2, 3, 1) if graph.preprocessing else 2 * blobs
        images = noise if grain == 1 else images.contiguous()
        if (graph(images)[2] > 0).any():
            return images
    return noise


def largest_difference(task: str, precision: str) -> float:
    """The difference from float32 in PyTorch that is allowed."""
    return 1 - SAME_DETECTIONS if task == "detect" else TOLERANCE[precision]


def compare_outputs(expected: Sequence[Tensor], actual: Sequence[Tensor], task: str) -> float:
    """The largest relative RMSE of an output; of a detector, the fraction of detections that differ."""
    if len(expected) != len(actual):
        return float("inf")
    if task == "detect":  # PyTorch leaves out the padding of its lists, so the shapes differ
        return _detections_differ(expected, actual)
    if any(a.shape != e.shape for a, e in zip(actual, expected, strict=True)):
        return float("inf")
    # integers are classes, which follow from the logits
    pairs = [(a, e) for a, e in zip(actual, expected, strict=True) if e.is_floating_point()]
    errors = [_relative_rmse(a.double(), e.double()) for a, e in pairs]
    return next((error for error in errors if math.isnan(error)), max(errors))


def _relative_rmse(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-12))


def _detections_differ(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> float:
    """The fraction of detections without a counterpart, apart from those whose scores are almost the lowest.

    Sorted by nearly equal scores, two lists may differ in order, and in what their end cuts off.
    """
    from torchvision.ops import box_iou

    missing = total = 0
    for first, second in ((expected, actual), (actual, expected)):
        for boxes, labels, scores, others, other_labels, other_scores in zip(*first[:3], *second[:3], strict=True):
            lowest = scores[scores > 0].min() + 0.01 * scores.max() if (scores > 0).any() else scores.new_tensor(1.0)
            sure = scores > lowest
            same = box_iou(boxes[sure], others) > SAME_IOU
            same &= labels[sure, None] == other_labels
            same &= (scores[sure, None] - other_scores).abs() < SAME_SCORE
            total += int(sure.sum())
            missing += int((~same.any(1)).sum())
    return missing / max(total, 1)
