"""Every family and task in every runtime that installs here; `make test-export`, minutes.

Each export checks its file: at fixed size once, at dynamic size for four sizes and three batches. A model is traced
once for all targets of a test.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import tokamix
from tests.export.test_int8 import check_accuracy
from tests.models.test_contract import create_shallow
from tests.train.tiny_dense import tiny_scenes
from tokamix.export import ExportReport, export, run
from tokamix.export.graph import create_graph
from tokamix.export.light import OnnxPredictor
from tokamix.export.write import SUFFIX
from tokamix.inference import InferenceConfig
from tokamix.predict import load_predictor

FAMILIES = (
    "stvit_small",
    "atmnet_tiny",
    "amixer_tiny",
    "xcit_tiny_12_p16_sima",
    "columnar_tiny_sima",
    "pyramid_tiny_softmax",
)
PYRAMID = {"dims": (16, 32, 48, 64), "depths": (1, 1, 1, 1)}
BODIES = {"stvit_small": {**PYRAMID, "num_heads": (1, 1, 1, 1)}, "atmnet_xtiny": PYRAMID}
Write = Callable[..., ExportReport]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """`export` of a model to a target; programs are traced once in a test, and once more for OpenVINO."""
    programs: dict[Any, Any] = {}
    trace = run.trace

    def trace_once(graph: Any, size: Any, batch: Any, config: Any, name: str, to: str) -> Any:
        key = (graph.dtype, size, batch, to == "openvino")
        programs[key] = programs.get(key) or trace(graph, size, batch, config, name, to)
        return programs[key]

    monkeypatch.setattr(run, "trace", trace_once)
    return lambda model, to, **options: export(model, tmp_path / f"m{SUFFIX[to]}", to=to, **options)


def create_classifier(name: str) -> tuple[nn.Module, InferenceConfig]:
    torch.manual_seed(0)
    model = create_shallow(name).eval()
    return model, InferenceConfig.from_model(model).replace(image_size=64)


@pytest.mark.parametrize("name", FAMILIES)
def test_fixed_size(name: str, write: Write) -> None:
    model, config = create_classifier(name)
    for to in ("onnx", "openvino", "torch-export", "executorch"):
        assert write(model, to, size=64, config=config).checks[0].error < 1e-5, to
    for precision, limit in (("fp16", 1e-2), ("bf16", 5e-2)):  # of OpenVINO, made from the fp32 graph
        assert write(model, "openvino", size=64, config=config, precision=precision).checks[0].error < limit


@pytest.mark.parametrize("name", FAMILIES)
def test_dynamic_size(name: str, write: Write) -> None:
    model, config = create_classifier(name)
    for to in ("onnx", "openvino", "torch-export"):
        checks = write(model, to, size="dynamic", config=config).checks
        assert len(checks) == 4
        assert max(d.error for d in checks) < 1e-5, to


@pytest.mark.parametrize("name", FAMILIES)
def test_half(name: str, write: Write) -> None:
    model, config = create_classifier(name)
    for to, precision, limit in (
        ("onnx", "fp16", 1e-2),
        ("torch-export", "fp16", 1e-2),
        ("torch-export", "bf16", 5e-2),
    ):
        error = write(model, to, size=64, config=config, precision=precision).checks[0].error
        assert 1e-5 < error < limit, (to, precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", FAMILIES)
def test_aoti(name: str, precision: str, write: Write) -> None:
    model, config = create_classifier(name)
    error = write(model, "aoti", size=64, config=config, precision=precision).checks[0].error
    assert error < {"fp32": 1e-5, "bf16": 5e-2}[precision]


@pytest.mark.parametrize("name", FAMILIES)
def test_device(name: str) -> None:
    """A graph for a GPU has no constants on the CPU; here the device is "meta", which needs no GPU."""
    model, config = create_classifier(name)
    graph = create_graph(model, config, False, False, "bf16").to("meta")
    program = run.trace(graph, (64, 96), 1, config, name, "aoti")
    values = [node.meta["val"] for node in program.graph.nodes if "val" in node.meta]
    assert {value.device.type for value in values if isinstance(value, torch.Tensor)} == {"meta"}


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("method", ["semantic_fpn", "upernet", "retinanet", "mask_rcnn"])
def test_dense(method: str, body: str, write: Write) -> None:
    """Dynamic sizes, the odd 200x333 among them."""
    torch.manual_seed(0)
    segment = method in ("semantic_fpn", "upernet")
    create = tokamix.create_segmenter if segment else tokamix.create_detector
    model = create(method, body, 5, width=32, **BODIES[body]).eval()
    for layer in model.modules():
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    config = InferenceConfig(task="segment" if segment else "detect", class_names=tuple("abcde"))
    for to in ("onnx", "openvino"):
        checks = write(model, to, size="dynamic", config=config).checks
        assert [d.size for d in checks][:3] == [(256, 288), (224, 224), (200, 333)], to
        assert max(checks[3].size) <= 32, "the smallest size that it takes"


@pytest.mark.parametrize("to", ["openvino", "torch-export"])
def test_int8(to: str, classifier_run: Path, tmp_path: Path) -> None:
    check_accuracy(classifier_run, tmp_path, to)


def test_detector_without_torch(detector_run: Path, tmp_path: Path) -> None:
    """The script that is copied beside a file finds the boxes and masks that `predict` finds."""
    data = tiny_scenes("detect", train=4, val=0, side=64)
    path = export(detector_run, tmp_path / "m.onnx").path
    expected, actual = load_predictor(path, "cpu", score_threshold=0.1), OnnxPredictor(path)
    actual.config["score_threshold"] = 0.1
    found = 0
    for i in range(4):
        picture = Image.fromarray(data.train.sample(i).image.permute(1, 2, 0).numpy())
        e, a = expected(picture), actual(picture)
        found += len(e.names)
        assert tuple(a.names) == tuple(e.names)
        np.testing.assert_allclose(a.boxes, e.boxes, atol=0.1)
        np.testing.assert_allclose(a.scores, e.scores, atol=1e-3)
        assert np.mean(a.masks == np.asarray(e.masks)) > 0.99
    assert found
