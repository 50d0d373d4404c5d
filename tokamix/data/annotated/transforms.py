"""What happens to scenes before a model sees them: image, boxes, masks and classes of pixels go together.

The geometry is torchvision's, the policies are those the papers' results were made with; everything random comes from
the generator that is handed in.
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

CROP_TRIES = 10  # for a crop that no class fills
# the second branch of DETR's policy: short sides before the cut, and the range of the cut's sides
FIRST_SCALES, CUT_SIDES = (400, 500, 600), (384, 600)


def fitted(size: tuple[int, int], scale: tuple[float, float] | None) -> tuple[int, int]:
    """Height and width that fit into (long, short), whichever way it lies, with the proportions kept."""
    if scale is None:
        return size
    factor = min(max(scale) / max(size), min(scale) / min(size))
    height, width = (max(1, int(side * factor + 0.5)) for side in size)
    return height, width


def resize(scene: AnnotatedImage, size: tuple[int, int], interpolation: str = "bilinear") -> AnnotatedImage:
    """The scene at another height and width; masks and classes of pixels take the nearest."""
    if size == scene.size:
        return scene
    return replace(
        scene,
        image=resize_image(scene.image, size, interpolation),
        boxes=_resize_boxes(scene, size),
        masks=_nearest(scene.masks, size),
        segmentation=_nearest(scene.segmentation, size),
    )


def _resize_boxes(scene: AnnotatedImage, size: tuple[int, int]) -> Tensor:
    boxes = tv_tensors.BoundingBoxes(scene.boxes, format="XYXY", canvas_size=scene.size)
    return F.clamp_bounding_boxes(F.resize(boxes, list(size))).as_subclass(Tensor)


def resize_image(image: Tensor, size: tuple[int, int], interpolation: str = "bilinear") -> Tensor:
    """Resize an image (3, H, W) uint8 to (height, width), with antialiasing."""
    if size == (image.shape[-2], image.shape[-1]):
        return image
    # torch (2.11 to 2.15) writes nonsense into a single column, unless channels are the last in memory
    if size[1] == 1:
        image = image.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    return F.resize(image, list(size), interpolation=InterpolationMode(interpolation))


def _nearest(classes: Tensor | None, size: tuple[int, int]) -> Tensor | None:
    """Masks (..., H, W) at another size: of each new pixel's centre, so that they stay with boxes and image.

    torchvision takes the upper left corner instead, which moves masks by up to half a pixel, and thrice the time.
    """
    if classes is None:
        return None
    rows, columns = (
        ((np.arange(new) + 0.5) * (old / new)).astype(np.int64)
        for new, old in zip(size, classes.shape[-2:], strict=True)
    )
    return torch.from_numpy(classes.numpy().take(columns, -1).take(rows, -2))


def flip(scene: AnnotatedImage) -> AnnotatedImage:
    """The scene mirrored, left to right."""
    return _moved(scene, F.horizontal_flip)


def crop(scene: AnnotatedImage, top: int, left: int, height: int, width: int) -> AnnotatedImage:
    """A part of the scene; things of which nothing is left are gone."""
    if (top, left, height, width) == (0, 0, *scene.size):
        return scene
    before = scene.masks
    scene = _moved(scene, partial(F.crop, top=top, left=left, height=height, width=width))
    kept = (scene.boxes[:, 2:] > scene.boxes[:, :2]).all(1)
    if before is not None and scene.masks is not None:
        kept &= scene.masks.flatten(1).any(1) | ~before.flatten(1).any(1)
    return scene if kept.all() else chosen(scene, kept)


def chosen(scene: AnnotatedImage, which: Tensor) -> AnnotatedImage:
    """The scene with some of its things (n,) only; the image stays."""
    masks = None if scene.masks is None else scene.masks[which]
    return replace(scene, boxes=scene.boxes[which], labels=scene.labels[which], crowd=scene.crowd[which], masks=masks)


def _moved(scene: AnnotatedImage, move: Callable[[Any], Any]) -> AnnotatedImage:
    """A scene after one of torchvision's functions, which know what to do with each kind of thing."""
    boxes = move(tv_tensors.BoundingBoxes(scene.boxes, format="XYXY", canvas_size=scene.size))
    masks, segmentation = scene.masks, scene.segmentation
    if masks is not None:
        masks = move(tv_tensors.Mask(masks.view(torch.uint8))).as_subclass(Tensor).view(torch.bool)
    if segmentation is not None:
        segmentation = move(tv_tensors.Mask(segmentation)).as_subclass(Tensor)
    image = move(tv_tensors.Image(scene.image)).as_subclass(Tensor)
    boxes = F.clamp_bounding_boxes(boxes).as_subclass(Tensor)
    return replace(scene, image=image, boxes=boxes, masks=masks, segmentation=segmentation)


def crop_classes(scene: AnnotatedImage, side: int, most: float, draw: np.random.Generator) -> AnnotatedImage:
    """A random part of at most side x side, drawn again while one class fills more than `most` of what is labelled."""
    if scene.segmentation is None:
        raise ValueError(f"{scene.name} has no classes of pixels")
    height, width = (min(side, length) for length in scene.size)
    top = left = 0
    for _ in range(CROP_TRIES):
        top, left = (
            int(draw.integers(whole - part + 1)) for whole, part in zip(scene.size, (height, width), strict=True)
        )
        if most >= 1:
            break
        part = scene.segmentation[top : top + height, left : left + width]
        counts = torch.bincount(part.flatten(), minlength=IGNORE_INDEX + 1)[:IGNORE_INDEX]
        if (counts > 0).sum() > 1 and counts.max() < most * counts.sum():
            break
    return crop(scene, top, left, height, width)


def distort(image: Tensor, draw: np.random.Generator) -> Tensor:
    """Brightness, contrast, saturation and hue of an image (3, H, W) uint8, each changed half of the time.

    As the papers' framework: brightness by up to 32 of 255, contrast and saturation by a factor from 0.5 to 1.5, hue by
    up to a tenth of the circle; contrast comes before or after the colours.
    """
    shift = draw.uniform(-32, 32) * draw.integers(2)
    contrast, saturation = (draw.uniform(0.5, 1.5) ** draw.integers(2) for _ in range(2))
    turn = draw.uniform(-0.1, 0.1) * draw.integers(2)
    late = bool(draw.integers(2))
    values = np.arange(256.0)
    first = (values + shift).clip(0, 255) * (1 if late else contrast)
    # of 8 bits each, all of it is looked up in tables, which takes a fifth of the time of floating-point formulas
    picture = Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()).point(_table(first, first, first))
    if saturation != 1 or turn:
        hue = np.mod(values + 256 * turn, 256).round() % 256
        picture = picture.convert("HSV").point(_table(hue, values * saturation, values)).convert("RGB")
    if late and contrast != 1:
        picture = picture.point(_table(*[values * contrast] * 3))
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


def _table(*channels: np.ndarray) -> list[int]:
    return np.concatenate(channels).round().clip(0, 255).astype(int).tolist()


def train_segment(scene: AnnotatedImage, recipe: "Recipe", draw: np.random.Generator) -> AnnotatedImage:
    """A scene as a segmenter is trained on it, at most crop_size x crop_size."""
    factor = draw.uniform(*recipe.scale_range) if recipe.scale_range else 1.0
    long, short = recipe.scale or (max(scene.size), min(scene.size))
    scene = resize(scene, fitted(scene.size, (int(long * factor), int(short * factor))), recipe.interpolation)
    scene = crop_classes(scene, recipe.crop_size, recipe.cat_max, draw)
    if draw.random() < recipe.hflip:
        scene = flip(scene)
    return _distorted(scene, recipe, draw)


def train_detect(scene: AnnotatedImage, recipe: "Recipe", draw: np.random.Generator) -> AnnotatedImage:
    """A scene as a detector is trained on it, without crowds."""
    scene = chosen(scene, ~scene.crowd) if scene.crowd.any() else scene
    long, short = recipe.scale or (max(scene.size), min(scene.size))
    short = int(draw.choice(recipe.scales)) if recipe.scales else short
    if draw.random() < recipe.hflip:
        scene = flip(scene)
    if recipe.crop_then_scale and draw.random() < 0.5:
        scene = resize(scene, fitted(scene.size, (long, int(draw.choice(FIRST_SCALES)))), recipe.interpolation)
        low, high = ([min(side, end) for side in scene.size] for end in CUT_SIDES)
        sides = [int(draw.integers(a, b + 1)) for a, b in zip(low, high, strict=True)]
        corner = [int(draw.integers(whole - side + 1)) for whole, side in zip(scene.size, sides, strict=True)]
        scene = crop(scene, *corner, *sides)
    scene = resize(scene, fitted(scene.size, (long, short)), recipe.interpolation)
    return _distorted(scene, recipe, draw)


def eval_transform(image: Tensor, config: "InferenceConfig") -> Tensor:
    """Resize an image (3, H, W) uint8 for evaluation and prediction, to fit into `config.scale`."""
    size = fitted((image.shape[-2], image.shape[-1]), config.scale)
    return resize_image(image, size, config.interpolation)


def transform_for_eval(scene: AnnotatedImage, config: "InferenceConfig") -> AnnotatedImage:
    """Resize image and boxes for evaluation; masks and semantic mask keep the original size."""
    image = eval_transform(scene.image, config)
    size = (image.shape[-2], image.shape[-1])
    return scene if size == scene.size else replace(scene, image=image, boxes=_resize_boxes(scene, size))


def _distorted(scene: AnnotatedImage, recipe: "Recipe", draw: np.random.Generator) -> AnnotatedImage:
    return replace(scene, image=distort(scene.image, draw)) if recipe.photometric else scene
