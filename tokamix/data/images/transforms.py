"""Transforms of single images (timm's), and resizing of whole batches."""

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import create_transform
from torch import Tensor
from torchvision import transforms
from torchvision.transforms.functional import InterpolationMode

from tokamix.data.decode import DataError

if TYPE_CHECKING:
    from tokamix.recipes import Recipe


def create_eval_transform(image_size: int, crop_pct: float, interpolation: str, crop_mode: str = "center") -> Any:
    """Create timm's transform of one image for evaluation, up to a uint8 tensor."""
    crop = {"crop_pct": crop_pct, "crop_mode": crop_mode}
    return create_transform(image_size, interpolation=interpolation, **crop, use_prefetcher=True, normalize=False)


def create_train_transform(recipe: "Recipe", crop_pct: float, mean: Sequence[float], crop_mode: str = "center") -> Any:
    """Create timm's transform of one image for training, up to a uint8 tensor."""
    size = recipe.image_size
    first, second, last = create_transform(
        size,
        is_training=True,
        scale=recipe.crop_scale,
        hflip=recipe.hflip,
        color_jitter=recipe.color_jitter,
        auto_augment="3a" if recipe.augment == "3-augment" else recipe.augment,
        interpolation=recipe.interpolation,
        mean=mean,
        use_prefetcher=True,
        separate=True,
    )
    _allow_zero_bits(second)
    if recipe.crop_scale is None:
        side = math.floor(size / crop_pct)
        whole = (side, side) if crop_mode == "squash" else side
        steps: list[Any] = [transforms.Resize(whole, InterpolationMode(recipe.interpolation))]
        steps.append(transforms.CenterCrop(size))
        if recipe.crop_padding:
            steps.append(transforms.RandomCrop(size, padding=recipe.crop_padding))
        first = transforms.Compose([*steps, transforms.RandomHorizontalFlip(recipe.hflip)])
    return transforms.Compose([first, second, last])


def _allow_zero_bits(policies: Any) -> None:
    """Let timm's Posterize keep 0 bits, which its levels include and Pillow 13 refuses: the image becomes black."""
    for policy in policies.transforms:
        groups = getattr(policy, "policy", None) or [getattr(policy, "ops", [])]
        for op in (op for group in groups for op in group if op.name.startswith("Posterize")):
            op.aug_fn = partial(_posterize, op.aug_fn)


def _posterize(posterize: Any, image: Image.Image, bits: int, **kwargs: Any) -> Image.Image:
    return posterize(image, bits, **kwargs) if bits > 0 else Image.new(image.mode, image.size)


def convert_channels(images: Tensor, channels: int) -> Tensor:
    """Repeat grey images (N, 1, H, W) to any number of channels, or convert coloured ones to grey."""
    if images.shape[1] == channels:
        return images
    if images.shape[1] == 1:
        return images.expand(-1, channels, -1, -1)
    if images.shape[1] == 3 and channels == 1:
        weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
        return torch.cat([(part * weights).sum(1, keepdim=True).round().byte() for part in images.split(4096)])
    raise DataError(
        f"images of {images.shape[1]} channels cannot be converted to {channels}; set in_chans={images.shape[1]}"
    )


def resize_and_crop(
    images: Tensor, image_size: int, crop_pct: float, interpolation: str, crop_mode: str = "center"
) -> Tensor:
    """Evaluation's transform for a batch: resize the short side to image_size / crop_pct and crop the centre.

    With the `crop_mode` "squash" both sides are resized to that length.
    """
    height, width = images.shape[-2:]
    side = math.floor(image_size / crop_pct)
    if (height, width) == (image_size, image_size) and side == image_size:
        return images
    short = min(height, width)
    target = (side, side) if crop_mode == "squash" else (int(height * side / short), int(width * side / short))
    top, left = (round((length - image_size) / 2) for length in target)  # all rounded as torchvision does
    parts = []
    for part in images.split(4096):
        smooth = interpolation != "nearest"
        resized = F.interpolate(
            part.float(), target, mode=interpolation, align_corners=False if smooth else None, antialias=smooth
        )
        cropped = resized[..., top : top + image_size, left : left + image_size]
        parts.append(cropped.round().clamp(0, 255).byte())
    return torch.cat(parts)
