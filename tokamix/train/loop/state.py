"""The training state in one safetensors file: tensors by name, everything else as JSON in its header. No pickle.

It contains no random state: every step seeds its generators from (seed, step, process).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from tokamix.files import write_tensors

Tensors = dict[str, Tensor]
FORMAT = 2
GROUP = "group "  # prefix of tensors that belong to a parameter group; no parameter's name has a space


def whole(tensor: Tensor) -> Tensor:
    """A copy on the CPU, gathered if the tensor is sharded; a collective call for all processes."""
    tensor = tensor.detach()
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return full.to("cpu", copy=True).contiguous()


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A whole tensor on the device of `like`, sharded in the same way."""
    tensor = tensor.to(like.device)
    return distribute_tensor(tensor, like.device_mesh, like.placements) if isinstance(like, DTensor) else tensor


def whole_weights(model: nn.Module) -> Tensors:
    """The model's state dict on the CPU."""
    return {name: whole(tensor) for name, tensor in model.state_dict().items()}


@torch.no_grad()
def load_weights(own: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Copy weights by name into existing tensors."""
    for name, tensor in own.items():
        tensor.copy_(shard_like(weights[name], tensor))


def optimizer_state(optimizer: Optimizer, model: nn.Module) -> tuple[Tensors, dict[str, Any]]:
    """An optimizer's tensors by the name of their parameter, and its numbers."""
    state = optimizer.state_dict()
    tensors: Tensors = {}
    numbers: dict[str, dict[str, Any]] = {}
    for index, name in enumerate(_names(optimizer, model)):
        for key, value in state["state"].get(index, {}).items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = whole(value)
            else:
                numbers.setdefault(name, {})[key] = value
    groups: list[dict[str, Any]] = []
    for index, group in enumerate(state["param_groups"]):
        groups.append({k: v for k, v in group.items() if k != "params" and not isinstance(v, Tensor)})
        tensors |= {f"{GROUP}{index}/{k}": whole(v) for k, v in group.items() if isinstance(v, Tensor)}
    return tensors, {"numbers": numbers, "groups": groups}


@torch.no_grad()
def load_optimizer(optimizer: Optimizer, model: nn.Module, tensors: Tensors, rest: Mapping[str, Any]) -> None:
    """Restore an optimizer from the result of `optimizer_state`."""
    parameters = dict(model.named_parameters())
    per_parameter: dict[str, dict[str, Any]] = {name: dict(values) for name, values in rest["numbers"].items()}
    groups = [dict(group) for group in rest["groups"]]
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        if name.startswith(GROUP):
            groups[int(name.removeprefix(GROUP))][key] = tensor
            continue
        like = parameters[name]
        if tensor.shape == like.shape and key != "step":
            # in the parameter's memory format as well: sums depend on the order
            tensor = torch.empty_like(like, dtype=tensor.dtype).copy_(shard_like(tensor, like))
        per_parameter.setdefault(name, {})[key] = tensor
    state = optimizer.state_dict()
    names = _names(optimizer, model)
    state["state"] = {i: per_parameter[name] for i, name in enumerate(names) if name in per_parameter}
    for group, saved in zip(state["param_groups"], groups, strict=True):
        group |= {key: tuple(value) if isinstance(value, list) else value for key, value in saved.items()}
    optimizer.load_state_dict(state)


def write_state(path: Path, groups: Mapping[str, Tensors], rest: Mapping[str, Any]) -> None:
    """Write groups of tensors, and values that JSON can hold."""
    tensors = {f"{group}:{name}": tensor for group, named in groups.items() for name, tensor in named.items()}
    write_tensors(path, tensors, {"state": json.dumps({"format": FORMAT, **rest})})


def read_state(path: Path) -> tuple[dict[str, Tensors], dict[str, Any]]:
    """Read the result of `write_state`."""
    groups: dict[str, Tensors] = {}
    rest = read_header(path)
    try:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118, the file is no dict
                group, _, name = key.partition(":")
                groups.setdefault(group, {})[name] = file.get_tensor(key)
    except SafetensorError as error:
        raise _damaged(path, error) from error
    return groups, rest


def read_header(path: Path) -> dict[str, Any]:
    """Read the values of a state without its tensors."""
    try:
        with safe_open(path, "pt") as file:
            rest: dict[str, Any] = json.loads(file.metadata()["state"])
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _damaged(path, error) from error
    if rest["format"] != FORMAT:
        raise ValueError(
            f"{path} has format {rest['format']}, but this version reads {FORMAT}; start over with --no-resume"
        )
    return rest


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{path} is damaged or not the state of a run ({error}); delete it, or start over with --no-resume"
    )


def _names(optimizer: Optimizer, model: nn.Module) -> list[str]:
    """Names of the optimizer's parameters, in its own order."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
