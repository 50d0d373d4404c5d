"""Small data sets that stay on the device as uint8 and are augmented there."""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tokamix.compile import capture_graph
from tokamix.data.batches import IndexOrder
from tokamix.data.images.augment import Augment, Erase
from tokamix.data.images.plan import AugmentPlan, copy_to_device
from tokamix.data.images.transforms import convert_channels, resize_and_crop
from tokamix.data.loading import Loader

if TYPE_CHECKING:
    from tokamix.recipes import Recipe

Batch = tuple[Tensor, ...]  # images and labels


class ResidentLoader(Loader):
    """Keeps all images (N, C, H, W) and labels (N,) on the device.

    Args:
        images: uint8 pixels.
        labels: of the images.
        order: which images form each batch.
        device: of data and batches.
        mean: of each channel, for pixels from 0 to 1.
        std: likewise.
        image_size: side of the batches' images.
        crop_pct: part of the resized image that is kept; not used where the recipe has `crop_scale`.
        crop_mode: "center" or "squash", see `resize_and_crop`; likewise.
        interpolation: for resizing.
        recipe: augmentation, for training.
    """

    def __init__(
        self,
        images: Tensor,
        labels: Tensor,
        order: IndexOrder,
        device: torch.device | str,
        mean: Sequence[float],
        std: Sequence[float],
        *,
        image_size: int,
        crop_pct: float,
        interpolation: str,
        crop_mode: str = "center",
        recipe: "Recipe | None" = None,
    ) -> None:
        super().__init__(order, device, mean, std)
        self.indices = order.indices
        self.image_size = image_size
        images = convert_channels(images, len(self.mean)).to(self.device)
        if not (recipe and recipe.crop_scale):
            images = resize_and_crop(images, image_size, crop_pct, interpolation, crop_mode)
        self.images, self.labels = images, labels.to(self.device)
        self.plan: AugmentPlan | None = None
        if recipe:
            erasing = getattr(recipe, "random_erasing", 0.0)
            erase = Erase(erasing, len(self.mean), self.device) if erasing else None
            size = (images.shape[-2], images.shape[-1])
            self.plan = AugmentPlan(order, self._create_augment(recipe), erase, size, image_size, self.device)
            self._augmented = replay_as_graph(self._augment) if self.device.type == "cuda" else self._augment

    def _create_augment(self, recipe: "Recipe") -> Any:
        return Augment(recipe, self.mean, self.device)

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """Batches (images (B, C, H, W), labels (B,)) of an epoch, from step `start` on."""
        order = copy_to_device(self.indices(number), self.device)
        for step in range(start, len(self)):
            part = self.order.positions(step)
            indices = order[part.start : part.stop : part.step]
            if self.plan:
                yield self._augmented(indices, self.plan.rows(number, step))
            else:
                yield self.normalize(self.images[indices]), self.labels[indices]

    def _augment(self, indices: Tensor, rows: Tensor) -> Batch:
        assert self.plan is not None
        assert self.plan.augment is not None
        table = self.plan.table(rows)
        images = self.normalize(self.plan.augment(self.images[indices], table))
        return (self.plan.erase(images, table) if self.plan.erase else images), self.labels[indices]


def replay_as_graph(function: Callable[..., Batch]) -> Callable[..., Batch]:
    """Record a function of CUDA tensors as a CUDA graph at its first call and replay it after that.

    One launch replaces hundreds. The tensors must have the same shapes in each call.
    """
    inputs: list[Tensor] = []
    outputs: Batch = ()
    graph = torch.cuda.CUDAGraph()

    def replay(*arguments: Tensor) -> Batch:
        nonlocal outputs
        if not inputs:
            inputs.extend(tensor.clone() for tensor in arguments)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                function(*inputs)  # libraries initialise at their first call, which cannot be recorded
            torch.cuda.current_stream().wait_stream(stream)
            with capture_graph(graph, capture_error_mode="thread_local"):  # other threads may pin memory meanwhile
                outputs = function(*inputs)
        for static, tensor in zip(inputs, arguments, strict=True):
            static.copy_(tensor)
        graph.replay()
        return tuple(tensor.clone() for tensor in outputs)  # the next replay overwrites them

    return replay
