"""Batches of scenes for segmentation and detection, the same ones however the work is spread; see `loaders`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from torch import Tensor

from tokamix.data.annotated.datasets import AnnotatedDataset, AnnotatedImage, Task
from tokamix.data.annotated.transforms import shown, train_detect, train_segment
from tokamix.data.decode import DataError
from tokamix.data.images.loader import Reader, Setup, WorkerLoader, check_batches
from tokamix.data.rng import key
from tokamix.tasks import IGNORE_INDEX

if TYPE_CHECKING:
    from tokamix.recipes import Recipe

Targets = list[dict[str, Any]]


class _Layout:
    """What is known of each scene besides its tensors; pinning memory for a GPU would make lists of a list's tuples."""

    def __init__(self, entries: list[Any]) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)


def create_annotated_loader(
    dataset: AnnotatedDataset,
    recipe: "Recipe",
    task: Task,
    *,
    train: bool,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    device: torch.device | str = "cpu",
    workers: int = 0,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    corrupt: Literal["raise", "skip"] = "raise",
    masks: bool | None = None,
) -> "AnnotatedLoader":
    """Batches of scenes as the recipe augments them, normalised, on the device.

    `loader.epoch(number, start=0)` yields (images, targets):

    - to train a segmenter: (B, 3, S, S) and (B, S, S) int64, where 255 counts for nothing. S is the recipe's crop_size;
      what is smaller is filled up with zeros and 255 on the right and below.
    - to evaluate one: a list of images (3, h, w) and a list of `{segmentation (H, W) int64, size, scale, index, ...}`.
    - for a detector: a list of images (3, h, w) and a list of `{boxes (n, 4), labels (n,), masks (n, h, w) bool if they
      are asked for, image_id, index, size, scale}`, in pixels of that image. In evaluation there is `crowd (n,)`, too;
      in training, crowds are left out.

    `size` is the original (H, W), `scale` the two factors (x, y) by which the image was enlarged, `index` the scene's
    place in the data set, and `segmentation` in evaluation has the original size.

    Args:
        dataset: the training or validation part of `create_dataset(...)`.
        recipe: sizes, augmentation and seed.
        task: "segment" or "detect".
        train: shuffle and augment, and leave an incomplete last batch out; otherwise every scene comes exactly once
            over all ranks, in order.
        batch_size: scenes of one batch of this process.
        rank: of this process.
        world: number of processes.
        device: where the batches go.
        workers: processes that decode; 0 decodes in this one.
        mean: of each channel, for pixels from 0 to 1; ImageNet's by default.
        std: likewise.
        corrupt: what to do with a scene that cannot be decoded: raise a DataError that names it, or skip it.
        masks: whether things have masks in the targets; by default, in the training of a method other than RetinaNet
            where the data set has them.
    """
    check_batches(len(dataset), train, batch_size, rank, world)
    if train and not dataset.has_masks and (masks or recipe.method in ("mask_rcnn", "cascade_mask_rcnn")):
        raise DataError(f"{recipe.method} learns masks, but the annotations have boxes alone; use retinanet")
    if masks is None:
        masks = train and task == "detect" and dataset.has_masks and recipe.method != "retinanet"
    means, stds = tuple(mean or IMAGENET_DEFAULT_MEAN), tuple(std or IMAGENET_DEFAULT_STD)
    setup = Setup(recipe, train, batch_size, rank, world, torch.device(device), means, stds)
    return AnnotatedLoader(dataset, setup, task, workers, corrupt, masks)


class AnnotatedLoader(WorkerLoader):
    """What `create_annotated_loader` gives; scenes are decoded and changed in workers, and normalised on the device."""

    def __init__(
        self,
        dataset: AnnotatedDataset,
        setup: Setup,
        task: Task,
        workers: int,
        corrupt: Literal["raise", "skip"],
        masks: bool,
    ) -> None:
        super().__init__(dataset, setup, workers, corrupt, _SceneReader(dataset, setup, task, masks))
        self.task, self.erase = task, None

    def _finished(self, epoch: int, step: int, *parts: Any) -> Any:
        layout, tensors = parts
        tensors = [tensor.to(self.device, non_blocking=True) for tensor in tensors]
        if self.train and self.task == "segment":
            images, classes = self.finish(tensors[0], {}), tensors[1].long()
            for image, (height, width) in zip(images, layout.entries, strict=True):
                image[:, height:], image[:, :, width:] = 0, 0
            return images, classes
        targets = _unpacked(layout, tensors)
        for target in targets:
            if "segmentation" in target:
                target["segmentation"] = target["segmentation"].long()
        return [self.finish(target.pop("image"), {}) for target in targets], targets


class _SceneReader(Reader):
    """Scenes as the recipe changes them, packed into few tensors."""

    def __init__(self, dataset: AnnotatedDataset, setup: Setup, task: Task, masks: bool) -> None:
        super().__init__(dataset, setup)
        self.task, self.masks = task, masks

    def sample(self, item: Any) -> tuple[int, AnnotatedImage]:
        """A decoded scene, and its place in the data set."""
        return item, self.dataset.scene(item, masks=self.masks)

    def batch(self, samples: list[tuple[int, int, Any]]) -> tuple[_Layout, list[Tensor]]:
        """The scenes of a batch."""
        targets = [self._target(epoch, position, *sample) for epoch, position, sample in samples]
        if not (self.train and self.task == "segment"):
            return _packed(targets)
        side = self.recipe.crop_size
        images = torch.zeros(len(targets), 3, side, side, dtype=torch.uint8)
        classes = torch.full((len(targets), side, side), IGNORE_INDEX, dtype=torch.uint8)
        sizes = [tuple(target["image"].shape[-2:]) for target in targets]
        for n, (height, width) in enumerate(sizes):
            images[n, :, :height, :width] = targets[n]["image"]
            classes[n, :height, :width] = targets[n]["segmentation"]
        return _Layout(sizes), [images, classes]

    def _target(self, epoch: int, position: int, index: int, scene: AnnotatedImage) -> dict[str, Any]:
        size = scene.size
        if self.train:
            draw = np.random.default_rng(key(self.recipe.seed, epoch, position, "scene"))
            scene = (train_segment if self.task == "segment" else train_detect)(scene, self.recipe, draw)
        else:
            scene = shown(scene, self.recipe)
        target: dict[str, Any] = {"image": scene.image, "image_id": scene.image_id, "index": index, "size": size}
        target["scale"] = scene.size[1] / size[1], scene.size[0] / size[0]
        if self.task == "segment":
            return target | {"segmentation": scene.segmentation}
        target |= {"boxes": scene.boxes, "labels": scene.labels}
        if self.masks and scene.masks is not None:
            target["masks"] = scene.masks
        return target if self.train else target | {"crowd": scene.crowd}


def _packed(targets: Targets) -> tuple[_Layout, list[Tensor]]:
    """All tensors of a batch in one for each kind of number: each costs a file handle on its way out of a worker."""
    layout: Targets = []
    flat: dict[torch.dtype, list[Tensor]] = {}
    for target in targets:
        layout.append(dict(target))
        for name, value in target.items():
            if isinstance(value, Tensor):
                flat.setdefault(value.dtype, []).append(value.reshape(-1))
                layout[-1][name] = value.dtype, value.shape  # in its place
    return _Layout(layout), [torch.cat(parts) for parts in flat.values()]


def _unpacked(layout: _Layout, tensors: list[Tensor]) -> Targets:
    """What `_packed` was given; its tensors are views."""
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
