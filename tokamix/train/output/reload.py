"""Check that a run's folder gives back the network that was trained."""

from pathlib import Path
from textwrap import shorten
from typing import Any

import torch
from torch import Tensor, nn

from tokamix._construction import MARK
from tokamix.inference import InferenceConfig, evaluation_mode, load_model

# of the largest output: the same network gives the same outputs up to rounding. It must be small: in a network that
# has hardly been trained, another number of heads changes the outputs by less than 1e-3.
TOLERANCE = 2e-5


class ReloadError(ValueError):
    """A run's folder does not load as the network that was trained."""


def check_reload(folder: Path, model: nn.Module, config: InferenceConfig) -> None:
    """Load the folder of a finished run and compare it with the model in memory, which has the best weights."""
    try:
        loaded, _ = load_model(folder)
        problem = compare_models(model, loaded, config)
    except Exception as error:  # whatever it is, the weights are complete
        problem = shorten(f"{type(error).__name__}: {error}", 200)
    if problem:
        raise ReloadError(
            f"{folder} does not load as the network that was trained ({problem}); its weights are complete: create the"
            f" model yourself and use tokamix.load_checkpoint(model, {str(folder)!r})"
        )


def compare_structure(model: nn.Module, other: nn.Module) -> str:
    """The first difference between the parameters and modules of two models, in words; empty if there is none."""
    # the records of changes also hold arguments that make no difference here, such as the rate of stochastic depth
    own, state = ({n: t for n, t in m.state_dict().items() if not n.endswith(MARK)} for m in (model, other))
    if different := own.keys() ^ state.keys():
        return f"{len(different)} parameters are in one of them only, such as {min(different)}"
    if different := {name for name, tensor in own.items() if tensor.shape != state[name].shape}:
        return f"{len(different)} parameters have different shapes, such as {min(different)}"
    kinds, others = _modules(model), _modules(other)
    if kinds != others:
        name = min(name for name in kinds.keys() | others.keys() if kinds.get(name) != others.get(name))
        return f"{name or 'the module'} is {kinds.get(name)} in one of them, {others.get(name)} in the other"
    return ""


def compare_models(model: nn.Module, other: nn.Module, config: InferenceConfig) -> str:
    """The first difference between two models, in structure or outputs, in words; empty if they are the same."""
    if difference := compare_structure(model, other):
        return difference
    device = next(model.parameters()).device
    images = torch.randn(2, config.in_chans, *_size(config), generator=torch.Generator().manual_seed(0)).to(device)
    # in full precision, so that a difference is one of the networks
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            first, second = _outputs(model, images), _outputs(_place_like(other, model), images)
    finally:
        torch.set_float32_matmul_precision(precision)
    for one, two in zip(first, second, strict=True):
        error, scale = (one - two).abs().max().item(), one.abs().max().item()
        if not error <= TOLERANCE * scale:
            return f"outputs differ by {error:.2g}, the largest is {scale:.2g}"
    return ""


def _modules(model: nn.Module) -> dict[str, str]:
    """Names and classes of all modules that do something in evaluation, where a SyncBatchNorm is a BatchNorm."""
    kinds = {name: type(module).__name__ for name, module in model.named_modules()}
    return {
        name: "BatchNorm" if "BatchNorm" in kind else kind
        for name, kind in kinds.items()
        if kind != "Identity" and "Drop" not in kind
    }


def _place_like(other: nn.Module, model: nn.Module) -> nn.Module:
    """Move a model to the device and memory formats of another: sums depend on the order."""
    parameters = dict(model.named_parameters())
    other.to(next(model.parameters()).device)
    for name, parameter in other.named_parameters():
        parameter.data = torch.empty_like(parameters[name]).copy_(parameter.data)
    return other


def _size(config: InferenceConfig) -> tuple[int, int]:
    return (config.image_size, config.image_size) if config.task == "classify" else (64, 64)


@torch.no_grad()
def _outputs(model: Any, images: Tensor) -> list[Tensor]:
    """Outputs of a classifier, or the backbone's maps: a detector's output depends on thresholds."""
    network = getattr(model, "backbone", model) if hasattr(model, "neck") else model
    with evaluation_mode(model), torch.compiler.set_stance("force_eager"):
        outputs = network(images)
    return [outputs] if isinstance(outputs, Tensor) else [one for one in outputs if isinstance(one, Tensor)]
