"""int8: calibration, accuracy on labelled images, sensitivity of the layers, and mixed precision.

ONNX files get quantised weights and activations in QDQ form, from ONNX Runtime; OpenVINO files from NNCF; torch.export
files int8 weights, from torchao. All are measured against the fp32 file in the same runtime.
"""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.export import ExportedProgram

from tokamix.data import DatasetSplits, create_dataset
from tokamix.evaluate import evaluate
from tokamix.export.graph import Graph
from tokamix.export.write import WRITERS, add_metadata, quiet, save_openvino, to_onnx, to_openvino
from tokamix.inference import InferenceConfig
from tokamix.runtimes import require

CALIBRATION_IMAGES = 64
SENSITIVITY_IMAGES = 16
QUANTISED = ("Conv", "MatMul", "Gemm")
PRIMARY = {"classify": "top1", "segment": "miou", "detect": "box_ap"}  # the metric that may drop
Metadata = dict[str, Any]


class Int8Result:
    """Accuracy of an int8 file beside the fp32 file, and the layers that stayed in fp32."""

    def __init__(self, metric: str, fp32: float, int8: float, images: int, kept: Sequence[str]) -> None:
        self.metric, self.fp32, self.int8, self.images, self.kept = metric, fp32, int8, images, list(kept)

    @property
    def drop(self) -> float:
        """Points that int8 loses; negative if it gains."""
        return self.fp32 - self.int8

    def __str__(self) -> str:
        kept = f", {len(self.kept)} layers in fp32 ({', '.join(self.kept[:3])}{' ...' * (len(self.kept) > 3)})"
        return (
            f"{self.metric} on {self.images:,} labelled images: fp32 {self.fp32:.2f} %, int8 {self.int8:.2f} %"
            f" (drop {self.drop:.2f} points){kept if self.kept else ''}"
        )


def load_splits(data: Any, config: InferenceConfig, batch: int | None) -> DatasetSplits:
    """The data set that int8 is calibrated on and measured with, after a check that it has enough images."""
    splits = data if isinstance(data, DatasetSplits) else create_dataset(str(data), config.task)
    for name, part in (("training", splits.train), ("validation", splits.val)):
        if not len(part):
            use = "to calibrate on" if name == "training" else "with labels to measure the accuracy"
            raise ValueError(f"{splits.name} has no {name} images {use}; int8 needs both")
    count = min(CALIBRATION_IMAGES, len(splits.train))
    if count < (batch or 1):
        raise ValueError(f"{splits.name} gives {count} images to calibrate on, fewer than the batch of {batch}")
    return splits


def write_int8(
    program: ExportedProgram,
    path: Path,
    metadata: Metadata,
    to: str,
    opset: int,
    graph: Graph,
    splits: DatasetSplits,
    keep_layers: int | None,
    max_drop: float,
    attention: bool,
    trace: Callable[[Graph], ExportedProgram],
) -> Int8Result:
    """Quantise a program, measure it, and keep sensitive layers in fp32 until it loses at most `max_drop` points."""
    config = InferenceConfig.from_dict(metadata["inference"])
    metric = PRIMARY[config.task]

    def measure(file: Path) -> tuple[float, int]:
        result = evaluate(file, splits, device="cpu")
        return result[metric], result.num_images

    plain = path.with_name(f"fp32{path.suffix}")
    WRITERS[to](program, plain, {**metadata, "precision": "fp32"}, opset)
    exact, images = measure(plain)
    kept: list[str] = []
    if to == "torch-export":
        WRITERS[to](trace(quantize_weights(graph)), path, metadata, opset)
        value = measure(path)[0]
    else:
        batches = calibration_batches(graph, config, splits, metadata["batch"] or 1, metadata["size"])
        quantizer: _Onnx | _OpenVino
        if to == "onnx":
            quantizer = _Onnx(program, metadata, opset, batches, attention)
        else:
            quantizer = _OpenVino(program, metadata, opset, batches)
        total = len(quantizer.layers)
        if keep_layers is not None and keep_layers >= total:
            raise ValueError(f"--keep-layers {keep_layers} leaves no layer for int8: the model has {total}; keep fewer")
        steps = [n for n in (0, 1, 2, 4, 8, 16, 32) if n < total] if keep_layers is None else [keep_layers]
        for count in steps:
            kept = quantizer.most_sensitive(count) if count else []
            quantizer.write(path, kept)
            value = measure(path)[0]
            if exact - value <= max_drop:
                break
    result = Int8Result(metric, exact, value, images, kept)
    if result.drop > max_drop:
        raise ValueError(
            f"not written: {result}, more than the {max_drop} points of --max-drop; keep more layers with --keep-layers"
        )
    return result


def calibration_batches(
    graph: Graph, config: InferenceConfig, splits: DatasetSplits, batch: int, size: Sequence[int] | None
) -> list[np.ndarray]:
    """Images spread over the training split, in the form that the graph takes.

    Images for a graph of fixed size are padded to it; those of several sizes are batched with others of their size.
    """
    from tokamix.predict.predictor import Predictor

    predictor = Predictor(graph.network, config)
    count = min(CALIBRATION_IMAGES, len(splits.train))
    groups: dict[Any, list[Tensor]] = {}
    for i in np.linspace(0, len(splits.train) - 1, count).astype(int).tolist():
        image = _pixels(splits.train, i, predictor)
        if size is not None:
            image = F.pad(image, (0, size[1] - image.shape[-1], 0, size[0] - image.shape[-2]))
        if graph.preprocessing:
            image = (image / graph.scale + graph.mean).round().clamp(0, 255).byte().permute(1, 2, 0)
        groups.setdefault(image.shape, []).append(image)
    parts = [part for images in groups.values() for part in torch.stack(images).split(batch) if len(part) == batch]
    if not parts:
        most = max(map(len, groups.values()))
        raise ValueError(f"{splits.name} has {most} images of one size to calibrate on, for a batch of {batch}")
    return [part.contiguous().numpy() for part in parts]


def _pixels(part: Any, i: int, predictor: Any) -> Tensor:
    from torchvision.transforms.functional import pil_to_tensor

    image = part.image(i) if predictor.config.task == "classify" else part.sample(i).image
    return predictor.preprocess(image if isinstance(image, Tensor) else pil_to_tensor(image))


def quantize_weights(graph: Graph) -> Graph:
    """A copy with int8 weights in its Linear layers; activations stay in fp32."""
    require("torchao", "int8 weights")
    with quiet():
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
        from torchao.utils import unwrap_tensor_subclass

        quantised = copy.deepcopy(graph)
        quantize_(quantised, Int8WeightOnlyConfig())
        return unwrap_tensor_subclass(quantised)


class _Onnx:
    """Static quantisation of an ONNX model; the ranges of activations are measured once."""

    def __init__(
        self,
        program: ExportedProgram,
        metadata: Metadata,
        opset: int,
        batches: list[np.ndarray],
        products: bool = False,
    ) -> None:
        """`products`: quantise products of two activations too, such as those of attention."""
        require("onnxruntime", "int8 for ONNX")
        from onnxruntime.quantization import calibrate

        self.proto, self.metadata, self.batches = to_onnx(program, metadata["outputs"], opset), metadata, batches
        # stacks of matrices, as AMixer's bank, stay in fp32: ONNX Runtime 1.31 takes no scales per channel for them
        axes = {tensor.name: len(tensor.dims) for tensor in self.proto.graph.initializer}
        self.layers = [
            node.name
            for node in self.proto.graph.node
            if node.op_type in QUANTISED
            and (node.op_type == "Conv" or axes.get(node.input[1], 2 if products else 0) == 2)
        ]
        self._ranking: list[str] | None = None
        self._options = {"MatMulConstBOnly": not products, "WeightSymmetric": True}
        import tempfile

        with tempfile.TemporaryDirectory() as folder, quiet():
            source = Path(folder) / "model.onnx"
            require("onnx", "int8 for ONNX").save(self.proto, str(source))
            calibrator = calibrate.create_calibrator(
                source, list(QUANTISED), augmented_model_path=str(Path(folder) / "augmented.onnx")
            )
            calibrator.collect_data(_Reader(batches))
            self._ranges = calibrator.compute_data()

    def quantize(self, kept: Sequence[str]) -> Any:
        """The model with all layers but `kept` in int8."""
        from onnxruntime.quantization import QuantType
        from onnxruntime.quantization.qdq_quantizer import QDQQuantizer

        proto = copy.deepcopy(self.proto)
        chosen = [name for name in self.layers if name not in set(kept)]
        with quiet():
            quantizer = QDQQuantizer(
                proto,
                True,  # a scale per output channel
                not _has_vnni(),  # without VNNI, sums of products of 8 bits overflow
                QuantType.QInt8,
                QuantType.QUInt8,
                self._ranges,
                chosen,
                [],
                list(QUANTISED),
                self._options,
            )
            quantizer.quantize_model()
        return quantizer.model.model

    def write(self, path: Path, kept: Sequence[str]) -> None:
        """Write the model with all layers but `kept` in int8."""
        proto = self.quantize(kept)
        add_metadata(proto, self.metadata)
        require("onnx", "int8 for ONNX").save(proto, str(path))

    def sensitivity(self) -> dict[str, float]:
        """Relative RMSE of the first output if one layer alone is in int8, for each layer."""
        batches = self.batches[: max(1, SENSITIVITY_IMAGES // len(self.batches[0]))]
        exact = self._outputs(self.proto, batches)
        errors = {}
        for name in self.layers:
            actual = self._outputs(self.quantize([other for other in self.layers if other != name]), batches)
            errors[name] = float(np.linalg.norm(actual - exact) / np.linalg.norm(exact))
        return errors

    def most_sensitive(self, count: int) -> list[str]:
        """The layers whose quantisation changes the output most."""
        if self._ranking is None:
            errors = self.sensitivity()
            self._ranking = sorted(errors, key=lambda name: -errors[name])
        return self._ranking[:count]

    def _outputs(self, proto: Any, batches: Sequence[np.ndarray]) -> np.ndarray:
        import onnxruntime

        session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
        return np.concatenate([session.run(None, {"images": batch})[0].ravel() for batch in batches])


class _Reader:
    """Calibration images for ONNX Runtime."""

    def __init__(self, batches: Sequence[np.ndarray]) -> None:
        self._batches = iter(batches)

    def get_next(self) -> dict[str, np.ndarray] | None:
        """The next batch, or None at the end."""
        batch = next(self._batches, None)
        return None if batch is None else {"images": batch}


class _OpenVino:
    """Quantisation by NNCF, in its mode for transformers: without it, logits of SimA are wrong (cosine 0.88)."""

    def __init__(self, program: ExportedProgram, metadata: Metadata, opset: int, batches: list[np.ndarray]) -> None:
        self.nncf = require("nncf", "int8 for OpenVINO")
        self.model, self.metadata, self.batches = to_openvino(program, metadata["outputs"], opset), metadata, batches
        kinds = ("Convolution", "GroupConvolution", "MatMul")
        self.layers = [op.get_friendly_name() for op in self.model.get_ops() if op.get_type_name() in kinds]
        self._ranking: list[str] | None = None
        self._smooth, self._whole = self._choose_smoothing()

    def _choose_smoothing(self) -> tuple[bool, Any]:
        """Whether SmoothQuant brings the output closer to fp32, and the better model; it breaks ATMNet (NNCF 3.4).

        Compared on mirrored images: on the images that it is fitted to, SmoothQuant of AMixer is closer, on others not.
        """
        width = 2 if self.metadata["input"] == "uint8" else 3
        mirrored = [np.ascontiguousarray(np.flip(batch, width)) for batch in self.batches]
        exact = self._outputs(self.model, mirrored)
        models = {smooth: self._quantize([], smooth) for smooth in (True, False)}
        return min(models.items(), key=lambda item: float(np.linalg.norm(self._outputs(item[1], mirrored) - exact)))

    def quantize(self, kept: Sequence[str]) -> Any:
        """The model with all layers but `kept` in int8."""
        return self._quantize(kept, self._smooth) if kept else self._whole.clone()

    def _quantize(self, kept: Sequence[str], smooth: bool) -> Any:
        nncf = self.nncf
        parameters = nncf.AdvancedQuantizationParameters()
        if not smooth:
            parameters.smooth_quant_alphas = nncf.AdvancedSmoothQuantParameters(matmul=-1, convolution=-1)
        if self.metadata["size"] is None:
            # NNCF 3.4 takes the tokens before a depthwise convolution for channels; a scale for each fixes their number
            whole = nncf.quantization.advanced_parameters.QuantizationParameters(per_channel=False)
            parameters.activations_quantization_params = whole
        with quiet():
            return nncf.quantize(
                self.model.clone(),
                nncf.Dataset(self.batches),
                model_type=nncf.ModelType.TRANSFORMER,
                subset_size=len(self.batches),
                ignored_scope=nncf.IgnoredScope(names=list(kept)) if kept else None,
                advanced_parameters=parameters,
            )

    def write(self, path: Path, kept: Sequence[str]) -> None:
        """Write the model with all layers but `kept` in int8."""
        save_openvino(self.quantize(kept), path, self.metadata)

    def most_sensitive(self, count: int) -> list[str]:
        """The layers whose outputs int8 changes most, in one pass: NNCF calibrates too slowly to try each alone."""
        if self._ranking is None:
            exact, actual = (self._activations(model) for model in (self.model, self.quantize([])))
            error = {
                name: float(np.linalg.norm(actual[name] - exact[name])) / (float(np.linalg.norm(exact[name])) + 1e-12)
                for name in self.layers
                if name in exact and name in actual
            }
            self._ranking = sorted(error, key=lambda name: -error[name])
        return self._ranking[:count]

    def _outputs(self, model: Any, batches: list[np.ndarray]) -> np.ndarray:
        batches = batches[: max(1, SENSITIVITY_IMAGES // len(batches[0]))]
        compiled = self._compile(model)
        return np.concatenate([compiled([batch])[0].ravel() for batch in batches])

    def _compile(self, model: Any) -> Any:
        openvino = require("openvino", "int8 for OpenVINO")
        return openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    def _activations(self, model: Any) -> dict[str, np.ndarray]:
        model, wanted = model.clone(), set(self.layers)
        found = [op for op in model.get_ops() if op.get_friendly_name() in wanted]
        model.add_outputs([op.output(0) for op in found])
        results = self._compile(model)([self.batches[0]])
        values = list(results.values())[-len(found) :]
        return {op.get_friendly_name(): np.array(value) for op, value in zip(found, values, strict=True)}


def _has_vnni() -> bool:
    try:
        return "vnni" in Path("/proc/cpuinfo").read_text()
    except OSError:  # not Linux: assume a recent processor
        return True
