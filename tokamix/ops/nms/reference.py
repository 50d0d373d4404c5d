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


def exported_nms(boxes: Tensor, valid: Tensor, iou_threshold: float) -> Tensor:
    """`batched_nms` for exported graphs, in one call: each list is moved to a place of its own.

    Boxes that are not valid become points far away from all others, which suppress nothing.
    """
    from torchvision.ops import nms

    lists, n = valid.shape
    span = boxes.flatten().amax(0) + 1  # boxes are clipped to their image, so they start at 0
    place = torch.arange(lists, device=boxes.device, dtype=boxes.dtype)[:, None, None] * span
    moved = torch.where(valid[..., None], boxes + place, -1 - torch.arange(n, device=boxes.device)[:, None] * 2.0)
    scores = torch.arange(lists * n, 0, -1, device=boxes.device, dtype=torch.float32)
    kept = nms(moved.reshape(-1, 4), scores, iou_threshold)
    keep = torch.zeros(lists * n, device=boxes.device).scatter(0, kept, torch.ones_like(kept, dtype=torch.float32))
    return (keep > 0).view(lists, n) & valid
