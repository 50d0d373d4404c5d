"""Public function and operator registration of mask pasting."""

import torch
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.mask_paste import reference


def paste_masks(masks: Tensor, boxes: Tensor, size: tuple[int, int], backend: str | None = None) -> Tensor:
    """Resize masks to their boxes by bilinear interpolation and paste them into an image.

    Args:
        masks: (n, s, s), probabilities.
        boxes: (n, 4) as (x1, y1, x2, y2) in pixels of the image.
        size: (H, W) of the image.
        backend: "eager", "triton" or None; see `tokamix.ops.dispatch`.

    Returns:
        (n, H, W) bool, True where the probability is at least 0.5.
    """
    if masks.ndim != 3 or masks.shape[1] != masks.shape[2] or boxes.shape != (len(masks), 4):
        raise ValueError(f"paste_masks needs masks (n, s, s) and boxes (n, 4), got {masks.shape} and {boxes.shape}")
    if dispatch.choose("paste_masks", masks, backend=backend) == "eager":
        return reference.paste_masks(masks, boxes, size)
    return torch.ops.tokamix.paste_masks(masks, boxes.float(), list(size))


@torch.library.custom_op("tokamix::paste_masks", mutates_args=())
def _paste_masks(masks: Tensor, boxes: Tensor, size: list[int]) -> Tensor:
    if dispatch.why_not(masks) is None:
        from tokamix.ops.mask_paste import kernels

        return kernels.paste_masks(masks, boxes, size)
    return reference.paste_masks(masks, boxes, (size[0], size[1]))


@_paste_masks.register_fake
def _(masks: Tensor, boxes: Tensor, size: list[int]) -> Tensor:
    return masks.new_empty(len(masks), *size, dtype=torch.bool)
