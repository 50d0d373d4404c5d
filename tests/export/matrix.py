"""Every family x target that installs here, at fixed and dynamic size; `make test-export`, minutes."""

from pathlib import Path

import pytest
import torch
from torch import nn

import tokamix
from tests.export.test_int8 import check_accuracy
from tests.models.test_contract import create_shallow
from tokamix.export import export
from tokamix.export.write import SUFFIX
from tokamix.inference import InferenceConfig

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


@pytest.mark.parametrize("size", [64, "dynamic"])
@pytest.mark.parametrize("to", ["onnx", "openvino", "torch-export"])
@pytest.mark.parametrize("name", FAMILIES)
def test_classifier(name: str, to: str, size: int | str, tmp_path: Path) -> None:
    """The export itself checks the file at three sizes and batches."""
    model = create_shallow(name).eval()
    config = InferenceConfig.from_model(model).replace(image_size=64)
    report = export(model, tmp_path / f"m{SUFFIX[to]}", to=to, size=size, config=config)
    assert len(report.checks) == (3 if size == "dynamic" else 1)
    assert max(d.error for d in report.checks) < 1e-5


@pytest.mark.parametrize("name", FAMILIES)
def test_executorch(name: str, tmp_path: Path) -> None:
    model = create_shallow(name).eval()
    config = InferenceConfig.from_model(model).replace(image_size=64)
    assert export(model, tmp_path / "m.pte", to="executorch", size=64, config=config).checks[0].error < 1e-4


def test_aoti(tmp_path: Path) -> None:
    model = create_shallow("columnar_tiny_sima").eval()
    config = InferenceConfig.from_model(model).replace(image_size=64)
    assert export(model, tmp_path / "m.pt2", to="aoti", size=64, config=config).checks[0].error < 1e-4


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("to", ["onnx", "openvino", "torch-export"])
def test_half(to: str, precision: str, tmp_path: Path) -> None:
    if (to, precision) == ("onnx", "bf16"):
        pytest.skip("ONNX Runtime has no bfloat16 on a CPU, and the export refuses it")
    model = create_shallow("columnar_tiny_sima").eval()
    config = InferenceConfig.from_model(model).replace(image_size=64)
    report = export(model, tmp_path / f"m{SUFFIX[to]}", to=to, size=64, precision=precision, config=config)
    assert report.checks[0].error < 5e-2


@pytest.mark.parametrize("to", ["onnx", "openvino"])
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("method", ["semantic_fpn", "upernet", "retinanet", "mask_rcnn"])
def test_dense(method: str, body: str, to: str, tmp_path: Path) -> None:
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
    report = export(model, tmp_path / f"m{SUFFIX[to]}", to=to, size="dynamic", config=config)
    assert [d.size for d in report.checks] == [(256, 288), (224, 224), (200, 333)]


@pytest.mark.parametrize("to", ["openvino", "torch-export"])
def test_int8(to: str, classifier_run: Path, tmp_path: Path) -> None:
    check_accuracy(classifier_run, tmp_path, to)
