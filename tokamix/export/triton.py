"""Layout of NVIDIA's Triton Inference Server: REPOSITORY/NAME/1/model.onnx and REPOSITORY/NAME/config.pbtxt."""

from pathlib import Path

from tokamix.files import write_text
from tokamix.runtimes import require

TYPES = {"tensor(float)": "TYPE_FP32", "tensor(uint8)": "TYPE_UINT8", "tensor(int64)": "TYPE_INT64"}
MAX_BATCH = 64  # of a file that takes any batch; Triton joins requests up to it


def check_triton_path(model: Path) -> None:
    """Refuse a path that Triton does not find."""
    model = model.absolute()
    version = model.parent.name
    if model.name != "model.onnx" or not version.isdigit() or not model.parent.parent.name:
        raise ValueError(f"Triton needs a file REPOSITORY/NAME/1/model.onnx, got {model}")
    if version.startswith("0"):
        raise ValueError(f"Triton ignores versions that begin with 0, got {model}; name the version's folder 1")


def write_triton_config(model: Path) -> Path:
    """Write config.pbtxt for REPOSITORY/NAME/1/model.onnx, with the inputs and outputs of the file.

    Triton joins requests to batches if the file takes any batch.
    """
    check_triton_path(model)
    name = model.absolute().parent.parent.name
    session = require("onnxruntime", "the config for Triton").InferenceSession(
        str(model), providers=["CPUExecutionProvider"]
    )
    batched = all(isinstance(value.shape[0], str) for value in (*session.get_inputs(), *session.get_outputs()))
    lines = [f'name: "{name}"', 'backend: "onnxruntime"', f"max_batch_size: {MAX_BATCH if batched else 0}"]
    for kind, values in (("input", session.get_inputs()), ("output", session.get_outputs())):
        for value in values:
            dims = [size if isinstance(size, int) else -1 for size in value.shape[1 if batched else 0 :]]
            shape = ", ".join(map(str, dims)) if dims else "1"
            reshape = "" if dims else ", reshape: { shape: [ ] }"  # one number per image
            lines.append(
                f'{kind} [ {{ name: "{value.name}", data_type: {TYPES[value.type]}, dims: [ {shape} ]{reshape} }} ]'
            )
    if batched:
        lines.append("dynamic_batching { max_queue_delay_microseconds: 2000 }")
    path = model.parent.parent / "config.pbtxt"
    write_text(path, "\n".join(lines) + "\n")
    return path
