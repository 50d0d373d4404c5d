"""RoIAlign by torchvision, level by level."""

from collections.abc import Sequence

import torch
from torch import Tensor


def align_regions(
    maps: Sequence[Tensor], boxes: Tensor, image: Tensor, level: Tensor, side: int, strides: Sequence[int]
) -> Tensor:
    """Maps (B, C, H_i, W_i), boxes (N, 4) -> (N, C, side, side); see `tokamix.ops.roi_align.op`."""
    from torchvision.ops import roi_align  # heavy, and only detectors need it

    dtype = torch.promote_types(maps[0].dtype, torch.float32)  # float16 cannot place a box on a large map
    rois, order = torch.cat([image[:, None].to(boxes), boxes], 1).to(dtype), level.argsort()
    counts = level.bincount(minlength=len(maps)).tolist()  # waits for the device
    pooled = torch.cat(
        [
            roi_align(x.to(dtype).contiguous(), part, side, 1 / stride, sampling_ratio=0, aligned=True)
            for x, part, stride in zip(maps, rois[order].split(counts), strides, strict=True)
        ]
    )
    return torch.empty_like(pooled).index_copy(0, order, pooled).to(maps[0].dtype)
