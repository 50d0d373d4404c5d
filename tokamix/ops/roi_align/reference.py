"""Multi-scale RoIAlign with torchvision's `roi_align`, level by level."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokamix.ops import dispatch


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
    if dispatch.is_exporting():  # every level in turn, with a box of one pixel in place of those of other levels
        parts = [
            roi_align(
                x.to(dtype).contiguous(),
                torch.where((level == i)[:, None], rois, rois * rois.new_tensor([1, 0, 0, 0, 0])),
                output_size,
                1 / stride,
                sampling_ratio=0,
                aligned=True,
            )
            for i, (x, stride) in enumerate(zip(features, strides, strict=True))
        ]
        pooled = parts[0]
        for i, part in enumerate(parts[1:], 1):
            pooled = torch.where((level == i)[:, None, None, None], part, pooled)
        return pooled.to(features[0].dtype)
    counts = level.bincount(minlength=len(features)).tolist()  # synchronises with the device
    pooled = torch.cat(
        [
            roi_align(x.to(dtype).contiguous(), part, output_size, 1 / stride, sampling_ratio=0, aligned=True)
            for x, part, stride in zip(features, rois[order].split(counts), strides, strict=True)
        ]
    )
    return torch.empty_like(pooled).index_copy(0, order, pooled).to(features[0].dtype)
