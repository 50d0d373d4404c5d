"""The public suppression of boxes and its registration."""

import math

import torch
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.nms import reference


def suppress(boxes: Tensor, valid: Tensor, overlap: float, backend: str | None = None) -> Tensor:
    """Greedy non-maximum suppression within each of many lists, without waiting for the device.

    Args:
        boxes: (..., N, 4) as left, top, right, bottom, float32; each list of N best first.
        valid: (..., N), which of them count; the others are neither kept nor hide anything.
        overlap: a box is hidden if its IoU with a better one that is kept is larger.
        backend: "eager", "triton" or None; see `tokamix.ops.dispatch`.

    Returns:
        (..., N), which boxes are kept.
    """
    if boxes.shape != (*valid.shape, 4):
        raise ValueError(f"suppress needs boxes (..., N, 4) and valid (..., N), got {boxes.shape} and {valid.shape}")
    kernel = dispatch.choose("suppress", boxes, backend=backend) == "triton"
    flat = math.prod(valid.shape[:-1]), valid.shape[-1]
    boxes, lists = boxes.detach().float().reshape(*flat, 4), valid.reshape(flat)
    return torch.ops.tokamix.suppress(boxes, lists, overlap, kernel).view(valid.shape)


@torch.library.custom_op("tokamix::suppress", mutates_args=())
def _suppress(boxes: Tensor, valid: Tensor, overlap: float, kernel: bool) -> Tensor:
    if kernel:
        from tokamix.ops.nms import kernels

        return kernels.suppress(boxes, valid, overlap)
    return reference.suppress(boxes, valid, overlap)


@_suppress.register_fake
def _(boxes: Tensor, valid: Tensor, overlap: float, kernel: bool) -> Tensor:
    return torch.empty_like(valid, memory_format=torch.contiguous_format)
