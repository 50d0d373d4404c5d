"""Trained weights that come with the package, under timm tags such as `pyramid_nano_sima.imagenette`.

weights/weights.json lists them; docs/weights.md shows accuracies, training and licences.
"""

import functools
import json
from pathlib import Path
from typing import Any

from timm.models import split_model_name_tag

FOLDER = Path(__file__).parent / "weights"
COMMIT = "bb882fa"  # of the training
TRAINED_ON = "H200 with six runs at a time"
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


def model_card(name: str) -> str:
    """The model card of weights, as Markdown: accuracy, training, data and licence."""
    row = shipped_weights()[name]
    data, architecture = row["data"], name.partition(".")[0]
    # the recipe knows the other arguments
    own = {key: row["arguments"][key] for key in ("context_broadcast", "mixer_kwargs") if key in row["arguments"]}
    settings = "".join(f" --set 'model_kwargs.{key}={json.dumps(value)}'" for key, value in own.items())
    classes = ", ".join(data["classes"][:10]) + (", ..." if len(data["classes"]) > 10 else "")
    facts = {
        "Accuracy": f"top-1 {row['top1']:.2f} % on {data['test_images']:,} {data['split']} images; one run (n = 1) of"
        " the averaged weights at the end of training, evaluated in bf16. The file has them in fp16.",
        "Network": f"{row['parameters'] / 1e6:.2f} M parameters, {data['image_size']} px",
        "Training": f"recipe {data['recipe']}, from scratch: tokamix train --recipe {data['recipe']} --model"
        f" {architecture}{settings}; {row['epochs']} epochs, {row['seconds']} s on one {TRAINED_ON}",
        "Commit": f"{COMMIT}; row of results/studies/shipped.csv",
        "Data": f"{data['images']}: {data['train_images']:,} training images, {len(data['classes'])} classes"
        f" ({classes})",
        "Licence of the data": data["licence"],
        "Limits": "small images, no other classes: every image is given one of these",
    }
    return "\n".join([f"# {name}", "", *(f"- **{title}**: {fact}" for title, fact in facts.items())])


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
