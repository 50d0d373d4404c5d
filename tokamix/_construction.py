"""Records of how a model was made, in plain JSON, so that a trained model can be created again.

`create_model` and `create_body` record name and arguments, `swap_mixer` and `insert_context_broadcast` their options.
Parameters alone do not show such changes: a swapped model has the parameter names of its host. So the record of a
changed model is also a buffer, `tokamix_changes`, and travels with its weights: a loader that does not know it finds an
unexpected entry and refuses, instead of loading the weights into the unchanged host. transformers ignores unexpected
entries, timm does so for another number of classes: the configuration that they save holds a name they do not know.
"""

import json
from collections.abc import Mapping
from typing import Any

RECORD = "tokamix_construction"  # attribute of a model
HF_NOTE = ", in a network changed by tokamix: load it with tokamix.swap.load_hf"
SWIGLU = "use_swiglu_ffn"
TIMM_NOTE = ", changed by tokamix: load it with tokamix.create_model"
MARK = "tokamix_changes"  # buffer of a changed model: the record as JSON, one number for each byte
# arguments of `create_model` that do not describe the network; the number of classes may change after it is created
UNRECORDED = frozenset(
    (
        *("pretrained", "pretrained_cfg", "pretrained_cfg_overlay", "checkpoint_path", "cache_dir"),
        *("scriptable", "exportable", "no_jit", "num_classes", "device", "dtype"),
    )
)


def record_creation(model: Any, name: str, arguments: Mapping[str, Any]) -> None:
    """Record the registered name of a model and its arguments; earlier records are replaced."""
    kept = {key: value for key, value in arguments.items() if key not in UNRECORDED and value is not None}
    setattr(model, RECORD, {"name": name, "arguments": _as_json(kept), "steps": []})


def record_step(model: Any, function: str, **arguments: Any) -> None:
    """Record a change of an existing model: the name of a function of tokamix, and its arguments."""
    record = read_record(model)
    record["steps"].append({"function": function, "arguments": arguments})
    setattr(model, RECORD, record)
    _mark(model, record)


def record_argument(model: Any, name: str, value: Any) -> None:
    """Record an argument with which a model must be created again, such as an image size that was set later."""
    record = read_record(model)
    if record["arguments"] is not None:
        setattr(model, RECORD, {**record, "arguments": {**record["arguments"], name: value}})


def read_record(model: Any) -> dict[str, Any]:
    """A copy of a model's record: name, arguments and steps.

    Without a record the name is that of timm's `pretrained_cfg`. It is None for a class of unknown origin; arguments
    are None if JSON cannot hold them.
    """
    record = getattr(model, RECORD, None)
    if record is not None:
        return {**record, "steps": list(record["steps"])}
    cfg = getattr(model, "pretrained_cfg", None) or {}
    name = cfg.get("architecture")
    return {"name": name and name.removesuffix(TIMM_NOTE), "arguments": {}, "steps": []}


def forget_steps(model: Any, function: str) -> bool:
    """Remove the recorded calls of a function; returns whether there were any."""
    record = read_record(model)
    kept = [step for step in record["steps"] if step["function"] != function]
    changed = len(kept) < len(record["steps"])
    if changed:
        setattr(model, RECORD, record | {"steps": kept})
        _mark(model, record | {"steps": kept})
    return changed


def forget_record(model: Any) -> None:
    """Remove the record, where the registered name of the model stands for all of it."""
    if hasattr(model, RECORD):
        delattr(model, RECORD)
        _mark(model, {"steps": []})


def read_mark(mark: Any) -> dict[str, Any]:
    """The record in the buffer `tokamix_changes` of a state dict."""
    return json.loads(bytes(mark.tolist()).decode())


def describe(record: Mapping[str, Any]) -> str:
    """The changes of a record in words: "swap_mixer(to='sima')"; without image sizes, which parameters' shapes show."""
    arguments = (
        ", ".join(f"{key}={value!r}" for key, value in step["arguments"].items() if key != "image_size")
        for step in record["steps"]
    )
    calls = (f"{step['function']}({text})" for step, text in zip(record["steps"], arguments, strict=True))
    return " and ".join(calls) or "nothing"


def _mark(model: Any, record: Mapping[str, Any]) -> None:
    """Set or remove the buffer with the record, and its counterparts in the configurations of other libraries."""
    import torch

    if MARK in model._buffers:
        del model._buffers[MARK]
    elif record["steps"]:
        model.register_load_state_dict_pre_hook(_check_mark)
    if record["steps"]:
        parameter = next(model.parameters(), None)
        device = None if parameter is None or parameter.is_meta else parameter.device
        text = json.dumps({key: record[key] for key in ("name", "arguments", "steps")}).encode()
        model.register_buffer(MARK, torch.tensor(list(text), dtype=torch.uint8, device=device))
    cfg = getattr(model, "pretrained_cfg", None) or {}
    if isinstance(name := cfg.get("architecture"), str):  # timm saves it, and creates the network of this name
        name = name.removesuffix(TIMM_NOTE) + (TIMM_NOTE if record["steps"] else "")
        model.pretrained_cfg = {**cfg, "architecture": name}
    config = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        mark_config(config, record["steps"])


def mark_config(config: Any, steps: Any) -> None:
    """Store changes in a configuration of transformers, or remove them.

    transformers only warns of unexpected weights, but does not create a network with an unknown activation; the
    activations of existing networks are modules already.
    """
    setattr(config, MARK, steps)
    parts: tuple[Any, ...] = (config, getattr(config, "vision_config", None))
    for part in parts:
        if isinstance(name := getattr(part, "hidden_act", None), str):
            part.hidden_act = name.removesuffix(HF_NOTE) + (HF_NOTE if steps else "")
        if steps and getattr(part, SWIGLU, False):  # DINOv2's SwiGLU does not read the activation, its MLP does
            setattr(part, SWIGLU, False)
            setattr(part, MARK + SWIGLU, True)
        elif not steps and getattr(part, MARK + SWIGLU, False):
            setattr(part, SWIGLU, True)
            setattr(part, MARK + SWIGLU, False)


def _check_mark(model: Any, state: dict[str, Any], prefix: str, _: Any, *lists: Any) -> None:
    """Hook before weights are loaded: those of the unchanged host fit, those of another change do not."""
    own, given = getattr(model, MARK, None), state.get(prefix + MARK)
    if own is None or own.is_meta:
        return
    if given is not None and not given.is_meta and describe(read_mark(given)) != describe(read_mark(own)):
        lists[-1].append(
            f"the weights are of a network changed by {describe(read_mark(given))}, this one was changed by"
            f" {describe(read_mark(own))}"
        )
    state[prefix + MARK] = own


def _as_json(arguments: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return json.loads(json.dumps(arguments))
    except (TypeError, ValueError):  # such as the class of an activation
        return None
