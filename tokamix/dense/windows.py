"""How a segmenter is used on an image: as a whole, window by window, at several scales and mirrored."""

from collections.abc import Callable, Sequence

import torch
from timm.layers import to_2tuple
from torch import Tensor

from tokamix.dense.segmenter import resize as interpolate

Model = Callable[[Tensor], Tensor]  # images (B, 3, H, W) -> logits (B, K, H, W)
Sides = int | tuple[int, int]


def segment(
    model: Model,
    images: Tensor,
    *,
    size: tuple[int, int] | None = None,
    window: Sides | None = None,
    stride: Sides | None = None,
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
) -> Tensor:
    """Class probabilities (B, K, H, W) of images (B, 3, H, W); argmax over K is the segmentation.

    Runs the model once for each scale, and once more mirrored if `flip`; the probabilities are averaged.

    Args:
        model: a segmenter in evaluation mode.
        images: normalised images, of any size.
        size: (H, W) of the result; None for the images' own.
        window: side of the sliding window, or (height, width); None takes whole images.
        stride: from one window to the next; None for two thirds of the window.
        scales: factors by which the images are resized.
        flip: average with the mirrored images.
    """
    if not scales or min(scales) <= 0:
        raise ValueError(f"scales must be one or more positive numbers, got {tuple(scales)}")
    wanted = tuple(images.shape[-2:]) if size is None else size
    total: Tensor | None = None
    for scale in scales:
        scaled = _resize(images, tuple(max(round(side * scale), 1) for side in images.shape[-2:]))
        for mirrored in (False, True) if flip else (False,):
            logits = _logits(model, scaled.flip(-1) if mirrored else scaled, window, stride)
            logits = _resize(logits.flip(-1) if mirrored else logits, wanted).float()
            total = _add(total, logits.softmax(1))
    assert total is not None
    return total / (len(scales) * (1 + flip))


def slide(model: Model, images: Tensor, window: Sides, stride: Sides | None = None) -> Tensor:
    """Logits (B, K, H, W) from windows of the images, averaged where windows overlap.

    The last window of a row or column is moved back so that it ends with the image. Where an image is smaller than the
    window, so is the window.

    Args:
        model: a segmenter in evaluation mode.
        images: (B, 3, H, W).
        window: side of a window, or (height, width).
        stride: from one window to the next; None for two thirds of the window.
    """
    height, width = to_2tuple(window)
    down, right = (max(height * 2 // 3, 1), max(width * 2 // 3, 1)) if stride is None else to_2tuple(stride)
    if not 0 < down <= height or not 0 < right <= width:
        raise ValueError(f"windows of {height}x{width} px at strides of {down}x{right} px leave gaps or never move on")
    total: Tensor | None = None
    counts = images.new_zeros(images.shape[-2:], dtype=torch.float32)
    for top in _starts(images.shape[-2], height, down):
        for left in _starts(images.shape[-1], width, right):
            rows, columns = slice(top, top + height), slice(left, left + width)
            logits = model(images[..., rows, columns]).float()
            if total is None:
                total = logits.new_zeros(*logits.shape[:2], *images.shape[-2:])
            total[..., rows, columns] += logits
            counts[rows, columns] += 1
    assert total is not None
    return total / counts


def _starts(side: int, window: int, stride: int) -> list[int]:
    last = max(side - window, 0)
    return [*range(0, last, stride), last]


def _logits(model: Model, images: Tensor, window: Sides | None, stride: Sides | None) -> Tensor:
    return model(images) if window is None else slide(model, images, window, stride)


def _resize(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """Bilinear resizing of (B, C, h, w) where the size differs."""
    return x if tuple(x.shape[-2:]) == tuple(size) else interpolate(x, (size[0], size[1]))


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)
