"""Records of how a model was made, in plain JSON, so that a trained model can be created again.

`create_model` and `create_body` record name and arguments, `swap_mixer` and `insert_context_broadcast` their options.
The weights alone do not show such changes: a swapped model has the parameter names of its host.
"""

import json
from collections.abc import Mapping
from typing import Any

RECORD = "tokamix_construction"  # attribute of a model
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


def read_record(model: Any) -> dict[str, Any]:
    """A copy of a model's record: name, arguments and steps.

    Without a record the name is that of timm's `pretrained_cfg`. It is None for a class of unknown origin; arguments
    are None if JSON cannot hold them.
    """
    record = getattr(model, RECORD, None)
    if record is not None:
        return {**record, "steps": list(record["steps"])}
    cfg = getattr(model, "pretrained_cfg", None) or {}
    return {"name": cfg.get("architecture"), "arguments": {}, "steps": []}


def forget_steps(model: Any, function: str) -> bool:
    """Remove the recorded calls of a function; returns whether there were any."""
    record = read_record(model)
    kept = [step for step in record["steps"] if step["function"] != function]
    changed = len(kept) < len(record["steps"])
    if changed:
        setattr(model, RECORD, record | {"steps": kept})
    return changed


def forget_record(model: Any) -> None:
    """Remove the record, where the registered name of the model stands for all of it."""
    if hasattr(model, RECORD):
        delattr(model, RECORD)


def _as_json(arguments: dict[str, Any]) -> dict[str, Any] | None:
    try:
        return json.loads(json.dumps(arguments))
    except (TypeError, ValueError):  # such as the class of an activation
        return None
