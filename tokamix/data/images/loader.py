"""Loaders of images with one label each, for training and evaluation."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from tokamix.data.batches import BatchOrder, IndexOrder, StreamOrder
from tokamix.data.decode import DataError
from tokamix.data.images.augment import can_batch
from tokamix.data.images.datasets import ImageDataset
from tokamix.data.images.resident import ResidentLoader
from tokamix.data.images.streams import ImageStream
from tokamix.data.images.transforms import create_eval_transform, create_train_transform
from tokamix.data.images.worker import ImageLoader, ImageReader
from tokamix.data.loading import Corrupt, Loader

if TYPE_CHECKING:
    from tokamix.inference import InferenceConfig
    from tokamix.recipes import Recipe

RESIDENT_BYTES = 4 << 30  # data sets up to this size are kept on the device
CROP_PCT = 0.875  # timm's default for photos; small images held as arrays are not cropped


def create_train_loader(
    dataset: ImageDataset | ImageStream,
    recipe: "Recipe",
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    workers: int = 0,
    in_chans: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    crop_pct: float | None = None,
    crop_mode: str = "center",
    corrupt: Corrupt = "raise",
    resident: bool | None = None,
) -> Loader:
    """Create a loader of shuffled, augmented and normalised batches; an incomplete last batch is dropped.

    `loader.epoch(number, start=0)` yields (images (B, C, H, W), labels (B,)).

    Args:
        dataset: the training split of `create_dataset(...)`.
        recipe: image size, augmentation and seed.
        batch_size: images of one batch of this process.
        rank: of this process.
        world_size: number of processes.
        device: of the batches.
        workers: processes that decode; 0 decodes in this one. Data sets that are kept on the device need none.
        in_chans: channels of the batches; grey images are repeated, coloured ones converted to grey.
        mean: of each channel, for pixels from 0 to 1; default: ImageNet's.
        std: likewise.
        crop_pct: part of the resized image that is kept where the recipe has no `crop_scale`; default: the recipe's,
            or all of images that are held as arrays and 0.875 of others.
        crop_mode: how images are resized there: "center" keeps the proportions, "squash" does not.
        corrupt: for images that cannot be decoded: "raise" a DataError that names the image, or "skip" it, which is
            logged and counted in `loader.skipped`; the next good image of the epoch takes its place.
        resident: keep the whole data set on the device and augment it there; default: if it is small enough and the
            recipe's augmentation exists for batches.
    """
    mean, std = (_per_channel(v, in_chans) for v in (mean or IMAGENET_DEFAULT_MEAN, std or IMAGENET_DEFAULT_STD))
    common = (len(dataset), batch_size, rank, world_size, True, recipe.seed)
    order: IndexOrder | StreamOrder
    if isinstance(dataset, ImageStream):
        order = StreamOrder(*common, stream=dataset, spare=corrupt == "skip")
    else:
        order = IndexOrder(*common, repeats=recipe.repeated_augmentation)
    arrays = resident_arrays(dataset, resident, corrupt) if can_batch(recipe.augment) else None
    crop_pct = crop_pct or recipe.crop_pct
    if arrays is not None and isinstance(order, IndexOrder):
        shape: Any = {"image_size": recipe.image_size, "crop_pct": crop_pct or 1.0}
        shape |= {"interpolation": recipe.interpolation, "crop_mode": crop_mode}
        return ResidentLoader(*arrays, order, device, mean, std, **shape, recipe=recipe)
    if resident:
        raise ValueError("this data set or augmentation cannot be kept on the device; leave out resident=True")
    transform = create_train_transform(recipe, crop_pct or CROP_PCT, mean, crop_mode)
    return _worker_loader(
        dataset, order, transform, recipe.image_size, mean, std, device, workers, corrupt, recipe.random_erasing
    )


def create_eval_loader(
    dataset: ImageDataset | ImageStream,
    config: "InferenceConfig",
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    workers: int = 0,
    corrupt: Corrupt = "raise",
    resident: bool | None = None,
) -> Loader:
    """Create a loader that yields every image exactly once over all ranks, in order.

    The last batch may be smaller; some ranks may have one batch less.

    Args:
        dataset: the validation split of `create_dataset(...)`.
        config: image size, crop, interpolation, mean and std; as many channels as `mean` has values.
        batch_size: images of one batch of this process.
        rank: of this process.
        world_size: number of processes.
        device: of the batches.
        workers: processes that decode; 0 decodes in this one. Data sets that are kept on the device need none.
        corrupt: for images that cannot be decoded: "raise" a DataError that names the image, or "skip" it, which is
            logged and counted in `loader.skipped`.
        resident: keep the whole data set on the device; default: if it is small enough.
    """
    shape: Any = {key: getattr(config, key) for key in ("image_size", "crop_pct", "crop_mode", "interpolation")}
    common = (len(dataset), batch_size, rank, world_size, False)
    order = StreamOrder(*common, stream=dataset) if isinstance(dataset, ImageStream) else IndexOrder(*common)
    arrays = resident_arrays(dataset, resident, corrupt)
    if arrays is not None and isinstance(order, IndexOrder):
        return ResidentLoader(*arrays, order, device, config.mean, config.std, **shape)
    if resident:
        raise ValueError("this data set cannot be kept on the device; leave out resident=True")
    transform = create_eval_transform(**shape)
    return _worker_loader(
        dataset, order, transform, config.image_size, config.mean, config.std, device, workers, corrupt
    )


def resident_arrays(
    dataset: ImageDataset | ImageStream, resident: bool | None, corrupt: Corrupt
) -> tuple[Tensor, Tensor] | None:
    """All images and labels if they can be kept on the device."""
    if isinstance(dataset, ImageStream) or resident is False:
        return None
    try:
        arrays = dataset.arrays()
    except DataError:
        if corrupt == "raise":
            raise
        return None
    return arrays if arrays is not None and (resident or arrays[0].numel() <= RESIDENT_BYTES) else None


def _worker_loader(
    dataset: ImageDataset | ImageStream,
    order: BatchOrder,
    transform: Callable[..., Tensor],
    image_size: int,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device | str,
    workers: int,
    corrupt: Corrupt,
    random_erasing: float = 0.0,
) -> ImageLoader:
    reader = ImageReader(dataset, order, transform, image_size, len(mean))
    return ImageLoader(reader, device, mean, std, workers, corrupt, random_erasing)


def _per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    if len(values) not in (1, 3, channels):
        raise ValueError(f"mean and std have {len(values)} values, but the images have {channels} channels")
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels
