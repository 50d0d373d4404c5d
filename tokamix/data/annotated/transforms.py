"""Transforms of annotated images: image, boxes and masks change together.

The geometry is torchvision's; the policies are those of the papers. All random numbers come from the `rng` argument.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision import tv_tensors
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional as F

from tokamix.data.annotated.datasets import AnnotatedImage
from tokamix.tasks import IGNORE_INDEX

if TYPE_CHECKING:
    from tokamix.inference import InferenceConfig
    from tokamix.recipes import Recipe

CROP_TRIES = 10  # for a crop that is not dominated by one class
# second branch of DETR's policy: short sides before the crop, and the range of the crop's sides
DETR_SCALES, DETR_CROPS = (400, 500, 600), (384, 600)


def fit_size(size: tuple[int, int], scale: tuple[float, float] | None) -> tuple[int, int]:
    """The largest (height, width) of the same proportions whose long and short side fit into (long, short)."""
    if scale is None:
        return size
    factor = min(max(scale) / max(size), min(scale) / min(size))
    height, width = (max(1, int(side * factor + 0.5)) for side in size)
    return height, width


def resize(sample: AnnotatedImage, size: tuple[int, int], interpolation: str = "bilinear") -> AnnotatedImage:
    """Resize to (height, width); masks take the nearest pixel."""
    if size == sample.size:
        return sample
    return replace(
        sample,
        image=resize_image(sample.image, size, interpolation),
        boxes=_resize_boxes(sample, size),
        masks=_resize_nearest(sample.masks, size),
        segmentation=_resize_nearest(sample.segmentation, size),
    )


def resize_image(image: Tensor, size: tuple[int, int], interpolation: str = "bilinear") -> Tensor:
    """Resize an image (3, H, W) uint8 to (height, width), with antialiasing."""
    if size == (image.shape[-2], image.shape[-1]):
        return image
    # torch (2.11 to 2.15) writes garbage into a single column, unless channels are last in memory
    if size[1] == 1:
        image = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return F.resize(image, list(size), interpolation=InterpolationMode(interpolation))


def _resize_boxes(sample: AnnotatedImage, size: tuple[int, int]) -> Tensor:
    boxes = tv_tensors.BoundingBoxes(sample.boxes, format="XYXY", canvas_size=sample.size)
    return F.clamp_bounding_boxes(F.resize(boxes, list(size))).as_subclass(Tensor)


def _resize_nearest(classes: Tensor | None, size: tuple[int, int]) -> Tensor | None:
    """Resize masks (..., H, W): the value at each new pixel's centre, so that they stay aligned with boxes and image.

    torchvision takes the upper left corner instead, which shifts masks by up to half a pixel, in three times the time.
    """
    if classes is None:
        return None
    rows, columns = (
        ((np.arange(new) + 0.5) * (old / new)).astype(np.int64)
        for new, old in zip(size, classes.shape[-2:], strict=True)
    )
    return torch.from_numpy(classes.numpy().take(columns, -1).take(rows, -2))


def flip(sample: AnnotatedImage) -> AnnotatedImage:
    """Flip left to right."""
    return _transform(sample, F.horizontal_flip)


def crop(sample: AnnotatedImage, top: int, left: int, height: int, width: int) -> AnnotatedImage:
    """Crop; objects that are completely outside are dropped."""
    if (top, left, height, width) == (0, 0, *sample.size):
        return sample
    masks = sample.masks
    sample = _transform(sample, partial(F.crop, top=top, left=left, height=height, width=width))
    kept = (sample.boxes[:, 2:] > sample.boxes[:, :2]).all(1)
    if masks is not None and sample.masks is not None:
        kept &= sample.masks.flatten(1).any(1) | ~masks.flatten(1).any(1)
    return sample if kept.all() else select_objects(sample, kept)


def select_objects(sample: AnnotatedImage, kept: Tensor) -> AnnotatedImage:
    """Keep the objects of a boolean mask (n,); the image does not change."""
    masks = None if sample.masks is None else sample.masks[kept]
    return replace(sample, boxes=sample.boxes[kept], labels=sample.labels[kept], crowd=sample.crowd[kept], masks=masks)


def _transform(sample: AnnotatedImage, function: Callable[[Any], Any]) -> AnnotatedImage:
    """Apply one of torchvision's functionals, which handle images, boxes and masks."""
    boxes = function(tv_tensors.BoundingBoxes(sample.boxes, format="XYXY", canvas_size=sample.size))
    masks, segmentation = sample.masks, sample.segmentation
    if masks is not None:
        masks = function(tv_tensors.Mask(masks.view(torch.uint8))).as_subclass(Tensor).view(torch.bool)
    if segmentation is not None:
        segmentation = function(tv_tensors.Mask(segmentation)).as_subclass(Tensor)
    image = function(tv_tensors.Image(sample.image)).as_subclass(Tensor)
    boxes = F.clamp_bounding_boxes(boxes).as_subclass(Tensor)
    return replace(sample, image=image, boxes=boxes, masks=masks, segmentation=segmentation)


def random_crop(sample: AnnotatedImage, side: int, cat_max: float, rng: np.random.Generator) -> AnnotatedImage:
    """Crop at most side x side at random; again while one class fills more than `cat_max` of the labelled pixels."""
    if sample.segmentation is None:
        raise ValueError(f"{sample.name} has no semantic mask")
    height, width = (min(side, length) for length in sample.size)
    top = left = 0
    for _ in range(CROP_TRIES):
        top, left = (
            int(rng.integers(whole - part + 1)) for whole, part in zip(sample.size, (height, width), strict=True)
        )
        if cat_max >= 1:
            break
        part = sample.segmentation[top : top + height, left : left + width]
        counts = torch.bincount(part.flatten(), minlength=IGNORE_INDEX + 1)[:IGNORE_INDEX]
        if (counts > 0).sum() > 1 and counts.max() < cat_max * counts.sum():
            break
    return crop(sample, top, left, height, width)


def distort_colors(image: Tensor, rng: np.random.Generator) -> Tensor:
    """Change brightness, contrast, saturation and hue of an image (3, H, W) uint8, each with probability 1/2.

    As in the papers' framework: brightness by up to 32 of 255, contrast and saturation by a factor from 0.5 to 1.5, hue
    by up to a tenth of the circle; contrast comes before or after the colours.
    """
    shift = rng.uniform(-32, 32) * rng.integers(2)
    contrast, saturation = (rng.uniform(0.5, 1.5) ** rng.integers(2) for _ in range(2))
    turn = rng.uniform(-0.1, 0.1) * rng.integers(2)
    contrast_last = bool(rng.integers(2))
    values = np.arange(256.0)
    first = (values + shift).clip(0, 255) * (1 if contrast_last else contrast)
    # lookup tables of 8 bits take a fifth of the time of floating-point formulas
    pixels = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).point(_table(first, first, first))
    if saturation != 1 or turn:
        hue = np.mod(values + 256 * turn, 256).round() % 256
        pixels = pixels.convert("HSV").point(_table(hue, values * saturation, values)).convert("RGB")
    if contrast_last and contrast != 1:
        pixels = pixels.point(_table(*[values * contrast] * 3))
    return torch.from_numpy(np.array(pixels)).permute(2, 0, 1)


def _table(*channels: np.ndarray) -> list[int]:
    return np.concatenate(channels).round().clip(0, 255).astype(int).tolist()


def augment_segment(sample: AnnotatedImage, recipe: "Recipe", rng: np.random.Generator) -> AnnotatedImage:
    """Augment for training a segmenter, to at most crop_size x crop_size."""
    factor = rng.uniform(*recipe.scale_range) if recipe.scale_range else 1.0
    long, short = recipe.scale or (max(sample.size), min(sample.size))
    sample = resize(sample, fit_size(sample.size, (int(long * factor), int(short * factor))), recipe.interpolation)
    sample = random_crop(sample, recipe.crop_size, recipe.cat_max, rng)
    if rng.random() < recipe.hflip:
        sample = flip(sample)
    return _distort(sample, recipe, rng)


def augment_detect(sample: AnnotatedImage, recipe: "Recipe", rng: np.random.Generator) -> AnnotatedImage:
    """Augment for training a detector; crowds are dropped."""
    sample = select_objects(sample, ~sample.crowd) if sample.crowd.any() else sample
    long, short = recipe.scale or (max(sample.size), min(sample.size))
    short = int(rng.choice(recipe.scales)) if recipe.scales else short
    if rng.random() < recipe.hflip:
        sample = flip(sample)
    if recipe.crop_then_scale and rng.random() < 0.5:
        sample = resize(sample, fit_size(sample.size, (long, int(rng.choice(DETR_SCALES)))), recipe.interpolation)
        low, high = ([min(side, end) for side in sample.size] for end in DETR_CROPS)
        sides = [int(rng.integers(a, b + 1)) for a, b in zip(low, high, strict=True)]
        corner = [int(rng.integers(whole - side + 1)) for whole, side in zip(sample.size, sides, strict=True)]
        sample = crop(sample, *corner, *sides)
    sample = resize(sample, fit_size(sample.size, (long, short)), recipe.interpolation)
    return _distort(sample, recipe, rng)


def eval_transform(image: Tensor, config: "InferenceConfig") -> Tensor:
    """Resize an image (3, H, W) uint8 to fit into `config.scale`, for evaluation and prediction."""
    return resize_image(image, fit_size((image.shape[-2], image.shape[-1]), config.scale), config.interpolation)


def resize_for_eval(sample: AnnotatedImage, config: "InferenceConfig") -> AnnotatedImage:
    """Resize image and boxes for evaluation; masks keep the original size."""
    image = eval_transform(sample.image, config)
    size = (image.shape[-2], image.shape[-1])
    return sample if size == sample.size else replace(sample, image=image, boxes=_resize_boxes(sample, size))


def _distort(sample: AnnotatedImage, recipe: "Recipe", rng: np.random.Generator) -> AnnotatedImage:
    return replace(sample, image=distort_colors(sample.image, rng)) if recipe.photometric else sample
