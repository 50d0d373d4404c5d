"""Batched NMS with torchvision's `nms`, list by list."""

import torch
from torch import Tensor


def batched_nms(boxes: Tensor, valid: Tensor, iou_threshold: float) -> Tensor:
    """Boxes (S, N, 4), sorted by descending score -> which of them are kept (S, N); see `tokamix.ops.nms.op`."""
    from torchvision.ops import nms  # slow to import, and only detectors need it

    keep = torch.zeros_like(valid, memory_format=torch.contiguous_format)
    for i in valid.any(1).nonzero()[:, 0].tolist():
        index = valid[i].nonzero()[:, 0]
        scores = torch.arange(len(index), 0, -1, device=boxes.device, dtype=torch.float32)
        keep[i, index[nms(boxes[i, index], scores, iou_threshold)]] = True
    return keep
