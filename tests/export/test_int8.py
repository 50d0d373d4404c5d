"""int8: accuracy beside fp32, sensitive layers stay in fp32, a file that loses too much is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import tokamix
from tests.command import call
from tests.train.tiny import tiny_data
from tests.train.tiny_dense import tiny_scenes
from tokamix.data import DatasetSplits
from tokamix.export import export, quantize
from tokamix.export.graph import create_graph
from tokamix.export.write import SUFFIX
from tokamix.inference import InferenceConfig, load_model
from tokamix.runtimes import ExportedModel, load_exported


def test_accuracy(classifier_run: Path, tmp_path: Path) -> None:
    check_accuracy(classifier_run, tmp_path, "onnx")


def check_accuracy(classifier_run: Path, tmp_path: Path, to: str) -> None:
    path = tmp_path / f"m{SUFFIX[to]}"
    report = export(classifier_run, path, to=to, precision="int8", data=tiny_data(), max_drop=5)
    measured = tokamix.evaluate(path, tiny_data(), device="cpu")
    assert report.metrics["int8"] == measured["top1"]
    assert measured.precision == "int8"
    with pytest.raises(ValueError, match=r"whose precision is int8; leave out the precision"):
        tokamix.evaluate(path, tiny_data(), precision="fp32", device="cpu")
    assert report.metrics["fp32"] == tokamix.evaluate(classifier_run, tiny_data(), device="cpu")["top1"]
    assert report.checks[0].error > 1e-4, "this file is not quantised"
    assert any("labelled images: fp32" in line for line in report.lines())


def test_dense_models_calibrate_on_images_of_all_sizes(segmenter_run: Path) -> None:
    """Images are padded to a fixed size; without one, each size is calibrated on, not the smallest alone."""
    data = tiny_scenes("segment", train=6, val=0, side=48)
    network, config = load_model(segmenter_run)

    class Cropped:
        def __len__(self) -> int:
            return len(data.train)

        def sample(self, i: int) -> Any:
            sample = data.train.sample(i)
            return replace(sample, image=sample.image[:, : 48 - 4 * (i % 3)])

    splits = replace(data, train=Cropped())
    for preprocessing in (False, True):
        graph = create_graph(network, config, preprocessing, features=False, precision="fp32")
        free = quantize.calibration_batches(graph, config, splits, 1, None)
        padded = quantize.calibration_batches(graph, config, splits, 2, (48, 64))
        axes = (1, 2) if preprocessing else (2, 3)
        assert sorted(batch.shape[axes[0]] for batch in free) == [40, 40, 44, 44, 48, 48]
        assert [tuple(batch.shape[axis] for axis in (0, *axes)) for batch in padded] == [(2, 48, 64)] * 3


def test_exported_detectors_are_evaluated(detector_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """int8 needs it: the AP of boxes and masks of the file. The graph stands for the file, which is slow to write."""
    data = tiny_scenes("detect", train=4, val=0, side=64)
    network, config = load_model(detector_run)
    graph = create_graph(network, config, preprocessing=False, features=False, precision="fp32")
    outputs = ["boxes", "labels", "scores", "masks"]
    metadata = {"inference": config.to_dict(), "input": "float32", "size": None, "batch": 1, "outputs": outputs}
    file = ExportedModel(graph, {**metadata, "features": False}, Path("m.onnx"))
    monkeypatch.setattr("tokamix.inference.load_exported", lambda path, device: file)
    expected, actual = (tokamix.evaluate(source, data, device="cpu") for source in (detector_run, "m.onnx"))
    assert actual["box_ap"] == pytest.approx(expected["box_ap"], abs=0.1)
    assert actual["mask_ap"] == pytest.approx(expected["mask_ap"], abs=0.1)
    assert expected["box_ap"] > 1


def test_sensitivity(classifier_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer whose weights are spoilt for int8 is found and kept in fp32."""
    import onnx

    real = quantize.to_onnx

    def spoil(*args):
        """One huge weight makes the scale of each output channel useless, and does not change the output."""
        proto = real(*args)
        node = [
            n
            for n in proto.graph.node
            if n.op_type == "Gemm" and n.input[1] in {w.name for w in proto.graph.initializer}
        ][1]
        weight = next(w for w in proto.graph.initializer if w.name == node.input[1])
        values = onnx.numpy_helper.to_array(weight).copy()
        values[0] = 1e4
        weight.CopyFrom(onnx.numpy_helper.from_array(values, weight.name))
        spoilt.append(node.name)
        return proto

    spoilt: list[str] = []
    monkeypatch.setattr(quantize, "to_onnx", spoil)
    seen: list[list[str]] = []
    write = quantize._Onnx.write
    monkeypatch.setattr(
        quantize._Onnx, "write", lambda self, path, kept: (seen.append(list(kept)), write(self, path, kept))[1]
    )
    export(classifier_run, tmp_path / "m.onnx", precision="int8", data=tiny_data(), keep_layers=1, max_drop=100)
    assert seen == [[spoilt[0]]]


class TokensThenMap(nn.Module):
    """Tokens (B, N, C) before a depthwise convolution, as in bodies with a position embedding."""

    num_classes = 4

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.fc = nn.Conv2d(3, 8, 2, 2), nn.LayerNorm(8), nn.Linear(8, 8)
        self.depthwise, self.head = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        tokens = x.flatten(2).mT
        tokens = tokens + self.fc(self.norm(tokens))
        x = x + self.depthwise(tokens.mT.reshape(x.shape))
        return self.head(x.mean((2, 3)))


def test_openvino_takes_other_sizes_than_it_was_calibrated_with(tmp_path: Path) -> None:
    """NNCF fixes the number of tokens where it takes them for channels."""
    model = TokensThenMap().eval()
    config = InferenceConfig(task="classify", class_names=tiny_data().classes, image_size=8)
    path = tmp_path / "m.xml"
    export(model, path, to="openvino", precision="int8", data=tiny_data(), size="dynamic", config=config, max_drop=100)
    images = torch.randn(2, 3, 20, 34)
    error = (load_exported(path)(images) - model(images)).norm() / model(images).norm()
    assert 1e-5 < error.item() < 0.2


def test_some_layer_is_in_int8(tmp_path: Path, classifier_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """ONNX Runtime quantises all layers if it is told to quantise none."""
    common = {"precision": "int8", "data": tiny_data()}
    with pytest.raises(ValueError, match=r"--keep-layers 99 leaves no layer for int8: the model has \d+; keep fewer"):
        export(classifier_run, tmp_path / "m.onnx", keep_layers=99, **common)
    tried: list[int] = []
    write = quantize._Onnx.write
    monkeypatch.setattr(
        quantize._Onnx, "write", lambda self, path, kept: (tried.append(len(kept)), write(self, path, kept))[1]
    )

    class Result(dict):
        num_images = 37

    monkeypatch.setattr(quantize, "evaluate", lambda file, *_, **__: Result(top1=90.0 if file.stem == "fp32" else 89.0))
    with pytest.raises(ValueError, match="more than the 0"):
        export(classifier_run, tmp_path / "m.onnx", **common)
    assert tried == [0, 1, 2, 4, 8]
    assert not list(tmp_path.iterdir())


def test_a_file_that_loses_too_much(classifier_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Result(dict):
        num_images = 37

    monkeypatch.setattr(quantize, "evaluate", lambda file, *_, **__: Result(top1=90.0 if file.stem == "fp32" else 89.0))
    with pytest.raises(ValueError, match=r"not written: top1 on 37 labelled images: fp32 .* more than the 0\.5 points"):
        export(classifier_run, tmp_path / "m.onnx", precision="int8", data=tiny_data(), keep_layers=0)
    assert not (tmp_path / "m.onnx").exists()


def test_bad_input(classifier_run: Path, tmp_path: Path) -> None:
    data = tiny_data()
    empty = DatasetSplits("no labels", data.train, tiny_data(val=0).val, data.classes)
    with pytest.raises(ValueError, match=r"no labels has no validation images with labels to measure the accuracy"):
        export(classifier_run, tmp_path / "m.onnx", precision="int8", data=empty)
    empty = DatasetSplits("no images", tiny_data(train=0).train, data.val, data.classes)
    with pytest.raises(ValueError, match=r"no images has no training images to calibrate on; int8 needs both"):
        export(classifier_run, tmp_path / "m.onnx", precision="int8", data=empty)
    few = DatasetSplits("few", tiny_data(train=5).train, data.val, data.classes)
    with pytest.raises(ValueError, match=r"few gives 5 images to calibrate on, fewer than the batch of 8"):
        export(classifier_run, tmp_path / "m.onnx", precision="int8", data=few, batch=8)
    text = call("export", classifier_run, "-o", tmp_path / "m.onnx", "--precision", "int8", "--data", tmp_path, code=1)
    assert str(tmp_path) in text
    assert not np.any([path.suffix == ".onnx" for path in tmp_path.iterdir()])
