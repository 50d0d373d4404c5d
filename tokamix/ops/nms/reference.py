"""Non-maximum suppression by torchvision, list by list."""

import torch
from torch import Tensor


def suppress(boxes: Tensor, valid: Tensor, overlap: float) -> Tensor:
    """Which of the boxes (S, N, 4), best first, no better one hides (S, N); see `tokamix.ops.nms.op`."""
    from torchvision.ops import nms  # heavy, and only detectors need it

    keep = torch.zeros_like(valid, memory_format=torch.contiguous_format)
    for i in valid.any(1).nonzero()[:, 0].tolist():
        chosen = valid[i].nonzero()[:, 0]
        best_first = torch.arange(len(chosen), 0, -1, device=boxes.device, dtype=torch.float32)
        keep[i, chosen[nms(boxes[i, chosen], best_first, overlap)]] = True
    return keep
