"""`export`: write a trained model for a runtime, and check the file before it gets its name."""

import shutil
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

import tokamix
from tokamix._construction import read_record
from tokamix.cost import exp_nodes
from tokamix.dense.detector import Detector
from tokamix.dense.segmenter import Segmenter
from tokamix.export.check import Difference, check_file
from tokamix.export.graph import Graph, Size, check_plain, create_graph
from tokamix.export.sizes import (
    checked_cases,
    choose_batch,
    choose_size,
    find_multiple,
    find_smallest,
    set_size,
    traced_size,
)
from tokamix.export.write import OPSET, OPSETS, PRECISIONS, SUFFIX, WRITERS, move, quiet, written_files
from tokamix.files import WriteError
from tokamix.inference import InferenceConfig, load_model
from tokamix.ops import dispatch
from tokamix.runtimes import first_reason, is_exported

Target = Literal["onnx", "openvino", "torch-export", "aoti", "executorch"]
MAX_DROP = 0.5  # points of accuracy

NOTHING_DETECTED = (
    "the detector finds nothing in random images, so its boxes could not be compared; compare them on your own images:"
    " `tokamix eval FILE --data DATA`"
)

NOT_SQUARE = "`tokamix predict` and `tokamix eval` crop squares, so they do not take this file; call it yourself"


@dataclass
class ExportReport:
    """What an export wrote, and how it was checked."""

    path: Path
    target: str
    precision: str
    size: Size | None  # None: any
    batch: int | None  # None: any
    multiple: int  # the sides of images are multiples of it, if they have any size
    smallest: int  # side, likewise
    checks: list[Difference]
    megabytes: float
    seconds: float
    nodes: int | None = None  # of an ONNX graph
    metrics: dict[str, float] = field(default_factory=dict)  # of int8 on labelled data
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Describe the export in a few lines."""
        steps = f"sides that are multiples of {self.multiple}" if self.multiple > 1 else "any size"
        least = f" from {self.smallest} px on" if self.smallest > self.multiple else ""
        size = steps + least if self.size is None else f"{self.size[0]}x{self.size[1]}"
        batch = "any batch" if self.batch is None else f"batch {self.batch}"
        graph = f", {self.nodes:,} nodes" if self.nodes else ""
        tried = ", ".join(f"{d.batch} x {d.size[0]}x{d.size[1]}: {_describe_error(d)}" for d in self.checks)
        empty = bool(self.checks) and all(difference.detections == 0 for difference in self.checks)
        return [
            f"{self.path}: {self.target}, {self.precision}, {size}, {batch}, {self.megabytes:.1f} MB{graph}"
            f" ({self.seconds:.0f} s)",
            f"checked against PyTorch, relative difference: {tried}",
            *([NOTHING_DETECTED] if empty else []),
            *self.notes,
        ]


def export(
    source: str | Path | nn.Module,
    output: str | Path | None = None,
    *,
    to: Target = "onnx",
    size: int | Size | Literal["dynamic"] | None = None,
    batch: int | Literal["dynamic"] | None = None,
    precision: Literal["fp32", "fp16", "bf16", "int8"] = "fp32",
    preprocessing: bool = False,
    features: bool = False,
    opset: int = OPSET,
    model: str | None = None,
    config: InferenceConfig | None = None,
    data: Any = None,
    keep_layers: int | None = None,
    max_drop: float = MAX_DROP,
    attention: bool = False,
    device: Literal["cpu", "cuda"] = "cpu",
) -> ExportReport:
    """Export a trained model and compare the file with PyTorch at several sizes and batches.

    A file that differs, or that fails at a size it claims to take, is not written. The preprocessing, class names and
    test-time options are in the file's metadata, so that `tokamix.predict` and `tokamix.evaluate` take it as a source.

    Args:
        source: see `tokamix.inference.load_model`; or a model as a module.
        output: the file to write; default: the model's name in the current folder.
        to: "onnx", "openvino" (.xml and .bin), "torch-export" (.pt2), "aoti" (AOTInductor, .pt2, for this kind of
            machine) or "executorch" (.pte).
        size: side of the images or (height, width), or "dynamic" for any; default: a classifier's own, otherwise any.
        batch: images of one call, or "dynamic"; default: 1, and any for a classifier or segmenter of dynamic size.
        precision: of weights and activations. "bf16" is for OpenVINO, torch.export and AOTInductor.
        preprocessing: the graph takes uint8 images (B, H, W, 3), normalises them, and returns classes as well.
        features: export the feature maps of a classifier's backbone instead of its logits.
        opset: version of the ONNX operators.
        model: name of the architecture, for a checkpoint file.
        config: preprocessing and class names of a module; default: those of its `pretrained_cfg`.
        data: images for int8: a data set for `tokamix.create_dataset`, or `DatasetSplits`. It calibrates on the
            training split and measures the accuracy on the validation split.
        keep_layers: number of the most sensitive layers that int8 leaves in fp32; default: as few as `max_drop` needs.
        max_drop: points of top-1 accuracy that int8 may lose.
        attention: int8 for products of two activations in ONNX files too, as in attention; OpenVINO always does it.
        device: that "aoti" compiles for; files of the other targets are not bound to a device.
    """
    _check_options(to, precision, opset, data, device)
    _check_int8_options(to, precision, features, keep_layers, max_drop, attention)
    start = time.perf_counter()
    path = _output_path(output, source, to)
    _check_writable(path)
    network, config = _load(source, model, config)
    shape = choose_size(size, config)
    count = choose_batch(batch, shape, config)
    config = config if shape is None else set_size(config, shape)
    if precision == "int8":
        from tokamix.export.quantize import load_splits

        data = load_splits(data, config, count)
    exact = create_graph(network, config, preprocessing, features, "fp32")
    multiple = 1 if shape is not None else find_multiple(exact, config)
    graph = exact
    if (precision in ("fp16", "bf16") and to != "openvino") or device != "cpu":  # OpenVINO converts at load
        graph = create_graph(network, config, preprocessing, features, precision).to(device)

    def retrace(graph: Graph) -> ExportedProgram:
        return trace(graph, shape, count, config, type(network).__name__, to)

    program = retrace(graph)
    smallest = 1
    if shape is None:  # torch.export may have specialised a program to feature maps of more than one cell
        strict = to in ("torch-export", "aoti") and device == "cpu"
        call = program.module() if strict else exact
        smallest = find_smallest(call, lambda size: exact.example(size, count or 1), config, multiple)
    metadata: dict[str, Any] = {
        "tokamix": tokamix.__version__,
        "model": read_record(network)["name"] or type(network).__name__,
        "inference": config.to_dict(),
        "input": "uint8" if preprocessing else "float32",
        "size": None if shape is None else list(shape),
        "multiple": multiple,  # of the sides of images, if any size
        "smallest": smallest,  # side
        "batch": count,
        "outputs": graph.names(_run_once(exact, shape, config)),
        "features": features,
        "precision": precision,
        "device": device,
    }
    report = ExportReport(path, to, precision, shape, count, multiple, smallest, [], 0.0, 0.0)
    if config.task == "classify" and shape is not None and shape[0] != shape[1] and not features:
        report.notes.append(NOT_SQUARE)
    folder = _temporary_folder(path)
    try:
        file = folder / path.name
        if precision == "int8":
            from tokamix.export.quantize import write_int8

            int8 = write_int8(
                program, file, metadata, to, opset, exact, data, keep_layers, max_drop, attention, retrace
            )
            report.notes.append(str(int8))
            report.metrics = {"fp32": int8.fp32, "int8": int8.int8, "drop": int8.drop, "kept": len(int8.kept)}
        else:
            WRITERS[to](program, file, metadata, opset)
        report.checks = check_file(file, exact, checked_cases(shape, count, config, multiple, smallest), precision)
        report.megabytes = sum(part.stat().st_size for part in written_files(file)) / 1e6
        if file.suffix == ".onnx":
            report.nodes = _count_nodes(file)
            report.notes.append(_describe_exp(file))
        move(file, path)
    except OSError as error:
        raise WriteError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    report.seconds = time.perf_counter() - start
    return report


def _describe_error(difference: Difference) -> str:
    return "nothing detected" if difference.detections == 0 else f"{difference.error:.0e}"


def trace(
    graph: Graph, size: Size | None, batch: int | None, config: InferenceConfig, name: str, to: str
) -> ExportedProgram:
    """Trace a graph with torch.export for a target; sizes and batches of None stay symbolic."""
    # from a size that is neither square nor the model's own, and a batch of 2: what equals a constant is specialised
    example = graph.example(size or traced_size(config), batch or 2)
    axes = (1, 2) if graph.preprocessing else (2, 3)
    dynamic: dict[int, Any] = {} if batch else {0: Dim.AUTO}
    if size is None:
        dynamic |= dict.fromkeys(axes, Dim.AUTO)
    try:
        with torch.no_grad(), quiet(), dispatch.export_target(to):
            program = torch.export.export(graph, (example,), dynamic_shapes=(dynamic,) if dynamic else None)
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        raise ValueError(f"{name} cannot be traced: {first_reason(error)}") from error
    shape = next(node.meta["val"] for node in program.graph.nodes if node.name == "images").shape
    if fixed := [shape[axis] for axis in dynamic if not isinstance(shape[axis], torch.SymInt)]:
        raise ValueError(f"{name} cannot be exported with a free size or batch: one of them is fixed to {fixed[0]}")
    return program


def _check_options(to: str, precision: str, opset: int, data: Any, device: str) -> None:
    if to not in SUFFIX:
        raise ValueError(f"cannot export to {to!r}; choose one of {', '.join(SUFFIX)}")
    if precision not in PRECISIONS[to]:
        raise ValueError(f"{to} files cannot be {precision}; choose one of {', '.join(PRECISIONS[to])}")
    if device not in ("cpu", "cuda"):
        raise ValueError(f"device is {device!r}, but must be cpu or cuda")
    if device != "cpu" and to != "aoti":
        raise ValueError(f"--device {device} is for --to aoti, which compiles for one device, got --to {to}")
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU, and torch finds none")
    if opset != OPSET and to not in ("onnx", "openvino"):
        raise ValueError(f"--opset is for ONNX and OpenVINO files, got --to {to}; leave it out")
    if opset not in OPSETS:
        raise ValueError(f"opset {opset} is not supported; choose {OPSETS.start} to {OPSETS.stop - 1}")
    if precision == "int8" and data is None:
        raise ValueError("int8 needs images to calibrate on and to measure the accuracy; name a data set with --data")
    if precision != "int8" and data is not None:
        raise ValueError(f"--data is for --precision int8, got {precision}; leave it out")


def _check_int8_options(
    to: str, precision: str, features: bool, keep_layers: int | None, max_drop: float, attention: bool
) -> None:
    if precision == "int8" and features:
        raise ValueError("int8 is judged by its accuracy, which feature maps do not have; leave out --features")
    if precision != "int8" and (keep_layers is not None or attention or max_drop != MAX_DROP):
        option = "--keep-layers" if keep_layers is not None else "--int8-attention" if attention else "--max-drop"
        raise ValueError(f"{option} is for --precision int8, got {precision}; leave it out")
    if attention and to != "onnx":
        raise ValueError(f"--int8-attention is for ONNX files, got --to {to}; leave it out")
    if keep_layers and to == "torch-export":
        raise ValueError("--keep-layers is for ONNX and OpenVINO files; torch-export has int8 weights only")
    if not max_drop >= 0 or (keep_layers or 0) < 0:  # NaN neither
        raise ValueError(f"max_drop and keep_layers must be 0 or more, got {max_drop} and {keep_layers}")


def _load(
    source: str | Path | nn.Module, model: str | None, config: InferenceConfig | None
) -> tuple[Any, InferenceConfig]:
    """The network to export and its config."""
    if not isinstance(source, nn.Module):
        if config is not None:
            raise ValueError(f"config is for a model given as a module; {source} has its own")
        if is_exported(source):
            raise ValueError(f"{source} is an exported file; export the run or checkpoint that it was made from")
        return load_model(source, model=model)
    if model is not None:
        raise ValueError(f"model={model!r} is for a checkpoint file; leave it out for a module")
    check_plain(source)
    config = config or _default_config(source)
    count = getattr(source, "num_classes", None)
    if count is not None and count != config.num_classes:
        raise ValueError(f"the model has {count} classes, but the config names {config.num_classes}")
    return source, config


def _default_config(network: Any) -> InferenceConfig:
    if isinstance(network, Detector | Segmenter):
        task: Any = "detect" if isinstance(network, Detector) else "segment"
        names = tuple(map(str, range(network.num_classes)))
        ids = tuple(range(1, network.num_classes + 1)) if task == "detect" else ()
        return InferenceConfig.from_model(network.backbone.body, names, task=task, category_ids=ids)
    return InferenceConfig.from_model(network)


def _output_path(output: str | Path | None, source: Any, to: str) -> Path:
    suffix = SUFFIX[to]
    if output is None:
        name = type(source).__name__.lower() if isinstance(source, nn.Module) else Path(str(source)).name
        name = name.rpartition(":")[2] or "model"
        return Path(name if name.endswith(suffix) else f"{name}{suffix}")
    path = Path(output)
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file that ends with {suffix}")
    if path.suffix != suffix:
        raise ValueError(f"a file for {to} ends with {suffix}, got {path.name}")
    return path


def _check_writable(path: Path) -> None:
    """Refuse a file that cannot be written, before minutes of tracing; missing folders are created at the end."""
    for part in written_files(path):
        if part.is_dir():
            raise WriteError(f"cannot write {part}: it is a folder; name another file")
    folder = next((parent for parent in path.parents if parent.exists()), Path())
    if not folder.is_dir():
        raise WriteError(f"cannot write {path}: {folder} is a file, not a folder")
    try:
        # what the export does at its end; a permission alone tells nothing about read-only disks
        tempfile.TemporaryDirectory(prefix=".export-", dir=folder).cleanup()
    except OSError as error:
        raise WriteError(f"cannot write into {folder}: {error.strerror or error}") from error


def _temporary_folder(path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix=".export-", dir=path.parent))
    except OSError as error:
        raise WriteError(f"cannot write {path}: {error.strerror or error}") from error


def _run_once(graph: Graph, size: Size | None, config: InferenceConfig) -> Any:
    with torch.no_grad():
        return graph(graph.example(size or traced_size(config), 1))


def _count_nodes(path: Path) -> int:
    import onnx

    return len(onnx.load(str(path), load_external_data=False).graph.node)


def _describe_exp(path: Path) -> str:
    exps, roots = (", ".join(f"{n} {name}" for name, n in counts.items()) or "none" for counts in exp_nodes(path))
    return f"nodes that evaluate exp: {exps}; square roots: {roots}"
