"""How a segmenter is used on an image: as a whole, window by window, at several scales and mirrored."""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce

import torch
from timm.layers import to_2tuple
from torch import Tensor

from tokamix.dense.segmenter import resize as interpolate

Model = Callable[[Tensor], Tensor]  # images (B, 3, H, W) -> logits (B, K, H, W)
Sides = int | tuple[int, int]
STRIP = 2**23  # values that are resized at a time


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
    wanted = tuple(images.shape[-2:]) if size is None else size
    total: Tensor | None = None
    for logits in _passes(model, images, window, stride, scales, flip):
        total = _add(total, _resize(logits, wanted).float().softmax(1))
    assert total is not None
    return total / (len(scales) * (1 + flip))


@torch.no_grad()
def classify(
    model: Model,
    images: Tensor,
    *,
    size: tuple[int, int] | None = None,
    window: Sides | None = None,
    stride: Sides | None = None,
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
) -> Tensor:
    """Classes (B, H, W) of the pixels of images (B, 3, h, w): the argmax of what `segment` gives, in less memory.

    The result is made strip by strip: all probabilities of a photograph of 12 megapixels need gigabytes. What is kept
    meanwhile is the logits of all passes at the sizes that the model saw, or the sum of the probabilities at the size
    of the result, whichever is smaller. Arguments as for `segment`.
    """
    wanted = (images.shape[-2], images.shape[-1]) if size is None else size
    passes = _passes(model, images, window, stride, scales, flip)
    seen = images.shape[-2] * images.shape[-1] * sum(scale**2 for scale in scales) * (1 + flip)
    if len(scales) * (1 + flip) > 1 and seen > wanted[0] * wanted[1]:
        total: Tensor | None = None
        for logits in passes:
            if total is None:
                total = logits.new_zeros(*logits.shape[:2], *wanted, dtype=torch.float32)
            for rows in _strips(logits, wanted):
                total[:, :, rows] += _resize_rows(logits, wanted, rows).softmax(1)
        assert total is not None
        return total.argmax(1)
    kept = list(passes)
    classes = torch.empty(len(images), *wanted, dtype=torch.int64, device=images.device)
    for rows in _strips(kept[0], wanted):
        votes = (_resize_rows(logits, wanted, rows).softmax(1) for logits in kept)
        classes[:, rows] = reduce(Tensor.add_, votes).argmax(1)
    return classes


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
    return total.div_(counts)


def _starts(side: int, window: int, stride: int) -> list[int]:
    last = max(side - window, 0)
    return [*range(0, last, stride), last]


def _passes(
    model: Model, images: Tensor, window: Sides | None, stride: Sides | None, scales: Sequence[float], flip: bool
) -> Iterator[Tensor]:
    """The logits of each scale, and of the mirrored images, at their own sizes and the right way round."""
    if not scales or min(scales) <= 0:
        raise ValueError(f"scales must be one or more positive numbers, got {tuple(scales)}")
    for scale in scales:
        scaled = _resize(images, tuple(max(round(side * scale), 1) for side in images.shape[-2:]))
        yield _logits(model, scaled, window, stride)
        if flip:
            yield _logits(model, scaled.flip(-1), window, stride).flip(-1)


def _logits(model: Model, images: Tensor, window: Sides | None, stride: Sides | None) -> Tensor:
    return model(images) if window is None else slide(model, images, window, stride)


def _resize(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """Bilinear resizing of (B, C, h, w) where the size differs."""
    return x if tuple(x.shape[-2:]) == tuple(size) else interpolate(x, (size[0], size[1]))


def _strips(logits: Tensor, size: tuple[int, int]) -> list[slice]:
    """Rows of the size wanted, as many as are resized at a time."""
    step = max(STRIP // (logits.shape[0] * logits.shape[1] * size[1]), 1)
    return [slice(top, min(top + step, size[0])) for top in range(0, size[0], step)]


def _resize_rows(logits: Tensor, size: tuple[int, int], rows: slice) -> Tensor:
    """Some rows of the logits (B, K, h, w) resized to a size, float32."""
    height = logits.shape[-2]
    row = torch.arange(rows.start, rows.stop, dtype=torch.float32, device=logits.device)
    place = ((row + 0.5) * (height / size[0]) - 0.5).clamp(0, height - 1)
    above = place.long()
    below = (above + 1).clamp(max=height - 1)
    part = torch.lerp(logits[:, :, above].float(), logits[:, :, below].float(), (place - above)[:, None])
    return _resize(part, (part.shape[-2], size[1]))


def _add(total: Tensor | None, part: Tensor) -> Tensor:
    return part if total is None else total.add_(part)
