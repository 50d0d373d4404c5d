"""Loading weights: ours, timm's, the papers' authors', from files nobody has to trust."""

import argparse
import logging
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
# where training scripts keep the weights; the averaged ones, which the papers report, come first
ENVELOPES = ("model_ema", "state_dict_ema", "model", "state_dict")
PREFIXES = ("module.", "_orig_mod.")


@dataclass
class LoadReport:
    """What `load_checkpoint` did: parameters taken as they are or resized, and those left at their initial values."""

    loaded: int = 0
    adapted: list[str] = field(default_factory=list)
    fresh: list[str] = field(default_factory=list)


def load_checkpoint(
    model: nn.Module,
    source: str | Path | Mapping[str, Any],
    strict: bool = True,
    use_ema: bool = True,
) -> LoadReport:
    """Load a checkpoint into `model`, whoever wrote it.

    Takes .safetensors and .pth files (read with weights_only, never unpickled), folders as timm and the Hub write them,
    `hf-hub:user/name`, and state dicts. The authors' parameter names are translated; position tables and weight banks
    are resized to the model's image size and the first convolution to its input channels; a classifier for another
    number of classes is left at its initial values.

    Args:
        model: a tokamix or timm model.
        source: file, folder, hub name, or a state dict (with or without a training script's envelope).
        strict: raise when parameters are missing, left over or of another shape; otherwise load what fits.
        use_ema: prefer averaged weights where the file holds both.
    """
    state = unwrap(source if isinstance(source, Mapping) else read_checkpoint(source), use_ema)
    translate = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    if translate is not None:
        state = translate(state, model)
    own = model.state_dict()
    report = LoadReport()
    _adapt_input(model, state, own, report)
    _drop_classifier(model, state, own, report)

    missing = [name for name in own if name not in state and name not in report.fresh]
    unexpected = [name for name in state if name not in own]
    reshaped = [name for name in own if name in state and state[name].shape != own[name].shape]
    if len(missing) == len(own):
        raise ValueError(
            f"this checkpoint is not for {type(model).__name__}: none of its {len(state)} entries fits"
            f" (it begins with {', '.join(list(state)[:3])}; the model with {', '.join(list(own)[:3])})"
        )
    if strict and (missing or unexpected or reshaped):
        raise ValueError(_differences(type(model).__name__, own, state, missing, unexpected, reshaped))
    fitting = {name: value for name, value in state.items() if name in own and name not in reshaped}
    model.load_state_dict(fitting, strict=False)
    report.loaded = len(fitting)
    report.fresh += missing + reshaped
    for name in report.fresh:
        _log.warning("%s keeps its initial values: the checkpoint has none of that shape", name)
    return report


def read_checkpoint(path: str | Path) -> Mapping[str, Any]:
    """Read a checkpoint file, folder or hub name without running any code it may hold."""
    if str(path).startswith(HUB):
        path = hf_hub_download(str(path).removeprefix(HUB), WEIGHT_FILES[0])
    path = Path(path)
    if path.is_dir():
        found = [path / name for name in WEIGHT_FILES if (path / name).is_file()]
        if not found:
            raise FileNotFoundError(f"{path} holds no weights: expected {' or '.join(WEIGHT_FILES)}")
        path = found[0]
    if not path.is_file():
        raise FileNotFoundError(f"there is no checkpoint {path}")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        # research checkpoints carry their command line; it is data, and the only foreign class admitted
        with torch.serialization.safe_globals([argparse.Namespace]):
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise ValueError(f"{path} is truncated or no checkpoint: {_first_line(error)}") from error
    except Exception as error:  # torch raises pickle's own UnpicklingError for classes it does not admit
        raise ValueError(f"{path} holds more than weights and was not loaded: {_first_line(error)}") from error
    if not isinstance(loaded, Mapping):
        raise ValueError(f"{path} holds a {type(loaded).__name__}, not a state dict; save model.state_dict() instead")
    return loaded


def unwrap(checkpoint: Mapping[str, Any], use_ema: bool = True) -> StateDict:
    """The state dict inside a training script's envelope, without the prefixes that wrappers add to its names."""
    envelopes = [name for name in ENVELOPES if isinstance(checkpoint.get(name), Mapping)]
    if envelopes:
        chosen = envelopes[0] if use_ema else next((n for n in envelopes if "ema" not in n), envelopes[0])
        return unwrap(checkpoint[chosen], use_ema)
    state = {name: value for name, value in checkpoint.items() if isinstance(value, Tensor)}
    if not state:
        raise ValueError(
            f"the checkpoint holds no tensors, only {', '.join(map(str, list(checkpoint)[:5])) or 'nothing'}"
        )
    for prefix in PREFIXES * 2:  # a compiled model inside DDP carries both, in either order
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _adapt_input(model: nn.Module, state: StateDict, own: StateDict, report: LoadReport) -> None:
    """Fit the first convolution to the model's number of input channels."""
    name = f"{_cfg(model).get('first_conv')}.weight"
    if name in state and name in own and state[name].shape[1] != own[name].shape[1]:
        state[name] = adapt_input_conv(own[name].shape[1], state[name])
        report.adapted.append(name)


def _drop_classifier(model: nn.Module, state: StateDict, own: StateDict, report: LoadReport) -> None:
    """Leave a classifier for another number of classes out."""
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
    parts = [f"{name} is {tuple(state[name].shape)} there, {tuple(own[name].shape)} here" for name in reshaped[:3]]
    parts += [f"{name} {tuple(own[name].shape)} is missing there" for name in missing[:3]]
    parts += [f"{name} {tuple(state[name].shape)} has no place here" for name in unexpected[:3]]
    total = len(missing) + len(unexpected) + len(reshaped)
    return f"the checkpoint does not fit {model} in {total} entries: {'; '.join(parts)}; strict=False loads the rest"


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
