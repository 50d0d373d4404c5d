"""Top-1 and top-5 accuracy and cross-entropy of classifiers."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tokamix.data import DataError, Loader
from tokamix.inference import evaluation_mode


@torch.no_grad()
def measure_accuracy(model: nn.Module, loader: Loader, batch_size: int | None = None) -> dict[str, float]:
    """Compute `top1`, `top5` (percent) and `loss` over all processes; counted on the device, read once.

    By hand, since torchmetrics would be a further dependency for two comparisons and synchronises each metric alone.

    Args:
        model: returns logits.
        loader: of this process's part of the images.
        batch_size: pad shorter batches to this size, so that a compiled model sees a single shape.
    """
    totals = torch.zeros(4, device=loader.device)
    with evaluation_mode(model):
        for images, labels in _equal_batches(loader, isinstance(model, FSDPModule)):
            count = len(labels)
            logits = model(_pad(images, batch_size))[:count].float()
            correct = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, reduction="sum")
            totals += torch.stack([correct[:, 0].sum(), correct.sum(), loss, torch.full_like(loss, count)])
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(totals)
    top1, top5, loss_sum, n = totals.tolist()
    if not n:
        raise DataError("there are no images to measure: none could be decoded")
    return {"top1": 100 * top1 / n, "top5": 100 * top5 / n, "loss": loss_sum / n}


def _equal_batches(loader: Any, sharded: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the loader's batches; with sharded weights, every process needs the same number: the last may be empty."""
    yield from loader.epoch(0)
    if sharded:
        longest = torch.tensor(len(loader), device=loader.device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        if len(loader) < longest:
            side = loader.image_size
            images = torch.zeros(1, len(loader.mean), side, side, device=loader.device)
            yield images, torch.zeros(0, dtype=torch.int64, device=loader.device)


def _pad(images: Tensor, size: int | None) -> Tensor:
    if size is None or len(images) == size:
        return images
    return torch.cat([images, images.new_zeros(size - len(images), *images.shape[1:])])
