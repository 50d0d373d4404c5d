"""Sizes and batches of exported files: which are asked for, traced and checked."""

from typing import Any

import torch

from tokamix.export.graph import Graph, Size
from tokamix.inference import InferenceConfig

DENSE_SIDE = 224  # of the images that segmenters and detectors are traced with, unless their config names a size
STEP = 32  # sides of images for models that do not take every size


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


def odd_size(config: InferenceConfig) -> Size:
    """A size with odd sides; 200x333 for a model of 224 px."""
    side = native_side(config)
    return side - side // 8 + 4, side + side // 2 - 3


def find_multiple(graph: Graph, config: InferenceConfig) -> int:
    """1 if the network takes images of every size, 32 if only of such sides; others cannot be dynamic."""
    reason = ""
    for size, multiple in ((odd_size(config), 1), (traced_size(config), STEP)):
        try:
            with torch.no_grad():
                graph(graph.example(size, 1))
            return multiple
        except (ValueError, RuntimeError, AssertionError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise ValueError(
        f"{type(graph.network).__name__} does not take images of other sizes ({reason}); export it with"
        f" --size {native_side(config)}, or create it with dynamic_img_size=True"
    )


def checked_cases(
    size: Size | None, batch: int | None, config: InferenceConfig, multiple: int
) -> list[tuple[Size, int]]:
    """Sizes and batches at which a file is checked."""
    if size is not None:
        return [(size, batch)] if batch else [(size, n) for n in (1, 2, 3)]
    side, traced = native_side(config), traced_size(config)
    odd = odd_size(config) if multiple == 1 else (traced[0], side // STEP * STEP)
    return [(traced, batch or 1), ((side, side), batch or 3), (odd, batch or 2)]
