"""Sizes and batches of exported files: which are asked for, traced and checked."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tokamix.export.graph import Graph, Size
from tokamix.inference import InferenceConfig

DENSE_SIDE = 224  # of the images that segmenters and detectors are traced with, unless their config names a size
STEP = 32  # sides of the images that a model of any size is traced with are multiples of it
MULTIPLES = (1, 2, 4, 8, 16, STEP)  # of which the sides of a model's images may have to be


def choose_size(size: Any, config: InferenceConfig) -> Size | None:
    """The fixed size of a file, or None for any."""
    if size is None:
        return (config.image_size, config.image_size) if config.task == "classify" else None
    if size == "dynamic":
        return None
    sides = list(size) if isinstance(size, tuple | list) else [size, size]
    if len(sides) != 2 or not all(isinstance(side, int) and side > 0 for side in sides):
        raise ValueError(f"size is {size!r}, but must be a number of pixels, a pair of them, or 'dynamic'")
    return sides[0], sides[1]


def choose_batch(batch: Any, size: Size | None, config: InferenceConfig) -> int | None:
    """The fixed batch of a file, or None for any."""
    if config.task == "detect":
        if batch not in (None, 1):
            raise ValueError(f"detectors are exported for one image at a time, got batch {batch}")
        return 1
    if batch is None:
        return None if size is None else 1
    if batch == "dynamic":
        return None
    if not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch is {batch!r}, but must be a number from 1 on, or 'dynamic'")
    return batch


def set_size(config: InferenceConfig, size: Size) -> InferenceConfig:
    """The config with which images are preprocessed for a fixed size."""
    if config.task != "classify":
        return config.replace(scale=(max(size), min(size)))
    return config.replace(image_size=size[0]) if size[0] == size[1] else config


def native_side(config: InferenceConfig) -> int:
    """The side of the images that a model was made for."""
    if config.task == "classify":
        return config.image_size
    return config.window or (min(config.scale) if config.scale else DENSE_SIDE)


def traced_size(config: InferenceConfig) -> Size:
    """A size that is neither the model's own nor square: what equals a constant would be specialised."""
    side = (native_side(config) + STEP - 1) // STEP * STEP
    return side + STEP, side + 2 * STEP


def uneven_size(config: InferenceConfig, multiple: int = 1) -> Size:
    """A size that is neither square nor of multiples of 2 * `multiple`; 200x333 for a model of 224 px and 1."""
    side = native_side(config)
    if multiple == 1:
        return side - side // 8 + 4, side + side // 2 - 3
    count = -(-side // multiple) // 2 * 2 + 1
    return count * multiple, (count + 2) * multiple


def find_multiple(graph: Graph, config: InferenceConfig) -> int:
    """The number whose multiples the sides of the network's images must be: 1 if it takes every size.

    A graph does not refuse what its network refuses: at other sizes it returns numbers that mean nothing.
    """
    reasons = []
    for multiple in MULTIPLES:
        reason = _refusal(graph, graph.example(uneven_size(config, multiple), 1))
        if not reason:
            return multiple
        reasons.append(reason)
    raise ValueError(
        f"{type(graph.network).__name__} does not take images of other sizes ({reasons[-1]}); export it with"
        f" --size {native_side(config)}, or create it with dynamic_img_size=True"
    )


def find_smallest(
    call: Callable[[Tensor], Any], example: Callable[[Size], Tensor], config: InferenceConfig, multiple: int
) -> int:
    """The smallest side that a graph, or a program made from it, takes; `example` gives images of a size."""
    refused, accepted = 0, min(uneven_size(config, multiple)) // multiple  # sides, in multiples
    while accepted - refused > 1:
        middle = (accepted + refused) // 2
        if _refusal(call, example((middle * multiple, middle * multiple))):
            refused = middle
        else:
            accepted = middle
    return accepted * multiple


def _refusal(call: Callable[[Tensor], Any], images: Tensor) -> str:
    """Why a network does not take images of a size; empty if it does."""
    try:
        with torch.no_grad():
            call(images)
    except (ValueError, RuntimeError, AssertionError) as error:
        return (str(error).splitlines() or [type(error).__name__])[0] or type(error).__name__
    return ""


def checked_cases(
    size: Size | None, batch: int | None, config: InferenceConfig, multiple: int, smallest: int
) -> list[tuple[Size, int]]:
    """Sizes and batches at which a file is checked; for one of any size, the smallest that it takes is among them."""
    if size is not None:
        return [(size, batch)] if batch else [(size, n) for n in (1, 2, 3)]
    side, traced = native_side(config), traced_size(config)
    square = max(smallest, side // multiple * multiple)
    least, uneven = (smallest, smallest), uneven_size(config, multiple)
    return [(traced, batch or 1), ((square, square), batch or 3), (uneven, batch or 2), (least, batch or 1)]
