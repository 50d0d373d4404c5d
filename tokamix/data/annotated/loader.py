"""Loaders of images with annotations, for segmentation and detection."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from tokamix.data.annotated.datasets import AnnotatedDataset, AnnotatedImage
from tokamix.data.annotated.transforms import augment_detect, augment_segment, resize_for_eval
from tokamix.data.batches import IndexOrder
from tokamix.data.decode import DataError
from tokamix.data.loading import BatchReader, Corrupt, WorkerLoader
from tokamix.data.rng import key
from tokamix.tasks import IGNORE_INDEX

if TYPE_CHECKING:
    from tokamix.inference import InferenceConfig
    from tokamix.recipes import Recipe

Targets = list[dict[str, Any]]


class _Layout:
    """Everything of a batch but its tensors; a class, because PyTorch turns tuples into lists when it pins memory."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)


class _Padded(_Layout):
    """The sizes (h, w) of images that are padded to one size."""


def create_train_loader(
    dataset: AnnotatedDataset,
    recipe: "Recipe",
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    workers: int = 0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    corrupt: Corrupt = "raise",
    masks: bool | None = None,
) -> "AnnotatedLoader":
    """Create a loader of shuffled, augmented and normalised batches; an incomplete last batch is dropped.

    `loader.epoch(number, start=0)` yields (images, targets):

    - segmentation: (B, 3, S, S) and (B, S, S) int64, where 255 is ignored. S is the recipe's crop_size; smaller images
      are padded with zeros and 255 on the right and below.
    - detection: a list of images (3, h, w) and a list of `{boxes (n, 4), labels (n,), masks (n, h, w) bool, image_id,
      index, size, scale}`, in pixels of that image. Crowds are left out. `size` is the original (H, W), `scale` the
      factors (x, y) from it, `index` the sample's number in the data set.

    Args:
        dataset: the training split of `create_dataset(...)`.
        recipe: task, sizes, augmentation and seed.
        batch_size: images of one batch of this process.
        rank: of this process.
        world_size: number of processes.
        device: of the batches.
        workers: processes that decode; 0 decodes in this one.
        mean: of each channel, for pixels from 0 to 1; default: ImageNet's.
        std: likewise.
        corrupt: for samples that cannot be decoded: "raise" a DataError that names the file, or "skip" it; the next
            good sample of the epoch takes its place.
        masks: whether targets have instance masks; default: for methods other than RetinaNet if the data set has them.
    """
    order = IndexOrder(len(dataset), batch_size, rank, world_size, True, recipe.seed)
    if not dataset.has_masks and (masks or recipe.method in ("mask_rcnn", "cascade_mask_rcnn")):
        raise DataError(f"{recipe.method} learns masks, but the annotations have only boxes; use retinanet")
    if masks is None:
        masks = recipe.task == "detect" and dataset.has_masks and recipe.method != "retinanet"
    reader = _TrainReader(dataset, order, recipe, masks)
    mean, std = mean or IMAGENET_DEFAULT_MEAN, std or IMAGENET_DEFAULT_STD
    return AnnotatedLoader(reader, device, mean, std, workers, corrupt)


def create_eval_loader(
    dataset: AnnotatedDataset,
    config: "InferenceConfig",
    *,
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    workers: int = 0,
    corrupt: Corrupt = "raise",
    masks: bool = False,
) -> "AnnotatedLoader":
    """Create a loader that yields every sample exactly once over all ranks, in order.

    `loader.epoch(0)` yields a list of images (3, h, w) and a list of targets:

    - segmentation: `{segmentation (H, W) int64, image_id, index, size, scale}`, where 255 is ignored;
    - detection: `{boxes (n, 4), labels (n,), crowd (n,), image_id, index, size, scale}`, boxes in pixels of the resized
      image, and `masks (n, H, W)` bool if requested.

    `size` is the original (H, W), which masks keep, `scale` the factors (x, y) from it, `index` the sample's number in
    the data set.

    Args:
        dataset: the validation split of `create_dataset(...)`.
        config: task, scale, interpolation, mean and std.
        batch_size: images of one batch of this process.
        rank: of this process.
        world_size: number of processes.
        device: of the batches.
        workers: processes that decode; 0 decodes in this one.
        corrupt: for samples that cannot be decoded: "raise" a DataError that names the file, or "skip" it.
        masks: whether targets have instance masks.
    """
    order = IndexOrder(len(dataset), batch_size, rank, world_size, False)
    reader = _EvalReader(dataset, order, config, masks)
    return AnnotatedLoader(reader, device, config.mean, config.std, workers, corrupt)


class AnnotatedLoader(WorkerLoader):
    """Decoding and transforms in worker processes, normalisation on the device."""

    def to_device(self, epoch: int, step: int, *parts: Any) -> Any:
        """Images and targets on the device."""
        layout, tensors = parts
        tensors = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
        if isinstance(layout, _Padded):
            images, classes = self.normalize(tensors[0]), tensors[1].long()
            for image, (height, width) in zip(images, layout.entries, strict=True):
                image[:, height:], image[:, :, width:] = 0, 0
            return images, classes
        targets = _unpack(layout, tensors)
        for target in targets:
            if "segmentation" in target:
                target["segmentation"] = target["segmentation"].long()
        return [self.normalize(target.pop("image")) for target in targets], targets


class _Reader(BatchReader):
    """Reads annotated images, packed into few tensors."""

    task: str

    def __init__(self, dataset: AnnotatedDataset, order: IndexOrder, masks: bool) -> None:
        super().__init__(dataset, order)
        self.masks = masks

    def decode(self, item: Any) -> tuple[int, AnnotatedImage]:
        """Decode a sample and return it with its index."""
        return item, self.dataset.sample(item, masks=self.masks)

    def collate(self, samples: list[tuple[int, int, Any]]) -> tuple[_Layout, list[Tensor]]:
        """Transform the samples and pack them."""
        return _pack([self._target(epoch, position, *sample) for epoch, position, sample in samples])

    @abstractmethod
    def transform(self, sample: AnnotatedImage, epoch: int, position: int) -> AnnotatedImage:
        """Augment or resize a sample."""

    def _target(self, epoch: int, position: int, index: int, sample: AnnotatedImage) -> dict[str, Any]:
        size = sample.size
        sample = self.transform(sample, epoch, position)
        target: dict[str, Any] = {"image": sample.image, "image_id": sample.image_id, "index": index, "size": size}
        target["scale"] = sample.size[1] / size[1], sample.size[0] / size[0]
        if self.task == "segment":
            return target | {"segmentation": sample.segmentation}
        target |= {"boxes": sample.boxes, "labels": sample.labels}
        if self.masks and sample.masks is not None:
            target["masks"] = sample.masks
        return target if self.train else target | {"crowd": sample.crowd}


class _TrainReader(_Reader):
    def __init__(self, dataset: AnnotatedDataset, order: IndexOrder, recipe: "Recipe", masks: bool) -> None:
        super().__init__(dataset, order, masks)
        self.recipe, self.task = recipe, recipe.task

    def transform(self, sample: AnnotatedImage, epoch: int, position: int) -> AnnotatedImage:
        """Augment a sample."""
        rng = np.random.default_rng(key(self.order.seed, epoch, position, "scene"))
        augment = augment_segment if self.task == "segment" else augment_detect
        return augment(sample, self.recipe, rng)

    def collate(self, samples: list[tuple[int, int, Any]]) -> tuple[_Layout, list[Tensor]]:
        """Augment the samples; those of a segmenter are padded to one size."""
        if self.task == "detect":
            return super().collate(samples)
        targets = [self._target(epoch, position, *sample) for epoch, position, sample in samples]
        side = self.recipe.crop_size
        images = torch.zeros(len(targets), 3, side, side, dtype=torch.uint8)
        classes = torch.full((len(targets), side, side), IGNORE_INDEX, dtype=torch.uint8)
        sizes = [tuple(target["image"].shape[-2:]) for target in targets]
        for n, (height, width) in enumerate(sizes):
            images[n, :, :height, :width] = targets[n]["image"]
            classes[n, :height, :width] = targets[n]["segmentation"]
        return _Padded(sizes), [images, classes]


class _EvalReader(_Reader):
    def __init__(self, dataset: AnnotatedDataset, order: IndexOrder, config: "InferenceConfig", masks: bool) -> None:
        super().__init__(dataset, order, masks)
        self.config, self.task = config, config.task

    def transform(self, sample: AnnotatedImage, epoch: int, position: int) -> AnnotatedImage:
        """Resize a sample."""
        return resize_for_eval(sample, self.config)


def _pack(targets: Targets) -> tuple[_Layout, list[Tensor]]:
    """Join all tensors of a batch to one per dtype: each tensor that leaves a worker costs a file handle."""
    layout: Targets = []
    flat: dict[torch.dtype, list[Tensor]] = {}
    for target in targets:
        layout.append(dict(target))
        for name, value in target.items():
            if isinstance(value, Tensor):
                flat.setdefault(value.dtype, []).append(value.reshape(-1))
                layout[-1][name] = value.dtype, value.shape
    return _Layout(layout), [torch.cat(parts) for parts in flat.values()]


def _unpack(layout: _Layout, tensors: list[Tensor]) -> Targets:
    """Undo `_pack`; the tensors are views."""
    flat = {tensor.dtype: tensor for tensor in tensors}
    used = dict.fromkeys(flat, 0)

    def take(dtype: torch.dtype, shape: torch.Size) -> Tensor:
        start = used[dtype]
        used[dtype] += shape.numel()
        return flat[dtype][start : used[dtype]].view(shape)

    return [
        {name: take(*v) if isinstance(v, tuple) and isinstance(v[0], torch.dtype) else v for name, v in target.items()}
        for target in layout.entries
    ]
