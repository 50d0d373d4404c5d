"""The public RoIAlign over a pyramid and its registration."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.roi_align import reference

LEVELS = 4  # that the kernel takes


def align_regions(
    maps: Sequence[Tensor],
    boxes: Tensor,
    image: Tensor,
    level: Tensor,
    side: int,
    strides: Sequence[int],
    backend: str | None = None,
) -> Tensor:
    """RoIAlign (arXiv 1703.06870) where each region is read from its own level of a pyramid.

    A region is divided into side x side cells; each is the mean of samples at about one pixel's distance, with pixel
    centres at halves. The kernel has no gradient, so where one is needed torchvision's operator runs.

    Args:
        maps: (B, C, H_i, W_i), of one dtype; the kernel reads them channels last.
        boxes: (N, 4) as left, top, right, bottom in pixels of the image, float32.
        image: (N,), which of the B images a box is in.
        level: (N,), which of the maps it is read from.
        side: cells of a region, in both directions.
        strides: pixels of the image for each pixel of the maps.
        backend: "eager", "triton" or None; see `tokamix.ops.dispatch`.

    Returns:
        (N, C, side, side).
    """
    if not len(maps) == len(strides) > 0:
        raise ValueError(f"{len(maps)} maps came with {len(strides)} strides; each map needs one")
    limit = None if len(maps) <= LEVELS else f"there are {len(maps)} maps, the kernel takes {LEVELS}"
    if torch.is_grad_enabled() and any(x.requires_grad for x in maps):
        limit = "a gradient is needed"
    if dispatch.choose("align_regions", *maps, backend=backend, limit=limit) == "eager":
        return reference.align_regions(maps, boxes, image, level, side, strides)
    return torch.ops.tokamix.align_regions(list(maps), boxes.float(), image, level, side, list(strides))


@torch.library.custom_op("tokamix::align_regions", mutates_args=())
def _align_regions(
    maps: list[Tensor], boxes: Tensor, image: Tensor, level: Tensor, side: int, strides: list[int]
) -> Tensor:
    if dispatch.why_not(*maps) is None:
        from tokamix.ops.roi_align import kernels

        return kernels.align_regions(maps, boxes, image, level, side, strides)
    found = reference.align_regions(maps, boxes, image, level, side, strides)
    return found.contiguous(memory_format=torch.channels_last)


@_align_regions.register_fake
def _(maps: list[Tensor], boxes: Tensor, image: Tensor, level: Tensor, side: int, strides: list[int]) -> Tensor:
    return maps[0].new_empty(len(boxes), side, side, maps[0].shape[1]).permute(0, 3, 1, 2)
