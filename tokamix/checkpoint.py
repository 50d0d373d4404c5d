"""Load checkpoints of tokamix, timm and the papers' authors, without executing code from untrusted files."""

import argparse
import logging
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from huggingface_hub import hf_hub_download
from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from timm.models import adapt_input_conv
from torch import Tensor, nn

from tokamix._construction import MARK, describe, read_mark
from tokamix._hub import hub_access

_log = logging.getLogger("tokamix")
StateDict = dict[str, Tensor]

HUB = "hf-hub:"
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
# keys of the weights in training checkpoints; averaged weights, which the papers report, come first
ENVELOPES = ("model_ema", "state_dict_ema", "model", "state_dict", "net", "teacher", "student")
AVERAGED = ("model_ema", "state_dict_ema", "teacher")
# prefixes of DistributedDataParallel and torch.compile, and the usual attribute names of a model in a Lightning module
PREFIXES = ("module.", "_orig_mod.")
ATTRIBUTES = ("model.", "backbone.", "timm_model.", "net.", "network.", "encoder.", "student.", "teacher.")
PREFIXED = 0.9  # fraction of the entries that has a prefix; the others are of losses or metrics
# Classes besides tensors that a file may contain, all plain data: research checkpoints contain their command line, an
# argparse.Namespace, and their best metric, a numpy scalar.
NUMPY_SCALAR = np.float64(0).__reduce__()[0]
SAFE: list[Any] = [
    argparse.Namespace,
    (NUMPY_SCALAR, "numpy.core.multiarray.scalar"),  # written with numpy 1
    (NUMPY_SCALAR, "numpy._core.multiarray.scalar"),  # written with numpy 2
    np.dtype,
    *(type(np.dtype(kind)) for kind in "?bhilqBHILQefd"),
]


class MismatchError(ValueError):
    """A checkpoint does not fit a model; `differences` is the message without advice."""

    def __init__(self, differences: str, advice: str) -> None:
        super().__init__(f"{differences}; {advice}")
        self.differences = differences


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
    """Load a checkpoint of tokamix, timm, Lightning or the papers' authors into a model.

    Accepts .safetensors and .pth files (read with weights_only, so no code in them runs), folders written by timm or
    downloaded from the Hugging Face Hub, `hf-hub:user/name`, and state dicts. Prefixes of wrappers, such as "model." of
    a Lightning module, are removed where the names then fit. The authors' parameter names are translated; position
    embeddings and weight banks are resized to the model's image size and the first convolution to its input channels;
    a classifier with a different number of classes keeps its initial values.

    Args:
        model: a tokamix or timm model.
        source: file, folder, Hub name, or a state dict (also inside a training checkpoint).
        strict: raise ValueError if entries are missing, unexpected or of different shape; False loads those that fit.
        use_ema: prefer averaged weights if the file has both.
    """
    own = model.state_dict()
    state = unwrap(source if isinstance(source, Mapping) else read_checkpoint(source), use_ema)
    state = _check_changes(state, own)
    original, state = _translate(state, model, own)
    report = LoadReport(adapted=_resized(original, state))
    _adapt_input(model, state, own, report)
    _drop_classifier(model, state, own, report)

    # PyTorch, too, accepts BatchNorms without this counter, as old files have them
    counters = [name for name in own if name not in state and name.endswith("num_batches_tracked")]
    missing = [name for name in own if name not in state and name not in report.fresh and name not in counters]
    unexpected = [name for name in state if name not in own]
    reshaped = [name for name in own if name in state and state[name].shape != own[name].shape]
    if len(missing) + len(counters) == len(own):
        raise MismatchError(
            f"the checkpoint does not fit {type(model).__name__}: none of its {len(state)} entries matches (it begins"
            f" with {', '.join(list(state)[:3])}; the model with {', '.join(list(own)[:3])})",
            "create the matching model",
        )
    if strict and (missing or unexpected or reshaped):
        hint = _family_function(model, "checkpoint_hint")
        released = hint(original) if hint is not None else None
        differences = _differences(type(model).__name__, own, state, missing, unexpected, reshaped)
        if released:
            differences = f"{differences}; {released}"
        raise MismatchError(differences, "strict=False loads the rest")
    fitting = {name: value for name, value in state.items() if name in own and name not in reshaped}
    model.load_state_dict(fitting, strict=False)
    report.loaded = len(fitting)
    report.fresh += missing + reshaped
    for name in report.fresh:
        _log.warning("%s keeps its initial values: the checkpoint has no entry of that shape", name)
    return report


def _check_changes(state: StateDict, own: StateDict) -> StateDict:
    """Remove the records of changes, after checking that a changed network's weights are for the same changes."""
    mark = own.pop(MARK, None)
    given = next((value for name, value in state.items() if name.endswith(MARK)), None)
    if given is None:
        return state
    changes, present = (describe(read_mark(t)) if t is not None and not t.is_meta else "nothing" for t in (given, mark))
    if changes != present:
        raise MismatchError(
            f"the checkpoint is of a network changed by {changes}, the model was changed by {present}",
            "change the model in the same way first, or load the checkpoint's folder with tokamix.inference.load_model",
        )
    return {name: value for name, value in state.items() if not name.endswith(MARK)}


def read_checkpoint(path: str | Path) -> Mapping[str, Any]:
    """Read a checkpoint file, folder or Hub name without executing code in it."""
    path = _download(str(path)) if str(path).startswith(HUB) else Path(path)
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
        with torch.serialization.safe_globals(SAFE):
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
        chosen = envelopes[0] if use_ema else next((n for n in envelopes if n not in AVERAGED), envelopes[0])
        return unwrap(checkpoint[chosen], use_ema)
    state = {name: value for name, value in checkpoint.items() if isinstance(value, Tensor)}
    if not state:
        raise ValueError(
            f"the checkpoint has no tensors, only {', '.join(map(str, list(checkpoint)[:5])) or 'nothing'}"
        )
    if "n_averaged" in state and all(name.startswith("module.") for name in state if name != "n_averaged"):
        del state["n_averaged"]  # the counter of torch.optim.swa_utils.AveragedModel
    for prefix in PREFIXES * 2:  # a compiled model inside DDP has both, in either order
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): value for name, value in state.items()}
    return state


def _download(name: str) -> Path:
    """Download the weights of a Hub repository; the safe format is preferred."""
    repository, _, revision = name.removeprefix(HUB).partition("@")
    with hub_access(name):
        for file in WEIGHT_FILES:
            try:
                return Path(hf_hub_download(repository, file, revision=revision or None))
            except LocalEntryNotFoundError:
                if file == WEIGHT_FILES[-1]:
                    raise
            except EntryNotFoundError:
                continue
            except HfHubHTTPError as error:
                raise FileNotFoundError(f"{name} cannot be downloaded: {_first_line(error)}") from None
    raise FileNotFoundError(f"{name} has no weights: it needs {' or '.join(WEIGHT_FILES)}")


def _family_function(model: nn.Module, name: str) -> Any:
    """A function of the module that defines the model's class, or None."""
    return getattr(sys.modules[type(model).__module__], name, None)


def _translate(state: StateDict, model: nn.Module, own: StateDict) -> tuple[StateDict, StateDict]:
    """Remove prefixes of wrappers if the names then fit; return the entries, and the same with the model's names."""
    translate = _family_function(model, "checkpoint_filter_fn") or (lambda state, model: state)
    best, stripped = (state, translate(dict(state), model)), _strip_prefix(state, own)
    while stripped is not None:
        translated = translate(dict(stripped), model)
        if len(translated.keys() & own.keys()) > len(best[1].keys() & own.keys()):
            best = (stripped, translated)
        stripped = _strip_prefix(stripped, own)
    return best


def _strip_prefix(state: StateDict, own: StateDict) -> StateDict | None:
    """Remove a prefix that nearly all entries have; of the others keep those of the model. None: there is no prefix."""
    for prefix in PREFIXES + ATTRIBUTES:
        stripped = {n.removeprefix(prefix): value for n, value in state.items() if n.startswith(prefix)}
        if len(stripped) >= PREFIXED * len(state):
            others = {n: value for n, value in state.items() if not n.startswith(prefix) and n in own}
            return {**others, **stripped}
    return None


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
    return f"the checkpoint does not fit {model} in {total} entries: {'; '.join(parts)}"


def _first_line(error: Exception) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).strip()  # without ANSI codes
    return text.splitlines()[0] if text else type(error).__name__
