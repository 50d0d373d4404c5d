"""Exported models in their runtimes: ONNX Runtime, OpenVINO, torch.export, AOTInductor and ExecuTorch.

`load_exported("model.onnx")` opens a file that `tokamix.export` wrote as a module with the interface of the model it
was made from, so that prediction, evaluation and benchmarks take exported files too.
"""

import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

METADATA_KEY = "tokamix"
SUFFIXES = (".onnx", ".xml", ".pt2", ".pte")
# the extra of pyproject.toml that installs a package
EXTRAS = {
    "onnxruntime": "onnx",
    "onnx": "export",
    "onnxscript": "export",
    "openvino": "openvino",
    "nncf": "openvino",
    "torchao": "int8",
    "executorch": "executorch",
}
Run = Callable[[Tensor], Sequence[Any]]


def is_exported(source: Any) -> bool:
    """Whether a source is named like a file that `tokamix.export` writes."""
    return isinstance(source, str | Path) and Path(str(source)).suffix in SUFFIXES


def require(package: str, purpose: str) -> Any:
    """Import an optional package, or say which extra installs it."""
    import importlib

    try:
        return importlib.import_module(package)
    except ImportError:
        extra = EXTRAS[package.split(".")[0]]
        raise ImportError(f"{purpose} needs {package.split('.')[0]}: pip install 'tokamix[{extra}]'") from None


def first_reason(error: BaseException) -> str:
    """The first line of an error that says something; OpenVINO's begin with places in its source."""
    lines = [line.strip() for line in str(error).splitlines()]
    said = [line for line in lines if line and not line.startswith("Exception from ")]
    return (said or [type(error).__name__])[0]


class ExportedModel(nn.Module):
    """An exported file as a module: images (B, C, H, W), normalised, -> what the model it was made from returns.

    Batches are split or padded to the batch of the file. A file of a segmenter or detector with a fixed size pads
    smaller images at the right and bottom, like the model itself.

    Args:
        run: images -> outputs in the order of the metadata.
        metadata: as written by `tokamix.export`.
        path: of the file, for messages.
    """

    def __init__(self, run: Run, metadata: Mapping[str, Any], path: Path) -> None:
        super().__init__()
        self.run, self.metadata, self.path = run, dict(metadata), path
        self.place = nn.Parameter(torch.empty(0), requires_grad=False)  # its device is the device of the outputs
        inference = self.metadata["inference"]
        self.mean, self.std = (torch.tensor(inference[key])[:, None, None] for key in ("mean", "std"))

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.metadata["inference"]["class_names"])

    def outputs(self, images: Tensor) -> dict[str, Tensor]:
        """The outputs of the file by name, for normalised images (B, C, H, W)."""
        pixels = self._fit(images)
        if self.metadata["input"] == "uint8":
            pixels = ((pixels.cpu() * self.std + self.mean) * 255).round().clamp(0, 255).byte().permute(0, 2, 3, 1)
        size = self.metadata["batch"] or len(pixels)
        parts = []
        for start in range(0, len(pixels), size):
            part = pixels[start : start + size]
            missing = size - len(part)
            whole = torch.cat([part, part[-1:].expand(missing, *part.shape[1:])]) if missing else part
            values = [torch.as_tensor(np.asarray(v) if not isinstance(v, Tensor) else v) for v in self.run(whole)]
            parts.append([value[: len(part)] for value in values])
        return {
            name: torch.cat(values).to(images.device)
            for name, values in zip(self.metadata["outputs"], zip(*parts, strict=True), strict=True)
        }

    def forward(self, images: Tensor) -> Any:
        """Logits of a classifier (B, K) or segmenter (B, K, H, W), or the maps of a feature extractor."""
        outputs = self.outputs(images)
        if self.metadata["features"]:
            return list(outputs.values())
        if "logits" in outputs:
            height, width = images.shape[-2:]
            return outputs["logits"][..., :height, :width] if outputs["logits"].ndim == 4 else outputs["logits"]
        return outputs["scores"].clamp_min(torch.finfo(torch.float32).tiny).log()

    def _fit(self, images: Tensor) -> Tensor:
        size, given = self.metadata["size"], tuple(images.shape[-2:])
        if size is None:
            self._check_sides(given)
            return images.float()
        if tuple(size) == given:
            return images.float()
        height, width = size
        if self.metadata["inference"]["task"] == "classify" or given[0] > height or given[1] > width:
            raise ValueError(
                f"{self.path} was exported for images of {height}x{width}, got {given[0]}x{given[1]}; export it with"
                f" --size {given[0]}x{given[1]} or --size dynamic"
            )
        return F.pad(images.float(), (0, width - given[1], 0, height - given[0]))

    def _check_sides(self, given: tuple[int, ...]) -> None:
        """Refuse sizes that the network refused: the graph would return numbers that mean nothing."""
        multiple, smallest = (self.metadata.get(key, 1) for key in ("multiple", "smallest"))
        if min(given) < smallest or any(side % multiple for side in given):
            steps = f" that are multiples of {multiple}" * (multiple > 1)
            raise ValueError(
                f"{self.path} takes images with sides{steps} from {smallest} px on, got {given[0]}x{given[1]}; resize"
                " the image"
            )


def load_exported(path: str | Path, device: str = "cpu", threads: int | None = None) -> ExportedModel:
    """Open an exported file in its runtime.

    Args:
        path: a .onnx, .xml (OpenVINO), .pt2 (torch.export or AOTInductor) or .pte (ExecuTorch) file.
        device: "cpu" or "cuda"; OpenVINO and ExecuTorch have the CPU only, AOTInductor runs where it was compiled for.
        threads: CPU threads; default: PyTorch's.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"there is no exported model {path}")
    if device == "cuda" and path.suffix in (".xml", ".pte"):
        raise ValueError(
            f"{path} runs on the CPU only; leave out the device, or use the .onnx or .pt2 file of the model"
        )
    opener = {".onnx": _open_onnx, ".xml": _open_openvino, ".pt2": _open_pt2, ".pte": _open_executorch}[path.suffix]
    run, text = opener(path, device, threads or torch.get_num_threads())
    metadata = _read_metadata(text)
    if "inference" not in metadata:
        raise ValueError(
            f"{path} does not say how to preprocess images and what its classes are; write it with `tokamix export`"
        )
    return ExportedModel(run, metadata, path)


def _read_metadata(text: str) -> dict[str, Any]:
    """The metadata of `tokamix.export`; {} if there are none, or those of another program under our key."""
    try:
        values = json.loads(text)
    except json.JSONDecodeError:
        return {}
    return values if isinstance(values, dict) else {}


def _open_onnx(path: Path, device: str, threads: int) -> tuple[Run, str]:
    onnxruntime = require("onnxruntime", f"{path}")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = threads
    providers = ["CUDAExecutionProvider"] * (device == "cuda") + ["CPUExecutionProvider"]
    if providers[0] not in onnxruntime.get_available_providers():
        raise ValueError("this onnxruntime runs on the CPU only; pip install onnxruntime-gpu, or use the device cpu")
    with _damaged(path):
        session = onnxruntime.InferenceSession(str(path), options, providers)
    name = session.get_inputs()[0].name

    def run(images: Tensor) -> Sequence[Any]:
        return session.run(None, {name: images.cpu().contiguous().numpy()})

    return run, session.get_modelmeta().custom_metadata_map.get(METADATA_KEY, "")


def _open_openvino(path: Path, device: str, threads: int) -> tuple[Run, str]:
    openvino = require("openvino", f"{path}")
    core = openvino.Core()
    if not path.with_suffix(".bin").is_file():
        raise FileNotFoundError(f"{path} needs its weights {path.with_suffix('.bin').name} beside it")
    with _damaged(path):
        model = core.read_model(str(path))
    text = str(model.get_rt_info([METADATA_KEY]).astype(str)) if model.has_rt_info([METADATA_KEY]) else ""
    precision = _read_metadata(text).get("precision", "fp32")
    # what is not quantised in an int8 file runs in bf16 if the processor has it: 1.2x as fast for AMixer
    capable = "BF16" in core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")
    half = precision == "bf16" or (precision == "int8" and capable)
    options: dict[str, Any] = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "bf16" if half else "f32"}
    options["INFERENCE_NUM_THREADS"] = threads
    request = core.compile_model(model, "CPU", options).create_infer_request()

    def run(images: Tensor) -> Sequence[Any]:
        results = request.infer([images.cpu().contiguous().numpy()])
        return [np.array(results[i]) for i in range(len(results))]  # the request reuses its memory

    return run, text


def _open_pt2(path: Path, device: str, threads: int) -> tuple[Run, str]:
    with _damaged(path), zipfile.ZipFile(path) as archive:
        compiled = any("aotinductor" in name for name in archive.namelist())
    if compiled:
        with _damaged(path):
            package = torch._inductor.aoti_load_package(str(path))
        text = package.get_metadata().get(METADATA_KEY, "")
        built = _read_metadata(text).get("device", "cpu")
        if device == "cuda" and built == "cpu":
            raise ValueError(f"{path} was compiled for the CPU; leave out the device, or export it on a GPU")
        device = built
        call: Any = package
    else:
        extra = {METADATA_KEY: ""}
        with _damaged(path):
            call = torch.export.load(str(path), extra_files=extra).module().to(device)
        value: Any = extra[METADATA_KEY]
        text = value.decode() if isinstance(value, bytes) else value

    def run(images: Tensor) -> Sequence[Any]:
        with torch.inference_mode():
            outputs = call(images.to(device))
        return [outputs] if isinstance(outputs, Tensor) else list(outputs)

    return run, text


def _open_executorch(path: Path, device: str, threads: int) -> tuple[Run, str]:
    runtime = require("executorch.runtime", f"{path}")
    with _damaged(path):
        method = runtime.Runtime.get().load_program(path).load_method("forward")
    sidecar = path.with_name(f"{path.name}.json")  # a .pte file has no place for text
    text = sidecar.read_text() if sidecar.is_file() else ""
    return (lambda images: method.execute([images.cpu().contiguous()])), text


class _damaged:
    """Turn a runtime's own exception for a file that it cannot read into one sentence."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception):
            raise ValueError(f"{self.path} cannot be opened: {first_reason(error)}") from error
