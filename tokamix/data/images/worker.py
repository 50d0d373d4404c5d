"""Images that are decoded and transformed in worker processes."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import default_collate
from torchvision.transforms.functional import to_pil_image

from tokamix.data.batches import BatchOrder
from tokamix.data.images.augment import Erase
from tokamix.data.images.datasets import ImageDataset
from tokamix.data.images.plan import AugmentPlan
from tokamix.data.images.streams import ImageStream
from tokamix.data.images.transforms import convert_channels
from tokamix.data.loading import BatchReader, Corrupt, WorkerLoader
from tokamix.data.rng import seed_everything

MIN_SIZE_FACTOR = 4  # JPEGs are decoded to at least this many times the image size, so that small crops stay sharp


class ImageReader(BatchReader):
    """Reads batches of uint8 images with labels.

    Args:
        dataset: the images.
        order: which images form each batch.
        transform: from a Pillow image to a uint8 tensor (C, H, W).
        image_size: side of the transformed images.
        channels: of the transformed images.
    """

    def __init__(
        self,
        dataset: ImageDataset | ImageStream,
        order: BatchOrder,
        transform: Callable[..., Tensor],
        image_size: int,
        channels: int,
    ) -> None:
        super().__init__(dataset, order)
        if channels not in (1, 3):
            raise ValueError(f"image files have 1 or 3 channels, not {channels}; use arrays of {channels} channels")
        self.transform, self.image_size = transform, image_size
        self.mode = "L" if channels == 1 else "RGB"

    def decode(self, item: Any) -> tuple[Image.Image, int]:
        """Decode an image and return it with its label."""
        image: Any
        min_size = MIN_SIZE_FACTOR * self.image_size
        if isinstance(self.dataset, ImageStream):
            image, label = self.dataset.decode(item, min_size)
        else:
            image, label = self.dataset.image(item, min_size), int(self.dataset.labels[item])
        if isinstance(image, Tensor):
            image = to_pil_image(convert_channels(image[None], 3)[0])
        return (image if image.mode == self.mode else image.convert(self.mode)), label

    def collate(self, samples: list[tuple[int, int, Any]]) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) and labels (B,)."""
        if not samples:
            return torch.empty(0), torch.empty(0, dtype=torch.int64)
        images = []
        for epoch, position, (image, _) in samples:
            if self.train:
                seed_everything(self.order.seed, epoch, position)
            images.append(self.transform(image))
        return default_collate(images), torch.tensor([label for *_, (_, label) in samples])


class ImageLoader(WorkerLoader):
    """Normalisation and random erasing on the device, the rest in worker processes."""

    def __init__(
        self,
        reader: ImageReader,
        device: torch.device | str,
        mean: Sequence[float],
        std: Sequence[float],
        workers: int,
        corrupt: Corrupt,
        random_erasing: float = 0.0,
    ) -> None:
        super().__init__(reader, device, mean, std, workers, corrupt)
        self.image_size = reader.image_size
        self.plan: AugmentPlan | None = None
        if random_erasing:
            erase = Erase(random_erasing, len(self.mean), self.device)
            self.plan = AugmentPlan(self.order, None, erase, (0, 0), self.image_size, self.device)

    def to_device(self, epoch: int, step: int, *parts: Any) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W), normalised, and labels (B,)."""
        images, labels = (tensor.to(self.device, non_blocking=True) for tensor in parts)
        images = self.normalize(images)
        if self.plan and self.plan.erase:
            images = self.plan.erase(images, self.plan.table(self.plan.rows(epoch, step)))
        return images, labels
