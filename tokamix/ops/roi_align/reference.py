"""Multi-scale RoIAlign with torchvision's `roi_align`, level by level."""

from collections.abc import Sequence

import torch
from torch import Tensor


def multiscale_roi_align(
    features: Sequence[Tensor],
    boxes: Tensor,
    image_index: Tensor,
    level: Tensor,
    output_size: int,
    strides: Sequence[int],
) -> Tensor:
    """Maps (B, C, H_i, W_i), boxes (N, 4) -> (N, C, output_size, output_size); see `tokamix.ops.roi_align.op`."""
    from torchvision.ops import roi_align  # slow to import, and only detectors need it

    # float16 cannot represent box coordinates on a large map
    dtype = torch.promote_types(features[0].dtype, torch.float32)
    rois, order = torch.cat([image_index[:, None].to(boxes), boxes], 1).to(dtype), level.argsort()
    counts = level.bincount(minlength=len(features)).tolist()  # synchronises with the device
    pooled = torch.cat(
        [
            roi_align(x.to(dtype).contiguous(), part, output_size, 1 / stride, sampling_ratio=0, aligned=True)
            for x, part, stride in zip(features, rois[order].split(counts), strides, strict=True)
        ]
    )
    return torch.empty_like(pooled).index_copy(0, order, pooled).to(features[0].dtype)
