"""Writers of the export targets, each from a traced program to a file."""

import ast
import json
import logging
import os
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.export import ExportedProgram

from tokamix.export.simplify import simplify
from tokamix.runtimes import METADATA_KEY, require

SUFFIX = {"onnx": ".onnx", "openvino": ".xml", "torch-export": ".pt2", "aoti": ".pt2", "executorch": ".pte"}
PRECISIONS = {
    "onnx": ("fp32", "fp16", "int8"),
    "openvino": ("fp32", "fp16", "bf16", "int8"),
    "torch-export": ("fp32", "fp16", "bf16", "int8"),
    "aoti": ("fp32", "bf16"),
    "executorch": ("fp32",),
}
OPSETS, OPSET = range(18, 24), 20
SCOPES = "pkg.torch.onnx.name_scopes"  # where the exporter writes the modules of a node
FOLDED_VALUES = 2**24  # the largest constant that is computed while exporting
Metadata = dict[str, Any]
_translated: WeakKeyDictionary[ExportedProgram, Any] = WeakKeyDictionary()


def write_onnx(program: ExportedProgram, path: Path, metadata: Metadata, opset: int) -> None:
    """Write an ONNX file with its weights inside."""
    proto = to_onnx(program, metadata["outputs"], opset)
    add_metadata(proto, metadata)
    require("onnx", "export to ONNX").save(proto, str(path))


def to_onnx(program: ExportedProgram, outputs: Sequence[str], opset: int) -> Any:
    """Translate a program to ONNX and compute everything that depends on weights alone."""
    require("onnxscript", "export to ONNX")
    from onnxscript import optimizer

    if program in _translated:  # int8 needs the fp32 file as well
        return _translated[program]

    with quiet(), _translation_errors():
        exported: Any = torch.onnx.export(
            program,
            (),
            input_names=["images"],
            output_names=list(outputs),
            opset_version=opset,
            dynamo=True,
            verbose=False,
        )
        # banks and position tables of a fixed size, which are larger than the exporter folds by itself
        optimizer.optimize_ir(exported.model, input_size_limit=FOLDED_VALUES, output_size_limit=FOLDED_VALUES)
        _register_initializers(exported.model.graph)
        simplify(exported.model)
        proto = exported.model_proto
    del proto.graph.value_info[:]  # some are wrong after folding, and quantisers believe them
    _name_nodes(proto)
    _translated[program] = proto
    return proto


def _register_initializers(graph: Any) -> None:
    """Register constants that onnxscript 0.7.2 loses when its rules name two of them alike."""
    for node in graph:
        for value in node.inputs:
            if value is not None and value.const_value is not None and value.name not in graph.initializers:
                graph.register_initializer(value)


def _name_nodes(proto: Any) -> None:
    """Name nodes after the modules that they come from: `stages.0.blocks.0.mlp.fc1`, not `node_MatMul_57`."""
    taken: Counter[str] = Counter()
    for node in proto.graph.node:
        scopes = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "[]")
        module = next((scope for scope in reversed(ast.literal_eval(scopes)[:-1]) if scope), "")
        name = f"{module.removeprefix('network').removeprefix('.') or 'model'}/{node.op_type}"
        node.name = f"{name}_{taken[name]}" if taken[name] else name
        taken[name] += 1


@contextmanager
def _translation_errors() -> Iterator[None]:
    """Say in one sentence what torch.onnx explains in a page."""
    try:
        yield
    except torch.onnx.errors.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        reason = (str(cause).strip().splitlines() or [type(cause).__name__])[0][:300]
        raise ValueError(f"the model cannot be translated to ONNX: {reason}") from error


def add_metadata(proto: Any, metadata: Metadata) -> None:
    """Store the metadata in an ONNX model."""
    kept = [entry for entry in proto.metadata_props if entry.key != METADATA_KEY]
    del proto.metadata_props[:]
    proto.metadata_props.extend(kept)
    entry = proto.metadata_props.add()
    entry.key, entry.value = METADATA_KEY, json.dumps(metadata)


def write_openvino(program: ExportedProgram, path: Path, metadata: Metadata, opset: int) -> None:
    """Write OpenVINO's .xml file and its weights, a .bin file beside it."""
    save_openvino(to_openvino(program, metadata["outputs"], opset), path, metadata)


def to_openvino(program: ExportedProgram, outputs: Sequence[str], opset: int) -> Any:
    """Translate a program to OpenVINO, by way of ONNX: OpenVINO's own reader of programs lacks operators."""
    openvino, folding = (require(name, "export to OpenVINO") for name in ("openvino", "openvino.passes"))
    proto = to_onnx(program, outputs, opset)
    with quiet():
        model = openvino.Core().read_model(proto.SerializeToString())
        # weights of depthwise convolutions are Reshapes until they are folded, which NNCF 3.4 quantises wrongly
        passes = folding.Manager()
        passes.register_pass(folding.ConstantFolding())
        passes.run_passes(model)
        return model


def save_openvino(model: Any, path: Path, metadata: Metadata) -> None:
    """Save an OpenVINO model with its metadata."""
    model.set_rt_info(json.dumps(metadata), [METADATA_KEY])
    openvino = require("openvino", "export to OpenVINO")
    try:
        openvino.save_model(model, str(path), compress_to_fp16=metadata["precision"] == "fp16")
    except RuntimeError as error:  # OpenVINO does not say why
        raise OSError(f"OpenVINO fails to write its files ({error}); is the disk full?") from error


def write_torch_export(program: ExportedProgram, path: Path, metadata: Metadata, opset: int) -> None:
    """Write torch.export's archive, by way of memory: on a full disk, its own writer ends the process."""
    archive = BytesIO()
    torch.export.save(program, archive, extra_files={METADATA_KEY: json.dumps(metadata)})
    path.write_bytes(archive.getvalue())


def write_aoti(program: ExportedProgram, path: Path, metadata: Metadata, opset: int) -> None:
    """Compile a program with AOTInductor, for this machine's kind of CPU or GPU."""
    options = {"aot_inductor.metadata": {METADATA_KEY: json.dumps(metadata)}}
    _give_defaults_to_cant_split()
    archive: Any = BytesIO()  # on a full disk, PyTorch's own writer ends the process
    with quiet():
        torch._inductor.aoti_compile_and_package(program, package_path=archive, inductor_configs=options)
    path.write_bytes(archive.getvalue())


def _give_defaults_to_cant_split() -> None:
    """Work around https://github.com/pytorch/pytorch/issues/178676, which is repaired after torch 2.11.

    Inductor raises CantSplit without its two arguments where it tries another loop next, so the attempt ends in a
    TypeError. STViT on a GPU, with more than one image, is such a case.
    """
    from torch._inductor.codegen.simd import CantSplit

    create: Any = CantSplit
    try:
        create()
    except TypeError:
        create.__init__.__defaults__ = (None, None)


def write_executorch(program: ExportedProgram, path: Path, metadata: Metadata, opset: int) -> None:
    """Write an ExecuTorch program for the XNNPACK CPU library, and its metadata in NAME.pte.json beside it."""
    require("executorch.exir", "export to ExecuTorch")
    with quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()]).to_executorch()
    path.write_bytes(lowered.buffer)
    written_files(path)[1].write_text(json.dumps(metadata))


WRITERS: dict[str, Callable[[ExportedProgram, Path, Metadata, int], None]] = {
    "onnx": write_onnx,
    "openvino": write_openvino,
    "torch-export": write_torch_export,
    "aoti": write_aoti,
    "executorch": write_executorch,
}


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the progress lines and deprecation warnings of exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


def written_files(path: Path) -> list[Path]:
    """The files of an export: the model, and what stands beside it."""
    beside = {".xml": [path.with_suffix(".bin")], ".pte": [path.with_name(f"{path.name}.json")]}
    return [path, *beside.get(path.suffix, [])]


def move(source: Path, target: Path) -> None:
    """Move the files of an export into place, weights first, so that a complete model appears at once."""
    for part, place in reversed(list(zip(written_files(source), written_files(target), strict=True))):
        os.replace(part, place)
