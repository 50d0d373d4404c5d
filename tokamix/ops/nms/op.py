"""Public function and operator registration of batched NMS."""

import math

import torch
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.nms import reference


def batched_nms(boxes: Tensor, valid: Tensor, iou_threshold: float, backend: str | None = None) -> Tensor:
    """Greedy non-maximum suppression within each of many lists of boxes, without synchronising with the device.

    Unlike torchvision's `batched_nms` it takes padded lists that are already sorted, and returns a mask: all shapes are
    static, so it compiles and needs no transfer to the host.

    Args:
        boxes: (..., N, 4) as (x1, y1, x2, y2), float32; each list of N is sorted by descending score.
        valid: (..., N), False for padding, which is neither kept nor suppresses other boxes.
        iou_threshold: a box is dropped if its IoU with a kept box of higher score is larger.
        backend: "eager", "triton" or None; see `tokamix.ops.dispatch`.

    Returns:
        (..., N) bool, True for the boxes that are kept.
    """
    if boxes.shape != (*valid.shape, 4):
        raise ValueError(f"batched_nms needs boxes (..., N, 4) and valid (..., N), got {boxes.shape} and {valid.shape}")
    kernel = dispatch.choose("batched_nms", boxes, backend=backend) == "triton"
    flat = math.prod(valid.shape[:-1]), valid.shape[-1]
    boxes, lists = boxes.detach().float().reshape(*flat, 4), valid.reshape(flat)
    if dispatch.is_exporting():
        return reference.exported_nms(boxes, lists, iou_threshold).view(valid.shape)
    return torch.ops.tokamix.batched_nms(boxes, lists, iou_threshold, kernel).view(valid.shape)


@torch.library.custom_op("tokamix::batched_nms", mutates_args=())
def _batched_nms(boxes: Tensor, valid: Tensor, iou_threshold: float, kernel: bool) -> Tensor:
    if kernel:
        from tokamix.ops.nms import kernels

        return kernels.batched_nms(boxes, valid, iou_threshold)
    return reference.batched_nms(boxes, valid, iou_threshold)


@_batched_nms.register_fake
def _(boxes: Tensor, valid: Tensor, iou_threshold: float, kernel: bool) -> Tensor:
    return torch.empty_like(valid, memory_format=torch.contiguous_format)
