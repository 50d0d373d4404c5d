"""Trained weights that come with the package, under timm tags such as `pyramid_nano_sima.imagenette`.

weights/weights.json lists them; docs/weights.md shows accuracies, training and licences.
"""

import functools
import json
from pathlib import Path
from typing import Any

from timm.models import split_model_name_tag

FOLDER = Path(__file__).parent / "weights"
DEFAULT = "pyramid_nano_sima.imagenette"  # for `tokamix predict photo.jpg`


@functools.cache
def shipped_weights() -> dict[str, dict[str, Any]]:
    """Name with tag -> arguments of the network, data, accuracy and training of its weights."""
    table = json.loads((FOLDER / "weights.json").read_text())
    return {
        name: row | {"data": {"name": row["data"], **table["data"][row["data"]]}}
        for name, row in table["models"].items()
    }


def shipped_tags(architecture: str) -> list[str]:
    """The tags of an architecture, the default one first."""
    names = map(split_model_name_tag, shipped_weights())
    return [tag for name, tag in names if name == architecture]


def shipped_arguments(architecture: str, tag: Any) -> dict[str, Any]:
    """Arguments of the network whose weights have a tag; None: the default tag."""
    tags = shipped_tags(architecture)
    if tag is None and tags:
        tag = tags[0]
    if tag not in tags:  # no shipped weights; a dict of another source has its own arguments
        return {}
    return dict(shipped_weights()[f"{architecture}.{tag}"]["arguments"])


def shipped_cfgs(architecture: str) -> dict[str, dict[str, Any]]:
    """Fields of timm's pretrained cfg for each name with tag."""
    cfgs = {}
    for tag in shipped_tags(architecture):
        name = f"{architecture}.{tag}"
        row = shipped_weights()[name]
        data = row["data"]
        cfgs[name] = {
            "file": str(FOLDER / f"{name}.safetensors"),
            "num_classes": len(data["classes"]),
            "label_names": tuple(data["classes"]),
            "input_size": (3, data["image_size"], data["image_size"]),
            "crop_pct": 1.0,
            "license": "other",
            "notes": (f"top1={row['top1']}",),
        }
    return cfgs
