"""Repeat recorded changes on a new network, and load changed networks from folders of other libraries."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from tokamix._construction import MARK, mark_config, read_mark
from tokamix.swap.attention import Swapped
from tokamix.swap.context_broadcast import insert_context_broadcast, remove_context_broadcast
from tokamix.swap.mixer import swap_mixer

CHANGES = {change.__name__: change for change in (swap_mixer, insert_context_broadcast, remove_context_broadcast)}


def apply_changes(network: Any, steps: Sequence[Mapping[str, Any]]) -> Any:
    """Repeat recorded changes, such as `swap_mixer`, on a new network."""
    for step in steps:
        CHANGES[step["function"]](network, **step["arguments"])
    return network


def read_changes(folder: str | Path) -> dict[str, Any] | None:
    """The record of the changed network whose weights are in a folder; None for unchanged ones."""
    safe, pickled = Path(folder) / "model.safetensors", Path(folder) / "pytorch_model.bin"
    mark = None
    if safe.is_file():
        with safe_open(safe, "pt") as file:
            mark = file.get_tensor(MARK) if MARK in file.keys() else None  # noqa: SIM118  (not a mapping)
    elif pickled.is_file():
        mark = torch.load(pickled, map_location="cpu", weights_only=True).get(MARK)
    return None if mark is None else read_mark(mark)


def load_hf(model_class: Any, folder: str | Path) -> Any:
    """Load a changed model of Hugging Face's transformers from the folder that its `save_pretrained` wrote.

    `model_class.from_pretrained` refuses the folder: it would create the host without the changes.

    Args:
        model_class: the class of the model, such as transformers.ViTForImageClassification.
        folder: the folder.
    """
    if getattr(model_class, "config_class", None) is None:
        raise TypeError(
            f"load_hf needs the class of the model, such as transformers.ViTForImageClassification, not {model_class!r}"
        )
    config = model_class.config_class.from_pretrained(folder)
    steps = getattr(config, MARK, None)
    if not steps:
        return model_class.from_pretrained(folder)
    mark_config(config, None)

    def create(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        apply_changes(self, steps)

    def init_weights(self: Any, module: Any) -> None:
        if not isinstance(module, Swapped):  # their layers are not the host's, and all their weights are in the folder
            model_class._init_weights(self, module)

    # transformers creates the network and translates names of weights, for classes of its own modules only
    body = {"__init__": create, "_init_weights": init_weights, "__module__": model_class.__module__}
    changed: Any = type(model_class.__name__, (model_class,), body)
    model, info = changed.from_pretrained(folder, config=config, output_loading_info=True)
    if missing := sorted(info["missing_keys"]):
        raise ValueError(
            f"{folder} does not have {len(missing)} weights of {model_class.__name__}, such as {missing[0]}; load it as"
            f" the class that was saved, {', '.join(config.architectures or ['which is unknown'])}"
        )
    model.__class__ = model_class
    return model
