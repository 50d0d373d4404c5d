"""Inference with a segmenter: whole images or a sliding window, several scales, horizontal flips."""

from collections.abc import Callable, Iterator, Sequence
from functools import reduce

import torch
from timm.layers import to_2tuple
from torch import Tensor

from tokamix.dense.segmenter import resize

Model = Callable[[Tensor], Tensor]  # images (B, 3, H, W) -> logits (B, K, H, W)
Size = int | tuple[int, int]
STRIP_VALUES = 2**23  # values resized at a time


def predict_probabilities(
    model: Model,
    images: Tensor,
    *,
    size: tuple[int, int] | None = None,
    window: Size | None = None,
    stride: Size | None = None,
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
) -> Tensor:
    """Class probabilities (B, K, H, W) of images (B, 3, h, w).

    The model runs once per scale, and once more on the flipped images if `flip`; the probabilities are averaged.

    Args:
        model: a segmenter in evaluation mode.
        images: normalised images of any size.
        size: (H, W) of the output; None: the size of the images.
        window: side of the sliding window, or (height, width); None: the whole image at once.
        stride: distance between windows; None: two thirds of the window.
        scales: factors by which the images are resized.
        flip: average with the horizontally flipped images.
    """
    output_size = tuple(images.shape[-2:]) if size is None else size
    total: Tensor | None = None
    for logits in _passes(model, images, window, stride, scales, flip):
        probabilities = _resize(logits, output_size).float().softmax(1)
        total = probabilities if total is None else total.add_(probabilities)
    assert total is not None
    return total / (len(scales) * (1 + flip))


@torch.no_grad()
def predict_classes(
    model: Model,
    images: Tensor,
    *,
    size: tuple[int, int] | None = None,
    window: Size | None = None,
    stride: Size | None = None,
    scales: Sequence[float] = (1.0,),
    flip: bool = False,
) -> Tensor:
    """Classes (B, H, W) of the pixels of images (B, 3, h, w): argmax of `predict_probabilities`, in less memory.

    The output is computed in strips of rows, because all probabilities of a 12-megapixel photo need gigabytes. Stored
    meanwhile are either the logits of all passes, at the sizes the model saw, or the sum of the probabilities at the
    output size, whichever is smaller. Arguments as for `predict_probabilities`.
    """
    output_size = (images.shape[-2], images.shape[-1]) if size is None else size
    passes = _passes(model, images, window, stride, scales, flip)
    input_pixels = images.shape[-2] * images.shape[-1] * sum(scale**2 for scale in scales) * (1 + flip)
    if len(scales) * (1 + flip) > 1 and input_pixels > output_size[0] * output_size[1]:
        total: Tensor | None = None
        for logits in passes:
            if total is None:
                total = logits.new_zeros(*logits.shape[:2], *output_size, dtype=torch.float32)
            for rows in _strips(logits, output_size):
                total[:, :, rows] += _resize_rows(logits, output_size, rows).softmax(1)
        assert total is not None
        return total.argmax(1)
    all_logits = list(passes)
    classes = torch.empty(len(images), *output_size, dtype=torch.int64, device=images.device)
    for rows in _strips(all_logits[0], output_size):
        probabilities = (_resize_rows(logits, output_size, rows).softmax(1) for logits in all_logits)
        classes[:, rows] = reduce(Tensor.add_, probabilities).argmax(1)
    return classes


def sliding_window_logits(model: Model, images: Tensor, window: Size, stride: Size | None = None) -> Tensor:
    """Logits (B, K, H, W) of overlapping windows, averaged where they overlap.

    The last window of a row or column is moved back to end at the image's border. A window larger than the image is
    cut to the image.

    Args:
        model: a segmenter in evaluation mode.
        images: (B, 3, H, W).
        window: side of a window, or (height, width).
        stride: distance between windows; None: two thirds of the window.
    """
    height, width = to_2tuple(window)
    stride_y, stride_x = (max(height * 2 // 3, 1), max(width * 2 // 3, 1)) if stride is None else to_2tuple(stride)
    if not 0 < stride_y <= height or not 0 < stride_x <= width:
        raise ValueError(
            f"windows of {height}x{width} px need strides from 1 px to their own size, got {stride_y}x{stride_x} px"
        )
    total: Tensor | None = None
    counts = images.new_zeros(images.shape[-2:], dtype=torch.float32)
    for top in _starts(images.shape[-2], height, stride_y):
        for left in _starts(images.shape[-1], width, stride_x):
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
    model: Model, images: Tensor, window: Size | None, stride: Size | None, scales: Sequence[float], flip: bool
) -> Iterator[Tensor]:
    """The logits for each scale and flip, at the scaled size, flipped back."""
    if not scales or min(scales) <= 0:
        raise ValueError(f"scales must be one or more positive numbers, got {tuple(scales)}")
    for scale in scales:
        scaled = _resize(images, tuple(max(round(side * scale), 1) for side in images.shape[-2:]))
        yield _logits(model, scaled, window, stride)
        if flip:
            yield _logits(model, scaled.flip(-1), window, stride).flip(-1)


def _logits(model: Model, images: Tensor, window: Size | None, stride: Size | None) -> Tensor:
    return model(images) if window is None else sliding_window_logits(model, images, window, stride)


def _resize(x: Tensor, size: tuple[int, ...]) -> Tensor:
    """Resize (B, C, h, w) bilinearly if its size differs."""
    return x if tuple(x.shape[-2:]) == tuple(size) else resize(x, (size[0], size[1]))


def _strips(logits: Tensor, size: tuple[int, int]) -> list[slice]:
    """Ranges of output rows that are computed at a time."""
    step = max(STRIP_VALUES // (logits.shape[0] * logits.shape[1] * size[1]), 1)
    return [slice(top, min(top + step, size[0])) for top in range(0, size[0], step)]


def _resize_rows(logits: Tensor, size: tuple[int, int], rows: slice) -> Tensor:
    """The given rows of logits (B, K, h, w) resized to `size`, in float32."""
    height = logits.shape[-2]
    row = torch.arange(rows.start, rows.stop, dtype=torch.float32, device=logits.device)
    source = ((row + 0.5) * (height / size[0]) - 0.5).clamp(0, height - 1)
    above = source.long()
    below = (above + 1).clamp(max=height - 1)
    strip = torch.lerp(logits[:, :, above].float(), logits[:, :, below].float(), (source - above)[:, None])
    return _resize(strip, (strip.shape[-2], size[1]))
