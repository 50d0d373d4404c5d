"""Finding and making the library's models by name."""

import difflib
import fnmatch
from typing import Any

import timm
from timm.models import model_entrypoint, split_model_name_tag
from torch import nn


def list_models(pattern: str = "") -> list[str]:
    """Names of the models tokamix adds to timm, those that match `pattern` (a shell pattern or a part of the name)."""
    names = [name for name in timm.list_models() if model_entrypoint(name).__module__.startswith("tokamix.")]
    if not pattern:
        return names
    glob = pattern if any(c in pattern for c in "*?[") else f"*{pattern}*"
    return [name for name in names if fnmatch.fnmatch(name, glob)]


def create_model(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """`timm.create_model`, with a hint when the name is not known."""
    arch = split_model_name_tag(name.split("/")[-1])[0]
    if ":" not in name and not timm.is_model(arch):
        near = difflib.get_close_matches(arch, timm.list_models(), n=3, cutoff=0.5)
        hint = f"did you mean {', '.join(near)}?" if near else "`tokamix models` lists them"
        raise ValueError(f"there is no model {name!r}; {hint}")
    return timm.create_model(name, pretrained=pretrained, **kwargs)
