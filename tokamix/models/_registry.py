"""Finding and making the library's models by name."""

import csv
import difflib
import fnmatch
import functools
from pathlib import Path
from typing import Any

import timm
from timm.models import model_entrypoint, split_model_name_tag

from tokamix.cost import count_macs

SIZES = Path(__file__).parent / "sizes.csv"


def list_models(pattern: str = "") -> list[str]:
    """Names of the models tokamix adds to timm, those that match `pattern` (a shell pattern or a part of the name)."""
    names = [name for name in timm.list_models() if model_entrypoint(name).__module__.startswith("tokamix.")]
    if not pattern:
        return names
    glob = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return [name for name in names if fnmatch.fnmatch(name, glob)]


def create_model(name: str, pretrained: bool = False, **kwargs: Any) -> Any:
    """`timm.create_model`, with a hint when the name is not known."""
    arch = split_model_name_tag(name.split("/")[-1])[0]
    if ":" not in name and not timm.is_model(arch):
        near = difflib.get_close_matches(arch, timm.list_models(), n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "`tokamix models` lists them"
        raise ValueError(f"there is no model {name!r}; {hint}")
    return timm.create_model(name, pretrained=pretrained, **kwargs)


def sizes(name: str) -> tuple[int, int]:
    """Learned parameters of a model, and multiply-accumulates at 224 px: from our table, or counted."""
    return known_sizes().get(name) or count_sizes(name)


def count_sizes(name: str) -> tuple[int, int]:
    """The same, counted: a few seconds for a deep model."""
    model = create_model(name, device="meta")
    return sum(p.numel() for p in model.parameters() if p.requires_grad), count_macs(model, 224)


@functools.cache
def known_sizes() -> dict[str, tuple[int, int]]:
    """The table that ships with the package; benchmarks/sizes.py writes it."""
    with SIZES.open(newline="") as file:
        return {row["model"]: (int(row["parameters"]), int(row["macs"])) for row in csv.DictReader(file)}
