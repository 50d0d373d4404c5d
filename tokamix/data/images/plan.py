"""Augmentation parameters of batches, drawn on the CPU and used on the device."""

from typing import Any

import torch
from torch import Tensor

from tokamix.data.batches import BatchOrder
from tokamix.data.images.augment import Erase, Table
from tokamix.data.rng import generator

BLOCK = 16  # batches whose parameters are drawn together, which takes hardly longer than for one


def copy_to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor without waiting for the device."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.contiguous().pin_memory()
    return tensor.to(device, non_blocking=True)


class AugmentPlan:
    """The parameters of `augment` and `erase` for each image of each batch of one rank.

    Args:
        order: the batches.
        augment: augmentation of whole batches, an `Augment` or `MultiCrop`, if any.
        erase: random erasing, if any.
        size: (H, W) of the images before augmentation.
        image_size: side of the images after it.
        device: where the parameters are used.
    """

    def __init__(
        self,
        order: BatchOrder,
        augment: Any,
        erase: Erase | None,
        size: tuple[int, int],
        image_size: int,
        device: torch.device,
    ) -> None:
        self.order, self.augment, self.erase = order, augment, erase
        self.size, self.image_size, self.device = size, image_size, device
        self.columns: dict[str, torch.Size] = {}
        self._block: tuple[int, int] = (-1, -1)
        self._rows = torch.empty(0)

    def rows(self, epoch: int, step: int) -> Tensor:
        """The parameters of one batch on the device, all columns of its table side by side (B, numbers)."""
        order = self.order
        block, step = divmod(step, BLOCK)
        if self._block != (epoch, block):
            draw = generator(order.seed, epoch, block, "augment")
            n = BLOCK * order.global_batch
            table = self.augment.plan(n, self.size, draw) if self.augment else {}
            if self.erase:
                table |= self.erase.plan(n, (self.image_size, self.image_size), draw)
            self.columns = {name: values.shape[1:] for name, values in table.items()}
            flat = torch.cat([values.flatten(1) for values in table.values()], 1) if table else torch.empty(n, 0)
            self._block, self._rows = (epoch, block), copy_to_device(flat[order.rank :: order.world_size], self.device)
        return self._rows[step * order.batch_size :][: order.batch_size]

    def table(self, rows: Tensor) -> Table:
        """The columns of `rows` by their names."""
        parts = rows.split([shape.numel() for shape in self.columns.values()], 1) if self.columns else ()
        return {name: part.unflatten(1, shape) for (name, shape), part in zip(self.columns.items(), parts, strict=True)}
