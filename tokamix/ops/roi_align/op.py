"""Public function and operator registration of multi-scale RoIAlign."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.roi_align import reference

MAX_LEVELS = 4  # supported by the kernel


def multiscale_roi_align(
    features: Sequence[Tensor],
    boxes: Tensor,
    image_index: Tensor,
    level: Tensor,
    output_size: int,
    strides: Sequence[int],
    backend: str | None = None,
) -> Tensor:
    """RoIAlign (arXiv 1703.06870) where each box is pooled from its own level of a feature pyramid.

    A box is divided into output_size x output_size cells; a cell is the mean of bilinear samples about one pixel apart
    (torchvision's `sampling_ratio=0, aligned=True`). The kernel has no backward, so torchvision's operator runs where a
    gradient is needed.

    Args:
        features: maps (B, C, H_i, W_i) of one dtype; the kernel reads them channels last.
        boxes: (N, 4) as (x1, y1, x2, y2) in pixels of the image, float32.
        image_index: (N,), the image of the batch that each box belongs to.
        level: (N,), the index of the map that each box is pooled from.
        output_size: cells per side.
        strides: stride of each map relative to the image.
        backend: "eager", "triton" or None; see `tokamix.ops.dispatch`.

    Returns:
        (N, C, output_size, output_size).
    """
    if not len(features) == len(strides) > 0:
        raise ValueError(f"got {len(features)} feature maps and {len(strides)} strides; pass one stride per map")
    _check(features, boxes, image_index, level)
    levels = len(features)
    limit = f"{levels} feature maps are more than the kernel's {MAX_LEVELS}" if levels > MAX_LEVELS else None
    if torch.is_grad_enabled() and any(x.requires_grad for x in features):
        limit = "a gradient is needed"
    if dispatch.choose("multiscale_roi_align", *features, backend=backend, limit=limit) == "eager":
        return reference.multiscale_roi_align(features, boxes, image_index, level, output_size, strides)
    return torch.ops.tokamix.multiscale_roi_align(
        list(features), boxes.float(), image_index, level, output_size, list(strides)
    )


def _check(features: Sequence[Tensor], boxes: Tensor, image_index: Tensor, level: Tensor) -> None:
    kinds = {(x.ndim, *x.shape[:2], x.dtype) for x in features}
    if len(kinds) > 1 or features[0].ndim != 4:
        shapes = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in features)
        raise ValueError(f"feature maps must be (B, C, H_i, W_i) with the same B, C and dtype, got {shapes}")
    if empty := [x for x in features if not x.numel()]:
        raise ValueError(f"feature maps must not be empty, got {tuple(empty[0].shape)}")  # torchvision would crash
    dispatch.check_floating("multiscale_roi_align", features[0])
    if boxes.ndim != 2 or boxes.shape[1] != 4 or not image_index.shape == level.shape == boxes.shape[:1]:
        shapes = ", ".join(str(tuple(x.shape)) for x in (boxes, image_index, level))
        raise ValueError(f"multiscale_roi_align needs boxes (N, 4), image_index (N,) and level (N,), got {shapes}")
    if boxes.device.type != "cpu" or torch.compiler.is_compiling() or not len(boxes):
        return  # a GPU would have to wait for the values
    for name, index, size in (("image_index", image_index, len(features[0])), ("level", level, len(features))):
        if not 0 <= int(index.min()) <= int(index.max()) < size:
            raise ValueError(f"{name} has values from {index.min()} to {index.max()}, but must be from 0 to {size - 1}")


@torch.library.custom_op("tokamix::multiscale_roi_align", mutates_args=())
def _multiscale_roi_align(
    features: list[Tensor], boxes: Tensor, image_index: Tensor, level: Tensor, output_size: int, strides: list[int]
) -> Tensor:
    if dispatch.why_not(*features) is None:
        from tokamix.ops.roi_align import kernels

        return kernels.multiscale_roi_align(features, boxes, image_index, level, output_size, strides)
    pooled = reference.multiscale_roi_align(features, boxes, image_index, level, output_size, strides)
    return pooled.contiguous(memory_format=torch.channels_last)


@_multiscale_roi_align.register_fake
def _(
    features: list[Tensor], boxes: Tensor, image_index: Tensor, level: Tensor, output_size: int, strides: list[int]
) -> Tensor:
    return features[0].new_empty(len(boxes), output_size, output_size, features[0].shape[1]).permute(0, 3, 1, 2)
