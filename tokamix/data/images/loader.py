"""Batches for training and evaluation, the same ones however the work is spread and wherever it starts.

Everything random is a function of (seed, epoch, position in the epoch). So batch k of an epoch is the same with any
number of workers, and when training resumes at k, where nothing before it is decoded. With several processes, each
global batch is dealt out: rank r takes positions r, r + world, ... of it.
"""

import logging
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from PIL import Image
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD, create_transform
from torch import Tensor
from torch.utils.data import DataLoader, default_collate, get_worker_info
from torchvision import transforms
from torchvision.transforms.functional import InterpolationMode, to_pil_image

from tokamix.data.decode import DataError
from tokamix.data.images.augment import Augment, Erase, Table, can_batch
from tokamix.data.images.datasets import ImageDataset
from tokamix.data.images.streams import ImageStream
from tokamix.data.rng import generator, kept_state, seed_everything

if TYPE_CHECKING:
    from tokamix.recipes import Recipe

_log = logging.getLogger("tokamix")
Batch = tuple[Tensor, Tensor]
RESIDENT_BYTES = 4 << 30  # a set up to this size lives on the device
CROP_PCT = 0.875  # timm's, for photos; pictures held as arrays are small, and all of them is shown
REPLACEMENTS = 64  # pictures that are tried for one that cannot be decoded
PLANNED = 16  # batches whose augmentation is decided together
SHRINK = 4  # a JPEG is decoded to no less than this many times the image's size, so that small crops stay sharp


def create_loader(
    dataset: ImageDataset | ImageStream,
    recipe: "Recipe",
    *,
    train: bool,
    batch_size: int,
    rank: int = 0,
    world: int = 1,
    device: torch.device | str = "cpu",
    workers: int = 0,
    in_chans: int = 3,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    corrupt: Literal["raise", "skip"] = "raise",
    resident: bool | None = None,
) -> "Loader":
    """Batches of a data set as the recipe augments them, normalised, on the device.

    Args:
        dataset: the training or validation part of `create_dataset(...)`.
        recipe: sizes, augmentation and seed.
        train: shuffle and augment, and leave an incomplete last batch out; otherwise every picture comes exactly once
            over all ranks, in order, and the last batch may be smaller (for some ranks, it may be missing).
        batch_size: pictures of one batch of this process.
        rank: of this process.
        world: number of processes.
        device: where the batches go.
        workers: processes that decode; 0 decodes in this one. Sets that live on the device need none.
        in_chans: channels of the batches; grey pictures are repeated, coloured ones made grey.
        mean: of each channel, for pixels from 0 to 1; ImageNet's by default.
        std: likewise.
        corrupt: what to do with a picture that cannot be decoded: raise a DataError that names it, or skip it, which is
            logged and counted in `loader.skipped`; in training the next good picture of the epoch (of a stream: of the
            batch) takes its place.
        resident: keep the whole set on the device and augment it there; by default where it is small enough and the
            recipe's augmentation exists for batches.
    """
    check_batches(len(dataset), train, batch_size, rank, world)
    mean, std = (_channels(values, in_chans) for values in (mean or IMAGENET_DEFAULT_MEAN, std or IMAGENET_DEFAULT_STD))
    setup = Setup(recipe, train, batch_size, rank, world, torch.device(device), mean, std)
    possible = not isinstance(dataset, ImageStream) and (not train or can_batch(recipe.augment))
    try:
        arrays = dataset.arrays() if possible and resident is not False else None
    except DataError:
        if corrupt == "raise":
            raise
        arrays = None
    if arrays is not None and (resident or arrays[0].numel() <= RESIDENT_BYTES):
        return ResidentLoader(*arrays, setup)
    if resident:
        raise ValueError("this data set or augmentation cannot live on the device; leave `resident` to the loader")
    return WorkerLoader(dataset, setup, workers, corrupt)


def replayed(function: Callable[..., Batch]) -> Callable[..., Batch]:
    """A function of tensors on a GPU as one launch instead of hundreds: recorded at its first call, then replayed.

    The tensors must have the same shapes in each call.
    """
    inputs: list[Tensor] = []
    outputs: Batch = ()  # type: ignore[assignment]
    graph = torch.cuda.CUDAGraph()

    def replay(*given: Tensor) -> Batch:
        nonlocal outputs
        if not inputs:
            inputs.extend(tensor.clone() for tensor in given)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                function(*inputs)  # what libraries set up at their first call cannot be recorded
            torch.cuda.current_stream().wait_stream(stream)
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads may pin memory meanwhile
                outputs = function(*inputs)
        for mine, tensor in zip(inputs, given, strict=True):
            mine.copy_(tensor)
        graph.replay()
        return tuple(tensor.clone() for tensor in outputs)  # type: ignore[return-value]  # theirs are written again

    return replay


def check_batches(count: int, train: bool, batch_size: int, rank: int, world: int) -> None:
    """Raise where so many pictures give no batch."""
    if batch_size < 1 or not 0 <= rank < world:
        raise ValueError(f"a batch of {batch_size} for rank {rank} of {world} processes cannot be made")
    if count == 0:
        raise DataError(f"there is nothing to {'train on' if train else 'evaluate'}: the data set is empty")
    if train and count < batch_size * world:
        raise ValueError(
            f"{count} training pictures do not fill one batch of {batch_size * world}; set batch_size lower"
        )


def _channels(values: Sequence[float], channels: int) -> tuple[float, ...]:
    if len(values) not in (1, 3, channels):
        raise ValueError(f"mean and std have {len(values)} values, but the images {channels} channels")
    return tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels


def shuffled(count: int, recipe: "Recipe", epoch: int) -> Tensor:
    """Which of so many pictures stands at each position of an epoch of training."""
    order = torch.randperm(count, generator=generator(recipe.seed, epoch, "order"))
    # repeated augmentation: copies stand side by side, so that several ranks get one each; an epoch stays as long
    copies = getattr(recipe, "repeated_augmentation", 1)  # classifiers only
    return order.repeat_interleave(copies)[:count] if copies > 1 else order


@dataclass(frozen=True)
class Setup:
    """What every loader needs to know; see `create_loader`."""

    recipe: "Recipe"
    train: bool
    batch_size: int
    rank: int
    world: int
    device: torch.device
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Loader(ABC):
    """What `create_loader` gives: `len()` is the number of steps of an epoch on this rank."""

    def __init__(self, size: int, setup: Setup) -> None:
        self.dataset_size, self.recipe, self.train = size, setup.recipe, setup.train
        self.batch_size, self.rank, self.world = setup.batch_size, setup.rank, setup.world
        self.mean, self.device = setup.mean, setup.device
        self.skipped: dict[str, str] = {}  # pictures that could not be decoded, and why
        self.planned: tuple[tuple[int, int], Tensor] = (-1, -1), torch.empty(0)  # the block of batches, and its plan
        self.columns: dict[str, torch.Size] = {}
        deviation = torch.tensor(setup.std, device=self.device)[:, None, None]
        self.scale = 1 / (255 * deviation)
        self.shift = -torch.tensor(self.mean, device=self.device)[:, None, None] / deviation
        probability = getattr(self.recipe, "random_erasing", 0) if self.train else 0
        self.erase = Erase(probability, len(self.mean), self.device) if probability else None

    def __len__(self) -> int:
        steps, rest = divmod(self.dataset_size, self.batch_size * self.world)
        return steps if self.train else steps + (self.rank < rest)

    @abstractmethod
    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Batches (images (B, C, H, W) normalised, labels (B,)) of an epoch, from step `start` on."""

    def onward(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Batches of this epoch, from step `start` on, and of all that follow it."""
        while True:
            yield from self.epoch(epoch, start)
            epoch, start = epoch + 1, 0

    def order(self, epoch: int) -> Tensor:
        """Which picture stands at each position of an epoch."""
        return shuffled(self.dataset_size, self.recipe, epoch) if self.train else torch.arange(self.dataset_size)

    def positions(self, step: int) -> range:
        """The positions of this rank in a global batch."""
        start = step * self.batch_size * self.world
        return range(start + self.rank, min(start + self.batch_size * self.world, self.dataset_size), self.world)

    def move(self, tensor: Tensor) -> Tensor:
        """A copy on the device, which nobody waits for."""
        if self.device.type == "cuda" and not tensor.is_cuda:
            tensor = tensor.contiguous().pin_memory()
        return tensor.to(self.device, non_blocking=True)

    def finish(self, images: Tensor, table: Table) -> Tensor:
        """Normalise pixels from 0 to 255, and erase."""
        images = torch.addcmul(self.shift, images.float(), self.scale)
        return self.erase(images, table) if self.erase else images

    def plan(self, epoch: int, step: int, augment: Augment | None, size: tuple[int, int]) -> Tensor:
        """What happens to each image of a batch, on the device: the columns of a table, side by side (B, numbers).

        Many batches are planned at once, which takes hardly longer than one.
        """
        block, step = divmod(step, PLANNED)
        if self.planned[0] != (epoch, block):
            draw = generator(self.recipe.seed, epoch, block, "augment")
            n = PLANNED * self.batch_size * self.world
            table = augment.plan(n, size, draw) if augment else {}
            if self.erase:
                table |= self.erase.plan(n, (self.recipe.image_size,) * 2, draw)
            self.columns = {name: values.shape[1:] for name, values in table.items()}
            flat = torch.cat([values.flatten(1) for values in table.values()], 1) if table else torch.empty(n, 0)
            self.planned = (epoch, block), self.move(flat[self.rank :: self.world])
        return self.planned[1][step * self.batch_size :][: self.batch_size]

    def table(self, plan: Tensor) -> Table:
        """The columns of a plan by their names."""
        parts = plan.split([shape.numel() for shape in self.columns.values()], 1) if self.columns else ()
        return {name: part.unflatten(1, shape) for (name, shape), part in zip(self.columns.items(), parts, strict=True)}


class ResidentLoader(Loader):
    """The whole set as uint8 on the device, augmented there: for sets of small pictures."""

    def __init__(self, images: Tensor, labels: Tensor, setup: Setup) -> None:
        super().__init__(len(images), setup)
        recipe = self.recipe
        images = _recoded(images, len(self.mean)).to(self.device)
        if not (self.train and recipe.crop_scale):
            images = _fitted(images, recipe.image_size, recipe.crop_pct or 1.0, recipe.interpolation)
        self.images, self.labels = images, labels.to(self.device)
        self.augment = Augment(recipe, self.mean, self.device) if self.train else None
        self.augmented = replayed(self._augmented) if self.device.type == "cuda" else self._augmented

    def epoch(self, number: int, start: int = 0) -> Iterator[Batch]:
        """Batches of an epoch, from step `start` on."""
        order = self.move(self.order(number))
        size = (self.images.shape[-2], self.images.shape[-1])
        for step in range(start, len(self)):
            part = self.positions(step)
            chosen = order[part.start : part.stop : part.step]
            if self.augment:
                yield self.augmented(chosen, self.plan(number, step, self.augment, size))
            else:
                yield self.finish(self.images[chosen], {}), self.labels[chosen]

    def _augmented(self, chosen: Tensor, plan: Tensor) -> Batch:
        table = self.table(plan)
        return self.finish(self.augment(self.images[chosen], table), table), self.labels[chosen]  # type: ignore[misc]


class WorkerLoader(Loader):
    """Decoding and timm's transforms in worker processes; normalisation and erasing on the device, one batch ahead.

    A stream has no random access: its batches are read in this process, encoded as they are, and dealt to the
    workers, so they do not depend on how many there are. To resume at a step, the stream is read up to it, but not
    decoded.
    """

    def __init__(
        self,
        dataset: Any,
        setup: Setup,
        workers: int,
        corrupt: Literal["raise", "skip"],
        reader: "Reader | None" = None,
    ) -> None:
        super().__init__(len(dataset), setup)
        self.dataset, self.corrupt = dataset, corrupt
        self.batches = _Batches(self)
        self.loader: DataLoader[Any] = DataLoader(
            reader or _PictureReader(dataset, setup),  # type: ignore[arg-type]  # whatever has [...] will do
            batch_size=None,
            sampler=self.batches,
            num_workers=workers,
            collate_fn=_as_is,
            generator=torch.Generator(),  # or it would draw a number from the training loop's
            pin_memory=self.device.type == "cuda",
            persistent_workers=workers > 0,
        )

    def __len__(self) -> int:
        if isinstance(self.dataset, ImageStream) and not self.train:
            return math.ceil(self.dataset.share(self.rank, self.world) / self.batch_size)
        return super().__len__()

    def positions(self, step: int) -> range:
        """The positions of this rank in a global batch; a stream ends where it ends."""
        if isinstance(self.dataset, ImageStream) and not self.train:
            return range(step * self.batch_size, (step + 1) * self.batch_size)
        return super().positions(step)

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """Batches of an epoch, from step `start` on."""
        return self._on_device(number, start, endless=False)

    def onward(self, epoch: int, start: int = 0) -> Iterator[Any]:
        """Batches of this epoch, from step `start` on, and of all that follow it: the workers never pause."""
        return self._on_device(epoch, start, endless=True)

    def _on_device(self, epoch: int, start: int, endless: bool) -> Iterator[Any]:
        self.batches.epoch, self.batches.start, self.batches.endless = epoch, start, endless
        numbered = enumerate(self._checked(self.loader), epoch * len(self) + start)
        decoded = ((divmod(number, len(self)), parts) for number, parts in numbered if len(parts[0]))
        if self.device.type != "cuda":
            for moment, parts in decoded:
                yield self._finished(*moment, *parts)
            return
        stream = torch.cuda.Stream(self.device)
        ready: Any = None
        for moment, parts in decoded:
            with torch.cuda.stream(stream):
                following = self._finished(*moment, *parts)
            if ready is not None:
                yield ready
            torch.cuda.current_stream(self.device).wait_stream(stream)
            for tensor in _tensors(following):
                tensor.record_stream(torch.cuda.current_stream(self.device))
            ready = following
        if ready is not None:
            yield ready

    def _finished(self, epoch: int, step: int, *parts: Any) -> Any:
        """A batch on the device from what the reader made."""
        images, labels = (t.to(self.device, non_blocking=True) for t in parts)
        table = self.table(self.plan(epoch, step, None, (0, 0))) if self.erase else {}
        return self.finish(images, table), labels

    def _checked(self, loader: Iterable[Any]) -> Iterator[Any]:
        """Batches without the pictures that could not be decoded, or an error in one sentence."""
        try:
            for *parts, problems in loader:
                for name, problem in problems.items():
                    if self.corrupt == "raise":
                        raise DataError(f"{problem}; remove it, or skip such pictures (--corrupt skip, corrupt='skip')")
                    if name not in self.skipped:
                        _log.warning("skipped: %s", problem)
                        self.skipped[name] = problem
                if self.train and not len(parts[0]):
                    reason = next(iter(problems.values()), "the data ended before its length")
                    raise DataError(f"too many pictures cannot be decoded: {reason}")
                yield parts
        except RuntimeError as error:
            if "DataLoader worker" in str(error):
                raise RuntimeError(
                    f"a data worker died ({str(error).splitlines()[0]}); too little memory is the usual cause:"
                    " use fewer workers or a smaller batch"
                ) from error
            raise


class _Batches:
    """What the workers are told to read: for each step a list of (epoch, position, index or encoded picture)."""

    def __init__(self, loader: WorkerLoader) -> None:
        # with a circle of references, workers would outlive their loader, and each be waited for
        self.loader, self.epoch, self.start, self.endless = weakref.proxy(loader), 0, 0, False

    def __iter__(self) -> Iterator[list[tuple[int, int, Any]]]:
        epoch, start = self.epoch, self.start
        yield from self._of(epoch, start)
        while self.endless:
            epoch += 1
            yield from self._of(epoch, 0)

    def _of(self, epoch: int, start: int) -> Iterator[list[tuple[int, int, Any]]]:
        loader, dataset = self.loader, self.loader.dataset
        if isinstance(dataset, ImageStream):
            read = dataset.read(loader.recipe.seed, epoch, loader.rank, loader.world, shuffle=loader.train)
            for step in range(len(loader)):
                batch = [(epoch, p, item) for p, item in zip(loader.positions(step), read, strict=False)]
                if step >= start:
                    yield batch
            return
        order = loader.order(epoch)
        for step in range(start, len(loader)):
            yield [(epoch, p, int(order[p])) for p in loader.positions(step)]

    def __len__(self) -> int:
        return len(self.loader) - self.start


class Reader(ABC):
    """Makes batches in a worker; lives there, so it holds nothing of the device."""

    def __init__(self, dataset: Any, setup: Setup) -> None:
        self.dataset, self.recipe, self.train = dataset, setup.recipe, setup.train

    @abstractmethod
    def sample(self, item: Any) -> Any:
        """What an index of the data set, or an encoded picture of a stream, stands for."""

    @abstractmethod
    def batch(self, samples: list[tuple[int, int, Any]]) -> tuple[Any, ...]:
        """The parts of a batch from its (epoch, position, sample); the first part is as long as the batch."""

    def __getitem__(self, items: list[tuple[int, int, Any]]) -> tuple[Any, ...]:
        if get_worker_info() is None:
            with kept_state():
                return self._read(items)
        return self._read(items)

    def _read(self, items: list[tuple[int, int, Any]]) -> tuple[Any, ...]:
        """The parts of a batch, and what could not be decoded: its name and why."""
        problems: dict[str, str] = {}
        samples: list[tuple[int, int, Any]] = []
        for n, (epoch, position, item) in enumerate(items):
            sample = self._tried(item, problems)
            if sample is None and self.train:
                others = (self._tried(other, problems) for other in self._following(items, n))
                sample = next((other for other in others if other is not None), None)
                if sample is None:
                    return *self.batch([]), problems
            if sample is not None:
                samples.append((epoch, position, sample))
        return *self.batch(samples), problems

    def _tried(self, item: Any, problems: dict[str, str]) -> Any:
        """The sample, or None and a problem more."""
        try:
            return self.sample(item)
        except DataError as error:
            problems[self.dataset.name_of(item)] = str(error)
            return None

    def _following(self, items: list[tuple[int, int, Any]], n: int) -> Iterator[Any]:
        """What may take the place of item n, the nearest first: what follows in the epoch, of a stream in the batch."""
        if isinstance(self.dataset, ImageStream):
            yield from (item for *_, item in [*items[n + 1 :], *items[:n]])
            return
        epoch, position, _ = items[n]
        order = shuffled(len(self.dataset), self.recipe, epoch)
        for place in range(position + 1, position + min(len(order), 1 + REPLACEMENTS)):
            yield int(order[place % len(order)])


class _PictureReader(Reader):
    """Batches of uint8 images with labels, by timm's transforms."""

    def __init__(self, dataset: ImageDataset | ImageStream, setup: Setup) -> None:
        super().__init__(dataset, setup)
        channels = len(setup.mean)
        if channels not in (1, 3):
            raise ValueError(f"picture files have 1 or 3 channels, not {channels}; use arrays of {channels} channels")
        self.mode = "L" if channels == 1 else "RGB"
        self.transform = _transform(setup.recipe, setup.train, setup.mean)
        self.size, self.seed = setup.recipe.image_size, setup.recipe.seed

    def sample(self, item: Any) -> tuple[Image.Image, int]:
        """A decoded picture and its label."""
        picture: Any
        if isinstance(self.dataset, ImageStream):
            picture, label = self.dataset.decode(item, SHRINK * self.size)
        else:
            picture, label = self.dataset.picture(item, SHRINK * self.size), int(self.dataset.labels[item])
        if isinstance(picture, Tensor):
            picture = to_pil_image(_recoded(picture[None], 3)[0])
        return (picture if picture.mode == self.mode else picture.convert(self.mode)), label

    def batch(self, samples: list[tuple[int, int, Any]]) -> tuple[Tensor, Tensor]:
        """Images (B, C, H, W) and labels (B,)."""
        if not samples:
            return torch.empty(0), torch.empty(0, dtype=torch.int64)
        images = []
        for epoch, position, (picture, _) in samples:
            if self.train:
                seed_everything(self.seed, epoch, position)
            images.append(self.transform(picture))
        return default_collate(images), torch.tensor([label for *_, (_, label) in samples])


def _tensors(batch: Any) -> Iterator[Tensor]:
    """All tensors of a batch of any form."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, dict | list | tuple):
        for part in batch.values() if isinstance(batch, dict) else batch:
            yield from _tensors(part)


def _as_is(batch: Any) -> Any:
    return batch


def _transform(recipe: "Recipe", train: bool, mean: Sequence[float]) -> Any:
    """timm's transforms of one picture, up to a uint8 tensor."""
    size, crop = recipe.image_size, recipe.crop_pct or CROP_PCT
    shown = create_transform(
        size, interpolation=recipe.interpolation, crop_pct=crop, use_prefetcher=True, normalize=False
    )
    if not train:
        return shown
    augment = "3a" if recipe.augment == "3-augment" else recipe.augment
    first, second, last = create_transform(
        size,
        is_training=True,
        scale=recipe.crop_scale,
        hflip=recipe.hflip,
        color_jitter=recipe.color_jitter,
        auto_augment=augment,
        interpolation=recipe.interpolation,
        mean=mean,
        use_prefetcher=True,
        separate=True,
    )
    _allow_black(second)
    if recipe.crop_scale is None:
        resize = transforms.Resize(math.floor(size / crop), InterpolationMode(recipe.interpolation))
        cut = transforms.RandomCrop(size, padding=recipe.crop_padding) if recipe.crop_padding else []
        first = [resize, transforms.CenterCrop(size), *([cut] if cut else [])]
        first = transforms.Compose([*first, transforms.RandomHorizontalFlip(recipe.hflip)])
    return transforms.Compose([first, second, last])


def _allow_black(policies: Any) -> None:
    """Let timm's Posterize keep 0 bits, which its levels ask for and Pillow 13 refuses: the image becomes black."""
    for policy in policies.transforms:
        groups = getattr(policy, "policy", None) or [getattr(policy, "ops", [])]
        for op in (op for group in groups for op in group if op.name.startswith("Posterize")):
            op.aug_fn = partial(_posterize, op.aug_fn)


def _posterize(posterize: Any, image: Image.Image, bits: int, **kwargs: Any) -> Image.Image:
    return posterize(image, bits, **kwargs) if bits > 0 else Image.new(image.mode, image.size)


def _recoded(images: Tensor, channels: int) -> Tensor:
    """Grey images (N, 1, H, W) repeated to any number of channels, coloured ones made grey."""
    if images.shape[1] == channels:
        return images
    if images.shape[1] == 1:
        return images.expand(-1, channels, -1, -1)
    if images.shape[1] == 3 and channels == 1:
        weights = torch.tensor([0.299, 0.587, 0.114])[:, None, None]
        return torch.cat([(part * weights).sum(1, keepdim=True).round().byte() for part in images.split(4096)])
    raise DataError(f"images of {images.shape[1]} channels cannot become {channels}; set in_chans={images.shape[1]}")


def _fitted(images: Tensor, size: int, crop: float, interpolation: str) -> Tensor:
    """Images as evaluation shows them: the short side resized to size / crop, and the centre cut out."""
    height, width = images.shape[-2:]
    side = math.floor(size / crop)
    if (height, width) == (size, size) and side == size:
        return images
    short = min(height, width)
    target = (int(height * side / short), int(width * side / short))
    top, left = (round((length - size) / 2) for length in target)  # all as torchvision rounds
    parts = []
    for part in images.split(4096):
        smooth = interpolation != "nearest"
        resized = F.interpolate(
            part.float(), target, mode=interpolation, align_corners=False if smooth else None, antialias=smooth
        )
        parts.append(resized[..., top : top + size, left : left + size].round().clamp(0, 255).byte())
    return torch.cat(parts)
