"""Top-1 and top-5 accuracy, and the loss."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.data import resolve_model_data_config
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tokamix.checkpoint import load_checkpoint
from tokamix.data import DatasetSplits, Loader, create_dataset
from tokamix.data.images.loader import create_eval_loader
from tokamix.distributed import share
from tokamix.inference import InferenceConfig
from tokamix.models._registry import create_model

WEIGHTS = (".safetensors", ".pth", ".pt", ".bin")


@torch.no_grad()
def accuracy(model: nn.Module, loader: Loader, batch_size: int | None = None) -> dict[str, float]:
    """Percent of right answers over all processes, counted on the device and read once.

    Args:
        model: puts out logits; it is in evaluation mode meanwhile.
        loader: every process has its own share.
        batch_size: fill shorter batches up to this size, so that a compiled model sees one shape alone.
    """
    training = model.training
    model.eval()
    totals = torch.zeros(4, device=loader.device)
    try:
        for images, labels in _same_number(loader, isinstance(model, FSDPModule)):
            count = len(labels)
            logits = model(_filled(images, batch_size))[:count].float()
            right = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, reduction="sum")
            totals += torch.stack([right[:, 0].sum(), right.sum(), loss, torch.full_like(loss, count)])
    finally:
        model.train(training)
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(totals)
    top1, top5, loss_sum, n = totals.tolist()
    return {"top1": 100 * top1 / n, "top5": 100 * top5 / n, "loss": loss_sum / n}


def _same_number(loader: Any, needed: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """The loader's batches; where processes gather weights for each other, as many in each: the last may be empty."""
    yield from loader.epoch(0)
    if needed:
        most = torch.tensor(len(loader), device=loader.device)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        if len(loader) < most:
            side = loader.image_size
            images = torch.zeros(1, len(loader.mean), side, side, device=loader.device)
            yield images, torch.zeros(0, dtype=torch.int64, device=loader.device)


def evaluate(
    source: str | Path | nn.Module,
    data: str | DatasetSplits,
    *,
    model: str | None = None,
    image_size: int | None = None,
    batch_size: int = 128,
    device: str | None = None,
    workers: int = 0,
    corrupt: Literal["raise", "skip"] = "raise",
) -> dict[str, float]:
    """Accuracy of a run, a checkpoint or a model on a validation set, over all processes of `torch.distributed`.

    Args:
        source: the folder of a run, a checkpoint file (then `model` names what it is of), a timm name whose pretrained
            weights are taken, or a module.
        data: the data set, as `tokamix.create_dataset` takes it; its validation part is used.
        model: the model's name, for a checkpoint file.
        image_size: side in pixels; default: what the model was trained at.
        batch_size: images of one forward pass.
        device: default: a GPU where there is one.
        workers: processes that decode.
        corrupt: what to do with pictures that cannot be decoded: stop and name the first, or skip them.
    """
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    opened = create_dataset(data) if isinstance(data, str) else data
    network = (source if isinstance(source, nn.Module) else load_model(source, model, len(opened.classes))).to(place)
    answers = getattr(network, "num_classes", len(opened.classes))
    if answers != len(opened.classes):
        raise ValueError(f"the model tells {answers} classes apart, but {opened.name} has {len(opened.classes)}")
    config = resolve_model_data_config(network)
    seen = statistics(config)
    inference = InferenceConfig(
        task="classify",
        class_names=opened.classes,
        mean=seen["mean"],
        std=seen["std"],
        image_size=image_size or config["input_size"][-1],
        crop_pct=config["crop_pct"],
        interpolation=config["interpolation"],
    )
    reading: dict[str, Any] = {"batch_size": batch_size, "device": place, "workers": workers, "corrupt": corrupt}
    loader = create_eval_loader(opened.val, inference, **reading, **share())
    return accuracy(network, loader)


def load_model(source: str | Path, name: str | None, num_classes: int) -> Any:
    """The model of a run folder, of a checkpoint with the model's name, or a pretrained one of timm."""
    path = Path(source)
    if path.is_dir():
        if not (path / "model.safetensors").is_file():
            raise FileNotFoundError(f"{path} holds no model.safetensors; has the run finished its first evaluation?")
        return timm.create_model(f"local-dir:{path}", pretrained=True)
    if path.suffix not in WEIGHTS:
        return create_model(str(source), pretrained=True)
    if name is None:
        raise ValueError(f"{path} holds weights but does not say of which model; name it with --model")
    model = create_model(name, num_classes=num_classes)
    if load_checkpoint(model, path).fresh:
        raise ValueError(f"{path} was trained on other classes than the {num_classes} of the data")
    return model


def statistics(config: dict[str, Any]) -> dict[str, Any]:
    """What a loader must know of the model: channels, and mean and std of each; for other channels, those of grey."""
    channels = config["input_size"][0]
    mean, std = (
        tuple(values) if len(values) == channels else (sum(values) / len(values),) * channels
        for values in (config["mean"], config["std"])
    )
    return {"in_chans": channels, "mean": mean, "std": std}


def _filled(images: Tensor, size: int | None) -> Tensor:
    if size is None or len(images) == size:
        return images
    return torch.cat([images, images.new_zeros(size - len(images), *images.shape[1:])])
