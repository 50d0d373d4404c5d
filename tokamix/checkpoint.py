"""Load checkpoints of tokamix, timm and the papers' authors, without executing code from untrusted files."""

import argparse
import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import hf_hub_download
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import adapt_input_conv
from torch import Tensor, nn

_log = logging.getLogger("tokamix")
StateDict = dict[str, Tensor]

HUB = "hf-hub:"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# keys of the weights in training checkpoints; averaged weights, which the papers report, come first
ENVELOPES = ("model_ema", "state_dict_ema", "model", "state_dict")
PREFIXES = ("module.", "_orig_mod.")


@dataclass
class LoadReport:
    """Result of `load_checkpoint`: number of loaded entries, resized ones, and those left at their initial values."""

    loaded: int = 0
    adapted: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)


def load_checkpoint(
    model: nn.Module,
    source: str | Path | Mapping[str, Any],
    strict: bool = True,
    use_ema: bool = True,
) -> LoadReport:
    """Load a checkpoint of tokamix, timm or the papers' authors into a model.

    Accepts .safetensors and .pth files (read with weights_only, so no code in them runs), folders written by timm or
    downloaded from the Hugging Face Hub, `hf-hub:user/name`, and state dicts. The authors' parameter names are
    translated; position embeddings and weight banks are resized to the model's image size and the first convolution to
    its input channels; a classifier with a different number of classes keeps its initial values.

    Args:
        model: a tokamix or timm model.
        source: file, folder, Hub name, or a state dict (also inside a training checkpoint).
        strict: raise ValueError if entries are missing, unexpected or of different shape; False loads those that fit.
        use_ema: prefer averaged weights if the file has both.
    """
    state = unwrap(source if isinstance(source, Mapping) else read_checkpoint(source), use_ema)
    translate = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    report = LoadReport()
    if translate is not None:
        original = dict(state)
        state = translate(state, model)
        report.adapted += _resized(original, state)
    own = model.state_dict()
    _adapt_input(model, state, own, report)
    _drop_classifier(model, state, own, report)

    missing = [name for name in own if name not in state and name not in report.fresh]
    unexpected = [name for name in state if name not in own]
    reshaped = [name for name in own if name in state and state[name].shape != own[name].shape]
    if len(missing) == len(own):
        raise ValueError(
            f"the checkpoint does not fit {type(model).__name__}: none of its {len(state)} entries matches (it begins"
            f" with {', '.join(list(state)[:3])}; the model with {', '.join(list(own)[:3])}); create the matching model"
        )
    if strict and (missing or unexpected or reshaped):
        raise ValueError(_differences(type(model).__name__, own, state, missing, unexpected, reshaped))
    fitting = {name: value for name, value in state.items() if name in own and name not in reshaped}
    model.load_state_dict(fitting, strict=False)
    report.loaded = len(fitting)
    report.fresh += missing + reshaped
    for name in report.fresh:
        _log.warning("%s keeps its initial values: the checkpoint has no entry of that shape", name)
    return report


def read_checkpoint(path: str | Path) -> Mapping[str, Any]:
    """Read a checkpoint file, folder or Hub name without executing code in it."""
    if str(path).startswith(HUB):
        path = hf_hub_download(str(path).removeprefix(HUB), WEIGHT_FILES[0])
    path = Path(path)
    if path.is_dir():
        files = [path / name for name in WEIGHT_FILES if (path / name).is_file()]
        if not files:
            raise FileNotFoundError(f"the folder {path} has no weights: it needs {' or '.join(WEIGHT_FILES)}")
        path = files[0]
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # research checkpoints contain their command line, an argparse.Namespace: plain data, and the only class allowed
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ValueError(f"{path} is truncated or not a checkpoint: {_first_line(error)}") from error
    except Exception as error:
        # torch raises UnpicklingError for classes that are not allowed. Its text, which explains how to load the file
        # anyway, and would run its code, is not repeated.
        if unsafe := re.search(r"GLOBAL (\S+)", str(error)):
            raise ValueError(
                f"{path} contains {unsafe[1]} besides weights and was not loaded, because it could run code; ask its"
                " author for the state dict as .safetensors"
            ) from None
        raise ValueError(
            f"{path} is truncated or not a checkpoint, or has more than weights; it was not loaded"
        ) from None
    if not isinstance(loaded, Mapping):
        raise ValueError(
            f"{path} contains a {type(loaded).__name__}, not a state dict; save model.state_dict() instead"
        )
    return loaded


def unwrap(checkpoint: Mapping[str, Any], use_ema: bool = True) -> StateDict:
    """The state dict of a training checkpoint, without the prefixes that wrappers add to its names."""
    envelopes = [name for name in ENVELOPES if isinstance(checkpoint.get(name), Mapping)]
    if envelopes:
        chosen = envelopes[0] if use_ema else next((n for n in envelopes if "ema" not in n), envelopes[0])
        return unwrap(checkpoint[chosen], use_ema)
    state = {name: value for name, value in checkpoint.items() if isinstance(value, Tensor)}
    if not state:
        raise ValueError(
            f"the checkpoint has no tensors, only {', '.join(map(str, list(checkpoint)[:5])) or 'nothing'}"
        )
    for prefix in PREFIXES * 2:  # a compiled model inside DDP has both, in either order
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _adapt_input(model: nn.Module, state: StateDict, own: StateDict, report: LoadReport) -> None:
    """Fit the first convolution to the model's number of input channels."""
    name = f"{_cfg(model).get('first_conv')}.weight"
    if name in state and name in own and state[name].shape[1] != own[name].shape[1]:
        state[name] = adapt_input_conv(own[name].shape[1], state[name])
        report.adapted.append(name)


def _resized(before: StateDict, after: StateDict) -> list[str]:
    """Names of banks and position tables that a translation has resized, not only renamed, reshaped or reordered."""
    storages = {tensor.untyped_storage().data_ptr() for tensor in before.values()}
    sizes = {tensor.numel() for tensor in before.values()}
    sizes |= {2 * size for size in sizes}  # keys and values of transformers, which are joined

    def is_resized(name: str, tensor: Tensor) -> bool:
        if tensor.untyped_storage().data_ptr() in storages:
            return False
        return tensor.shape != before[name].shape if name in before else tensor.numel() not in sizes

    return [name for name, tensor in after.items() if is_resized(name, tensor)]


def _drop_classifier(model: nn.Module, state: StateDict, own: StateDict, report: LoadReport) -> None:
    """Drop a classifier with a different number of classes."""
    classifier = _cfg(model).get("classifier") or "head"
    for name in (classifier,) if isinstance(classifier, str) else classifier:
        weight = f"{name}.weight"
        if weight in state and (weight not in own or state[weight].shape != own[weight].shape):
            for parameter in (weight, f"{name}.bias"):
                state.pop(parameter, None)
                if parameter in own:
                    report.fresh.append(parameter)


def _cfg(model: nn.Module) -> dict[str, Any]:
    return getattr(model, "pretrained_cfg", None) or {}


def _differences(
    model: str, own: StateDict, state: StateDict, missing: list[str], unexpected: list[str], reshaped: list[str]
) -> str:
    parts = [
        f"{name} is {tuple(state[name].shape)} in the checkpoint, {tuple(own[name].shape)} in the model"
        for name in reshaped[:3]
    ]
    parts += [f"{name} {tuple(own[name].shape)} is missing in the checkpoint" for name in missing[:3]]
    parts += [f"{name} {tuple(state[name].shape)} is not in the model" for name in unexpected[:3]]
    total = len(missing) + len(unexpected) + len(reshaped)
    return f"the checkpoint does not fit {model} in {total} entries: {'; '.join(parts)}; strict=False loads the rest"


def _first_line(error: Exception) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()  # without ANSI codes
    return text.splitlines()[0] if text else type(error).__name__
