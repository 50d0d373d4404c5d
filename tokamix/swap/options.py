"""Checks of the options of `swap_mixer`: a wrong one gets a sentence before anything is changed."""

import json
from collections.abc import Iterable, Mapping
from typing import Any

Where = str | list[str | int] | None


def check_where(where: Any) -> Where:
    """The choice of attentions; names and indices as a list."""
    if where is None or isinstance(where, str):
        return where
    entries: list[Any] = list(where) if isinstance(where, Iterable) else [None]
    if not all(isinstance(entry, str) or _is_whole(entry) for entry in entries):
        raise ValueError(
            f"where={where!r} must be 'global', 'every_other', or a list of names and indices of attentions, such as"
            " ['blocks.3', -1]"
        )
    return [entry if isinstance(entry, str) else int(entry) for entry in entries]


def check_size(image_size: Any) -> tuple[int, int] | None:
    """Height and width of images."""
    if image_size is None:
        return None
    sides = tuple(image_size) if isinstance(image_size, tuple | list) else (image_size, image_size)
    if len(sides) != 2 or not all(_is_whole(side) and side > 0 for side in sides):
        raise ValueError(f"image_size={image_size!r} must be the side of images in pixels, or (height, width)")
    return int(sides[0]), int(sides[1])


def check_heads(num_heads: Any) -> None:
    """The number of heads."""
    if num_heads is not None and not (_is_whole(num_heads) and num_heads > 0):
        raise ValueError(f"num_heads={num_heads!r} must be a whole number from 1 on, or None for the host's")


def check_kwargs(mixer_kwargs: Any) -> dict[str, Any]:
    """The options of the mixer, which the record of the change must be able to hold."""
    if mixer_kwargs is not None and not isinstance(mixer_kwargs, Mapping):
        raise ValueError(f"mixer_kwargs={mixer_kwargs!r} must be a mapping, such as {{'norm': 'l2'}}")
    options = dict(mixer_kwargs or {})
    try:
        json.dumps(options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"mixer_kwargs must be numbers, texts and lists of them: {error}") from None
    return options


def _is_whole(value: Any) -> bool:
    """Whether a value is an integer, also of NumPy; True and False are none."""
    return hasattr(value, "__index__") and not isinstance(value, bool)
