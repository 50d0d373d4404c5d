"""Multi-crop for self-supervised training: two global and several local crops of each image, each augmented alone.

As in DINO (arXiv 2104.14294): random crop and flip, colour jitter, grey, blur, and solarisation of the second global
crop. The parameters are drawn on the CPU, the colours are changed on the device. Data sets that are kept on the device
are cropped there too; others are cropped where they are decoded.

Differences from the published code: hue is a rotation in YIQ instead of a shift in HSV, which makes it one matrix, and
brightness, contrast and saturation change in this order instead of a random one.
"""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from PIL import Image
from torch import Tensor
from torchvision import transforms
from torchvision.transforms.functional import InterpolationMode, pil_to_tensor

from tokamix.data.batches import BatchOrder, IndexOrder, StreamOrder
from tokamix.data.images.augment import GREY, Table, _crops, _recoloured, _warped
from tokamix.data.images.datasets import ImageDataset
from tokamix.data.images.loader import resident_arrays
from tokamix.data.images.plan import AugmentPlan
from tokamix.data.images.resident import ResidentLoader
from tokamix.data.images.streams import ImageStream
from tokamix.data.images.worker import ImageLoader, ImageReader
from tokamix.data.loading import Corrupt, Loader

if TYPE_CHECKING:
    from tokamix.recipes import Recipe

JITTER, TO_GREY = 0.8, 0.2  # probabilities
BLUR = {"global": (1.0, 0.1), "local": (0.5,)}  # probability in the first, second, ... crop; the last one's for more
SOLARIZE = {"global": (0.0, 0.2), "local": (0.0,)}
TO_YIQ = torch.tensor([GREY, (0.595716, -0.274453, -0.321263), (0.211456, -0.522591, 0.311135)])


class Crops(NamedTuple):
    """Crops of one size."""

    name: str
    number: int
    size: int
    scale: tuple[float, float]


def list_crops(recipe: "Recipe") -> list[Crops]:
    """The global and the local crops of a recipe."""
    crops = [Crops("global", 2, recipe.image_size, recipe.crop_scale)]
    return crops + [Crops("local", recipe.local_crops, recipe.local_size, recipe.local_scale)] * bool(
        recipe.local_crops
    )


class MultiCrop:
    """A recipe's crops of uint8 images (B, C, H, W), as float images in [0, 255].

    Args:
        recipe: sizes and strengths.
        channels: of the images; hue is changed in RGB images only.
        device: of the images.
        cropped: the images are crops already, of which the colours are changed.
    """

    def __init__(self, recipe: "Recipe", channels: int, device: torch.device, cropped: bool = False) -> None:
        self.recipe, self.crops, self.cropped, self.is_rgb = recipe, list_crops(recipe), cropped, channels == 3
        weights = GREY if self.is_rgb else (1 / channels,) * channels
        self.grey = torch.tensor(weights, device=device)[:, None, None]

    def plan(self, n: int, size: tuple[int, int], draw: torch.Generator) -> Table:
        """Draw the parameters of all crops of n images of this size (H, W): columns (n, crops, ...)."""
        table: Table = {}
        for crops in self.crops:
            columns = self._colours(n, crops, draw)
            if not self.cropped:
                matrix = _crops(n * crops.number, size, crops.scale, draw)
                flip = torch.rand(len(matrix), generator=draw) < self.recipe.hflip
                matrix[:, :, 0] *= torch.where(flip, -1.0, 1.0)[:, None]  # flips the output's x
                columns["matrix"] = matrix[:, :2].unflatten(0, (n, crops.number))
            table |= {f"{crops.name}.{name}": values for name, values in columns.items()}
        return table

    def _colours(self, n: int, crops: Crops, draw: torch.Generator) -> Table:
        def chosen(*probabilities: float) -> Tensor:
            padded = torch.tensor([probabilities[min(i, len(probabilities) - 1)] for i in range(crops.number)])
            return torch.rand(n, crops.number, generator=draw) < padded

        def uniform(low: float, high: float) -> Tensor:
            return low + (high - low) * torch.rand(n, crops.number, generator=draw)

        jittered = chosen(JITTER)
        *factors, hue = self.recipe.color_jitter
        strengths = (uniform(max(0.0, 1 - factor), 1 + factor) for factor in factors)
        bright, contrast, saturation = (torch.where(jittered, strength, 1.0) for strength in strengths)
        table = {
            "keep": bright * contrast * saturation,
            "grey": bright * contrast * (1 - saturation),
            "mean": bright * (1 - contrast),
            "hue": _hue_matrices(torch.where(jittered, uniform(-hue, hue), 0.0)),
            "to_grey": chosen(TO_GREY).float(),
            "sigma": torch.where(chosen(*BLUR[crops.name]), uniform(*self.recipe.blur_sigma), 0.0),
            "threshold": torch.where(chosen(*SOLARIZE[crops.name]), 128.0, 256.0),
        }
        return table if self.is_rgb else {name: values for name, values in table.items() if name != "hue"}

    def __call__(self, images: Tensor | list[Tensor], table: Table) -> list[Tensor]:
        """The crops (crops * B, C, size, size) of each size, all images of the first crop first.

        Args:
            images: (B, C, H, W), or, if they are cropped, a tensor (crops * B, C, size, size) for each size.
            table: the result of `plan`, on the images' device.
        """
        return [
            self._crop(crops, images if isinstance(images, Tensor) else images[i], table)
            for i, crops in enumerate(self.crops)
        ]

    def _crop(self, crops: Crops, images: Tensor, table: Table) -> Tensor:
        prefix = f"{crops.name}."
        columns = {
            n.removeprefix(prefix): v.transpose(0, 1).flatten(0, 1) for n, v in table.items() if n.startswith(prefix)
        }
        x = images.float()
        if "matrix" in columns:
            x = x.repeat(crops.number, 1, 1, 1)
            # if a crop of average size is shrunk, several samples are averaged for each pixel
            times = max(1, round(min(x.shape[-2:]) * math.sqrt(sum(crops.scale) / 2) / crops.size))
            x = _warped(x, columns["matrix"], crops.size, self.recipe.interpolation, None, times)
        numbers = {name: values[:, None, None, None] for name, values in columns.items() if values.ndim == 1}
        x = _recoloured(x, {name: numbers[name] for name in ("keep", "grey", "mean")}, self.grey)
        if "hue" in columns:
            x = torch.einsum("bij,bjhw->bihw", columns["hue"], x).round().clamp(0, 255)
        last = {"keep": 1 - numbers["to_grey"], "grey": numbers["to_grey"]}
        return _recoloured(x, last | {name: numbers[name] for name in ("sigma", "threshold")}, self.grey)


class CropViews:
    """Random crops and flips of one decoded image, as uint8 tensors (C, size, size), in the order of `MultiCrop`."""

    def __init__(self, recipe: "Recipe") -> None:
        mode, flip = InterpolationMode(recipe.interpolation), transforms.RandomHorizontalFlip(recipe.hflip)
        self.views = [
            transforms.Compose([transforms.RandomResizedCrop(crops.size, crops.scale, interpolation=mode), flip])
            for crops in list_crops(recipe)
            for _ in range(crops.number)
        ]

    def __call__(self, image: Image.Image) -> list[Tensor]:
        """Crop an image."""
        return [pil_to_tensor(view(image)) for view in self.views]


class ResidentCropsLoader(ResidentLoader):
    """Multi-crop batches of images that stay on the device."""

    def _create_augment(self, recipe: "Recipe") -> MultiCrop:
        return MultiCrop(recipe, len(self.mean), self.device)

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """Batches (crops of each size (crops * B, C, H, W), labels (B,)) of an epoch, from step `start` on."""
        for *crops, labels in super().epoch(number, start):
            yield crops, labels

    def _augment(self, indices: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
        assert self.plan is not None
        crops = self.plan.augment(self.images[indices], self.plan.table(rows))
        return *map(self.normalize, crops), self.labels[indices]


class DecodedCropsLoader(ImageLoader):
    """Multi-crop batches of images that are decoded and cropped in worker processes; colours change on the device."""

    def __init__(self, recipe: "Recipe", *args: Any) -> None:
        super().__init__(*args)
        self.counts = [crops.number for crops in list_crops(recipe)]
        augment = MultiCrop(recipe, len(self.mean), self.device, cropped=True)
        self.plan = AugmentPlan(self.order, augment, None, (0, 0), self.image_size, self.device)

    def to_device(self, epoch: int, step: int, *parts: Any) -> Any:
        """Crops of each size (crops * B, C, H, W), normalised, and labels (B,)."""
        assert self.plan is not None
        views, labels = ([view.to(self.device, non_blocking=True) for view in parts[0]], parts[1])
        ends = [sum(self.counts[: i + 1]) for i in range(len(self.counts))]
        cropped = [torch.cat(views[end - count : end]) for end, count in zip(ends, self.counts, strict=True)]
        crops = self.plan.augment(cropped, self.plan.table(self.plan.rows(epoch, step)))
        return [self.normalize(x) for x in crops], labels.to(self.device, non_blocking=True)


def create_multicrop_loader(
    dataset: ImageDataset | ImageStream,
    recipe: "Recipe",
    *,
    mean: tuple[float, ...],
    std: tuple[float, ...],
    batch_size: int,
    rank: int = 0,
    world_size: int = 1,
    device: torch.device | str = "cpu",
    workers: int = 0,
    corrupt: Corrupt = "raise",
) -> Loader:
    """Create a loader of shuffled multi-crop batches; an incomplete last batch is dropped.

    `loader.epoch(number, start=0)` yields ([global crops (2 * B, C, H, W), local crops (n * B, C, h, w)], labels (B,)).

    Args:
        dataset: the training split of `create_dataset(...)`.
        recipe: crops, augmentation and seed.
        mean: of each channel, for pixels from 0 to 1.
        std: likewise.
        batch_size: images of one batch of this process.
        rank: of this process.
        world_size: number of processes.
        device: of the batches.
        workers: processes that decode; data sets that are kept on the device need none.
        corrupt: for images that cannot be decoded: "raise" an error, or "skip" them.
    """
    common = (len(dataset), batch_size, rank, world_size, True, recipe.seed)
    order: BatchOrder
    if isinstance(dataset, ImageStream):
        order = StreamOrder(*common, stream=dataset, spare=corrupt == "skip")
    else:
        order = IndexOrder(*common)
    arrays = resident_arrays(dataset, None, corrupt)
    if arrays is not None and isinstance(order, IndexOrder):
        shape: Any = {"image_size": recipe.image_size, "crop_pct": 1.0, "interpolation": recipe.interpolation}
        return ResidentCropsLoader(*arrays, order, device, mean, std, **shape, recipe=recipe)
    reader = ImageReader(dataset, order, CropViews(recipe), recipe.image_size, len(mean))  # type: ignore[arg-type]
    return DecodedCropsLoader(recipe, reader, device, mean, std, workers, corrupt)


def _hue_matrices(turns: Tensor) -> Tensor:
    """Matrices (..., 3, 3) on RGB pixels that turn the hue by fractions of a circle; the brightness stays."""
    angle = 2 * math.pi * turns
    zero, one = torch.zeros_like(angle), torch.ones_like(angle)
    rows = [one, zero, zero, zero, angle.cos(), -angle.sin(), zero, angle.sin(), angle.cos()]
    rotation = torch.stack(rows, -1).unflatten(-1, (3, 3))
    return torch.linalg.inv(TO_YIQ) @ rotation @ TO_YIQ
