"""`embed`: the features of all images of a folder or data set, in shards."""

import copy
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokamix.data import ImageDataset, ImageStream, create_dataset
from tokamix.data.batches import BatchOrder, IndexOrder, StreamOrder
from tokamix.data.create import normalize_source
from tokamix.data.decode import list_images
from tokamix.data.images.datasets import FileDataset
from tokamix.data.images.transforms import create_eval_transform
from tokamix.data.images.worker import ImageLoader, ImageReader
from tokamix.data.loading import Corrupt
from tokamix.distributed import rank_and_world_size
from tokamix.embed.features import FeatureExtractor, Pool
from tokamix.embed.index import (
    FORMAT,
    FeatureIndex,
    Settings,
    check_settings,
    fingerprint,
    shard_path,
    write_parquet,
    write_shard,
)
from tokamix.files import write_json
from tokamix.inference import (
    DTYPES,
    InferenceConfig,
    Precision,
    autocast,
    choose_device,
    evaluation_mode,
    load_model,
    read_precision,
)

SHARD_SIZE = 50_000
Split = Literal["all", "train", "val"]


def load_backbone(source: Any, model: str | None, image_size: int | None) -> tuple[nn.Module, InferenceConfig]:
    """The network whose features are used, given as a module or as for `load_model`, and its preprocessing."""
    if isinstance(source, nn.Module):
        network, config = source, InferenceConfig.from_model(source)
    else:
        network, config = load_model(source, model=model)
    if config.task != "classify":
        raise ValueError(f"features are those of classifiers and backbones, but the model's task is {config.task}")
    return network, config if image_size is None else config.replace(image_size=image_size)


def backbone_precision(source: Any, device: torch.device) -> str:
    """The precision that a run was evaluated in; fp32 instead of fp16 on a CPU, which has none."""
    precision = read_precision(source)
    return "fp32" if precision == "fp16" and device.type == "cpu" else precision


def embed(
    source: str | Path | nn.Module,
    data: str | Path,
    output: str | Path = "features",
    *,
    model: str | None = None,
    split: Split = "all",
    pool: Pool = "model",
    layer: int | None = None,
    image_size: int | None = None,
    precision: Precision | None = None,
    dtype: Literal["fp32", "fp16"] = "fp32",
    file_format: Literal["safetensors", "npy"] = "safetensors",
    parquet: bool = False,
    shard_size: int = SHARD_SIZE,
    batch_size: int = 128,
    device: str | None = None,
    workers: int = 0,
    corrupt: Corrupt = "raise",
    on_images: Callable[[int, int], None] = lambda done, total: None,
) -> FeatureIndex:
    """Write the features of all images into a folder, over all processes of `torch.distributed`.

    Each process writes its own shards and holds one of them in memory. If it is stopped, the same call continues with
    the shards that are missing.

    Args:
        source: a run's folder, a weights file, a timm name or `hf-hub:user/name`, see `tokamix.inference.load_model`;
            or a timm model.
        data: a folder, all images below which are used; or another source of `tokamix.create_dataset`.
        output: the folder for the features.
        model: name of the architecture, for a checkpoint file.
        split: of a data set that is no folder: "train", "val" or "all".
        pool: see `FeatureExtractor`.
        layer: likewise.
        image_size: in pixels; default: the model's own.
        precision: of the forward passes; default: that of the run's evaluations, otherwise fp32.
        dtype: of the written features.
        file_format: of the shards.
        parquet: also write index.parquet, which needs pyarrow.
        shard_size: images of a shard; tar shards and those of the Hub stay as they are.
        batch_size: images of one forward pass.
        device: "cpu" or "cuda"; default: a GPU if there is one.
        workers: processes that decode images.
        corrupt: for images that cannot be decoded: stop and name the first ("raise"), or leave them out ("skip").
        on_images: called with the number of images that this process has finished and their total.
    """
    for name, value in (("shard_size", shard_size), ("batch_size", batch_size)):
        if value < 1:
            raise ValueError(f"{name} is {value}, but must be at least 1")
    where = choose_device(device)
    network, config = load_backbone(source, model, image_size)
    extractor = FeatureExtractor(network, pool, layer).to(where)
    chosen = precision or backbone_precision(source, where)
    name = normalize_source(data)
    opened = open_splits(name, split)
    parts = [(prefix, part) for prefix, dataset in opened for part in _split_into_shards(dataset, shard_size)]
    folder = Path(output)
    settings: Settings = {
        "format": FORMAT,
        "source": type(source).__name__ if isinstance(source, nn.Module) else str(source),
        "model": model,
        "fingerprint": fingerprint(network),
        "pool": pool,
        "layer": layer,
        "precision": chosen,
        "inference": config.to_dict(),
        "data": name,
        "split": None if Path(name).is_dir() else split,
        "labels": not Path(name).is_dir(),
        "dtype": dtype,
        "file_format": file_format,
        "shard_size": shard_size,
        "names": _hash_names(opened),
        "shards": len(parts),
        "images": sum(len(dataset) for _, dataset in opened),
    }
    rank, world_size = rank_and_world_size()
    with torch.no_grad(), evaluation_mode(extractor), autocast(where, chosen):
        example = torch.zeros(1, config.in_chans, config.image_size, config.image_size, device=where)
        settings["dimensions"] = extractor(example).shape[1]
    check_settings(folder, settings)
    if world_size > 1:
        dist.barrier()  # every process has read index.json before one writes it
    if rank == 0:
        write_json(folder / "index.json", settings, indent=2)
    mine = [(shard, *part) for shard, part in enumerate(parts) if shard % world_size == rank]
    done, total = 0, sum(len(part) for *_, part in mine)
    for shard, prefix, part in mine:
        if not shard_path(folder, shard, settings).is_file():
            loader = _create_loader(part, config, batch_size, where, workers, corrupt)
            with autocast(where, chosen):
                features, paths, answers = _embed_part(extractor, loader, _shifted(on_images, done, total))
            if Path(name).is_dir():
                paths = [str(Path(path).relative_to(name)) for path in paths]
            paths = [prefix + path for path in paths]
            stored = features.to(DTYPES[dtype]) if len(features) else torch.zeros(0, settings["dimensions"])
            write_shard(folder, shard, stored, paths, answers, settings)
        done += len(part)
        on_images(done, total)
    if world_size > 1:
        dist.barrier()
    if parquet and rank == 0:
        write_parquet(folder)
    return FeatureIndex(folder)


def _shifted(on_images: Callable[[int, int], None], start: int, total: int) -> Callable[[int], None]:
    return lambda done: on_images(start + done, total)


class NamedReader(ImageReader):
    """Reads images with their labels and names."""

    def decode(self, item: Any) -> tuple[Any, Any]:
        """Decode an image and return it with its label and name."""
        image, label = super().decode(item)
        return image, (label, self.dataset.name_of(item))

    def collate(self, samples: list[tuple[int, int, Any]]) -> tuple[Any, ...]:
        """Images (B, C, H, W), labels (B,) and names."""
        plain = [(epoch, position, (image, label)) for epoch, position, (image, (label, _)) in samples]
        return *super().collate(plain), [name for *_, (_, (_, name)) in samples]


class NamedLoader(ImageLoader):
    """Yields images, labels and names."""

    def to_device(self, epoch: int, step: int, *parts: Any) -> Any:
        """Images (B, C, H, W), normalised, labels (B,) and names."""
        images, labels, names = parts
        return *super().to_device(epoch, step, images, labels), names


def open_splits(name: str, split: str) -> list[tuple[str, ImageDataset | ImageStream]]:
    """The data sets to embed, each with a prefix for the names of its images: two splits may use the same names."""
    if split not in ("all", "train", "val"):
        raise ValueError(f"split is {split!r}, but must be all, train or val")
    if Path(name).is_dir():
        files = list_images(Path(name))
        return [("", FileDataset(files, [0] * len(files), ["image"]))]
    splits = create_dataset(name)
    chosen = {"train": splits.train, "val": splits.val}
    return [
        ("" if isinstance(dataset, ImageStream) else f"{key}/", dataset)
        for key, dataset in chosen.items()
        if split in ("all", key)
    ]


def _hash_names(opened: list[tuple[str, ImageDataset | ImageStream]]) -> str:
    """A hash of the names of all images in their order; shards of a changed folder would not fit together.

    Streams are read once, and their shards stay as they are: they have no part in it.
    """
    digest = hashlib.sha256()
    for prefix, dataset in opened:
        if not isinstance(dataset, ImageStream):
            for i in range(len(dataset)):
                digest.update(f"{prefix}{dataset.name_of(i)}\0".encode(errors="surrogateescape"))
    return digest.hexdigest()[:32]


def _split_into_shards(dataset: ImageDataset | ImageStream, shard_size: int) -> list[Any]:
    """Parts of a data set; the shards of a stream stay as they are."""
    if not isinstance(dataset, ImageStream):
        starts = range(0, len(dataset), shard_size)
        return [dataset.subset(range(start, min(start + shard_size, len(dataset)))) for start in starts]
    parts = []
    for i, shard in enumerate(dataset.shards):
        part = copy.copy(dataset)
        part.shards, part.sizes = [shard], dataset.sizes[i : i + 1]
        part.size = dataset.sizes[i] if dataset.sizes else dataset.size  # at most; a stream ends where it ends
        parts.append(part)
    return parts


def _create_loader(
    part: ImageDataset | ImageStream,
    config: InferenceConfig,
    batch_size: int,
    device: torch.device,
    workers: int,
    corrupt: Corrupt,
) -> NamedLoader:
    common = (len(part), batch_size, 0, 1, False)
    order: BatchOrder = StreamOrder(*common, stream=part) if isinstance(part, ImageStream) else IndexOrder(*common)
    transform = create_eval_transform(config.image_size, config.crop_pct, config.interpolation, config.crop_mode)
    reader = NamedReader(part, order, transform, config.image_size, config.in_chans)
    return NamedLoader(reader, device, config.mean, config.std, workers, corrupt)


@torch.no_grad()
def _embed_part(
    extractor: nn.Module, loader: NamedLoader, on_images: Callable[[int], None]
) -> tuple[Tensor, list[str], list[int]]:
    """Features (n, D) in float32, names and labels of the images of a loader, on the CPU."""
    features: list[Tensor] = []
    names: list[str] = []
    labels: list[int] = []
    with evaluation_mode(extractor):
        for images, answers, batch in loader.epoch(0):
            features.append(extractor(images).float().cpu())
            names += batch
            labels += answers.tolist()
            on_images(len(names))
    return (torch.cat(features) if features else torch.zeros(0)), names, labels
