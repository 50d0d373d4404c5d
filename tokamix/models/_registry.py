"""Create and list the library's models by name, and look up their sizes."""

import csv
import fnmatch
import functools
import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import hf_hub_download
from timm.models import model_entrypoint, split_model_name_tag

from tokamix._construction import RECORD, TIMM_NOTE, record_creation
from tokamix._hints import suggest
from tokamix._hub import hub_access
from tokamix.checkpoint import load_checkpoint
from tokamix.cost import count_macs
from tokamix.models.shipped import shipped_tags
from tokamix.swap.changes import apply_changes, read_changes

SIZES = Path(__file__).parent / "sizes.csv"


def list_models(pattern: str = "") -> list[str]:
    """Names of the models that tokamix adds to timm, filtered by a shell pattern or a part of the name."""
    names = [name for name in timm.list_models() if model_entrypoint(name).__module__.startswith("tokamix.")]
    if not pattern:
        return names
    glob = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return [name for name in names if fnmatch.fnmatch(name, glob)]


def create_model(name: str, pretrained: bool = False, **kwargs: Any) -> Any:
    """Create a model with `timm.create_model`; an unknown name or tag raises ValueError with similar ones."""
    arch = split_model_name_tag(name.split("/")[-1])[0]
    if ":" not in name and not timm.is_model(arch):
        hint = suggest(arch, timm.list_models(), "`tokamix models` lists them")
        raise ValueError(f"there is no model {name!r}; {hint}")
    if ":" not in name:
        check_tag(name)
    if (folder := _changed_folder(name)) is not None:
        return _create_changed(folder, pretrained, kwargs)
    with hub_access(f"the pretrained model {name}") if pretrained else nullcontext():
        model = timm.create_model(name, pretrained=pretrained, **kwargs)
    if ":" not in name and not hasattr(model, RECORD):  # folders, the Hub and bodies have arguments of their own
        record_creation(model, arch, kwargs)
    return model


def check_tag(name: str) -> None:
    """Raise ValueError with the known tags if a model has no weights of the tag in `name`."""
    arch, tag = split_model_name_tag(name.split("/")[-1])
    try:
        timm.get_pretrained_cfg(f"{arch}.{tag}" if tag else arch, allow_unregistered=True)
    except RuntimeError:
        tags = [split_model_name_tag(known)[1] for known in timm.list_pretrained(f"{arch}.*")]
        if not tags:
            raise ValueError(f"{arch} has no pretrained weights, so {name!r} has none; leave out the tag") from None
        raise ValueError(f"{arch} has no weights with the tag {tag!r}; {suggest(tag, tags)}") from None


def _changed_folder(name: str) -> Path | None:
    """The folder of a network that was changed and saved by timm, downloaded from the Hub; None for other names."""
    if name.startswith("local-dir:"):
        folder = Path(name.removeprefix("local-dir:"))
        return folder if _is_changed(folder) else None
    if not name.startswith("hf-hub:"):
        return None
    repository, _, revision = name.removeprefix("hf-hub:").partition("@")
    files: Any = {"repo_id": repository, "revision": revision or None}
    with hub_access(name):
        folder = Path(hf_hub_download(filename="config.json", **files)).parent
        if not _is_changed(folder):
            return None
        hf_hub_download(filename="model.safetensors", **files)
    return folder


def _is_changed(folder: Path) -> bool:
    config = folder / "config.json"
    return config.is_file() and str(json.loads(config.read_text()).get("architecture")).endswith(TIMM_NOTE)


def _create_changed(folder: Path, pretrained: bool, kwargs: dict[str, Any]) -> Any:
    """Create a network that was changed and saved by timm: the host, the changes, then its weights.

    As in timm, a classifier with another number of classes keeps its initial values, and the first convolution is
    adapted to the number of input channels.
    """
    record = read_changes(folder)
    if record is None:
        raise ValueError(f"{folder} holds a changed network without the record of its changes; save it again")
    if kwargs.get("features_only"):
        raise ValueError(
            f"{folder} holds a changed network, which has no features_only; create it without, and call its"
            " forward_intermediates"
        )
    config = json.loads((folder / "config.json").read_text())
    name = config["architecture"].removesuffix(TIMM_NOTE)
    arguments = {**config.get("model_args", {}), **(record["arguments"] or {}), **kwargs}
    arguments = {"num_classes": config["num_classes"], **arguments}
    model = timm.create_model(name, pretrained_cfg=config["pretrained_cfg"], **arguments)
    record_creation(model, name, arguments)
    apply_changes(model, record["steps"])
    if pretrained:
        load_checkpoint(model, folder)
    return model


def sizes(name: str) -> tuple[int, int]:
    """Trainable parameters and MACs at 224 px of a model: from the table of the package, or counted."""
    return known_sizes().get(name) or count_sizes(name)


def count_sizes(name: str) -> tuple[int, int]:
    """Count trainable parameters and MACs at 224 px; takes a few seconds for a deep model."""
    # shipped weights have a smaller default size and fewer classes, but sizes are for comparison with other models
    arguments: dict[str, Any] = {"img_size": 224, "num_classes": 1000} if shipped_tags(name) else {}
    model = create_model(name, device="meta", **arguments)
    return sum(p.numel() for p in model.parameters() if p.requires_grad), count_macs(model, 224)


@functools.cache
def known_sizes() -> dict[str, tuple[int, int]]:
    """The table of sizes that comes with the package, written by benchmarks/sizes.py."""
    with SIZES.open(newline="") as file:
        return {row["model"]: (int(row["parameters"]), int(row["macs"])) for row in csv.DictReader(file)}


def imagenet_top1(name: str) -> float | None:
    """The ImageNet accuracy that a model's paper prints; None if it is not known, or of another data set."""
    cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
    found = re.search(r"top1=([\d.]+)", " ".join(getattr(cfg, "notes", None) or ()))
    return float(found[1]) if found and getattr(cfg, "num_classes", None) == 1000 else None
