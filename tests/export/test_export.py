"""`tokamix export`: files equal PyTorch in their runtimes, bad files are not written, bad input gets one sentence."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
import pytest
import torch
from PIL import Image
from torch import nn

import tokamix
from tests.command import call
from tests.train.tiny import tiny_data
from tokamix.cost import exp_nodes
from tokamix.export import ExportReport, check, export, light, write
from tokamix.export.light import OnnxPredictor
from tokamix.export.triton import check_triton_path, write_triton_config
from tokamix.inference import InferenceConfig, load_model
from tokamix.ops import dispatch
from tokamix.predict import load_predictor
from tokamix.predict.predictor import preprocess, read_image
from tokamix.runtimes import first_reason, load_exported

pytestmark = pytest.mark.xdist_group("export")


class Small(nn.Module):
    """A classifier that is exported in a second."""

    num_classes = 3

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


CONFIG = InferenceConfig(task="classify", class_names=("a", "b", "c"), image_size=24)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photo.png"
    pixels = np.random.default_rng(0).integers(0, 256, (9, 12, 3), np.uint8)
    Image.fromarray(pixels).resize((120, 90), Image.Resampling.BICUBIC).save(path)
    return path


def test_onnx_file(onnx_report: ExportReport, classifier_run: Path) -> None:
    """The file predicts what the run predicts, has its metadata, and is evaluated as the run is."""
    assert [d.batch for d in onnx_report.checks] == [1, 2, 3]
    assert max(d.error for d in onnx_report.checks) < 1e-5
    images = list(tiny_data().val.images[:5])
    expected, actual = (load_predictor(source, "cpu")(images) for source in (classifier_run, onnx_report.path))
    for a, e in zip(actual, expected, strict=True):
        assert a.names == e.names
        torch.testing.assert_close(a.scores, e.scores)
    _, config = load_model(onnx_report.path)
    assert config == InferenceConfig.load(classifier_run)
    result = tokamix.evaluate(onnx_report.path, tiny_data(), device="cpu")
    assert result["top1"] == tokamix.evaluate(classifier_run, tiny_data(), device="cpu")["top1"]


def test_predict_command(onnx_report: ExportReport, classifier_run: Path, photo: Path) -> None:
    """A model may be named with --run; the same command takes files of every runtime."""
    expected = call("predict", classifier_run, photo, "--device", "cpu")
    assert call("predict", onnx_report.path, photo) == expected
    assert call("predict", "--run", onnx_report.path, photo) == expected
    torch.manual_seed(0)
    model, small = Small().eval(), []
    for to in ("onnx", "openvino", "torch-export"):
        path = export(model, photo.with_name(f"m{write.SUFFIX[to]}"), to=to, config=CONFIG).path
        small.append(call("predict", "--run", path, photo))
    assert "photo.png" in small[0]
    assert small == [small[0]] * 3
    assert "neither" in call("predict", "--run", photo.parent, photo, code=1)


def test_light_runtime(onnx_report: ExportReport, classifier_run: Path, photo: Path) -> None:
    """The file that users copy needs neither torch nor tokamix, and agrees with `predict`."""
    source = Path(light.__file__).read_text()
    imported = {line.split()[1].split(".")[0] for line in source.splitlines() if line.startswith(("import", "from"))}
    assert imported == {"json", "math", "sys", "dataclasses", "pathlib", "typing", "numpy", "onnxruntime", "PIL"}
    expected = load_predictor(classifier_run, "cpu")(photo)
    actual = OnnxPredictor(onnx_report.path)(photo)
    assert tuple(actual.names) == expected.names
    np.testing.assert_allclose(actual.scores, expected.scores, rtol=1e-4)


def test_light_runtime_runs_without_torch(onnx_report: ExportReport, photo: Path, tmp_path: Path) -> None:
    """The copied script in a process of its own, where neither torch nor tokamix can be imported."""
    script = tmp_path / "run_onnx.py"
    script.write_text(Path(light.__file__).read_text())
    blocked = "import sys, runpy; sys.modules.update(torch=None, torchvision=None, timm=None, tokamix=None)\n"
    code = f"{blocked}sys.argv = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
    command = [sys.executable, "-c", code, str(script), str(onnx_report.path), str(photo)]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == f"{photo}: {OnnxPredictor(onnx_report.path)(photo)}\n"


def test_light_runtime_reads_images_as_predict_does(
    onnx_report: ExportReport, photo: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """16 bits, transparency, palettes and CMYK; of those that cannot be read, a line each and no traceback."""
    image = Image.open(photo)
    grey = image.convert("L")
    clear = image.copy()
    clear.putalpha(grey.point(lambda value: 255 * (value > 128)))
    forms = {"a.png": clear, "p.png": image.convert("P"), "c.jpg": image.convert("CMYK"), "la.png": clear.convert("LA")}
    forms["i.png"] = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    reference, light_predictor = load_predictor(onnx_report.path, "cpu"), OnnxPredictor(onnx_report.path)
    for name, form in forms.items():
        form.save(tmp_path / name)
        expected, actual = reference(tmp_path / name), light_predictor(tmp_path / name)
        np.testing.assert_allclose(actual.scores, expected.scores, rtol=1e-4, err_msg=name)
    (tmp_path / "empty.jpg").write_text("")
    (tmp_path / "bad.onnx").write_text("no graph")
    assert light.main([str(onnx_report.path), str(tmp_path / "empty.jpg"), str(tmp_path), str(photo)]) == 1
    out, err = capsys.readouterr()
    assert out.startswith(f"{photo}: class")
    assert err.count("error: ") == 2
    for name, message in (("bad.onnx", "cannot be opened"), ("none.onnx", "there is no file")):
        assert light.main([str(tmp_path / name), str(photo)]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": True}, "holds a feature extractor"),
        ({"size": [8, 12]}, "takes images of 8x12, but classifiers are given a square crop"),
        ({"inference": {"test_flip": True}}, "a sliding window, several scales or flips, which need `tokamix predict`"),
        ({"inference": {"mean": [0.5] * 4}}, "takes images of 4 channels; this script reads 1 or 3"),
    ],
)
def test_light_runtime_refuses_what_it_cannot_predict(
    changes: dict[str, Any], message: str, onnx_report: ExportReport, tmp_path: Path
) -> None:
    proto = onnx.load(str(onnx_report.path))
    metadata = json.loads(proto.metadata_props[0].value)
    metadata |= {**changes, "inference": metadata["inference"] | changes.get("inference", {})}
    write.add_metadata(proto, metadata)
    onnx.save(proto, str(tmp_path / "m.onnx"))
    with pytest.raises(ValueError, match=message):
        OnnxPredictor(tmp_path / "m.onnx")


def test_light_runtime_says_that_nothing_was_found(
    onnx_report: ExportReport, photo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    predictor = OnnxPredictor(onnx_report.path)
    predictor.config = {**predictor.config, "task": "detect", "score_threshold": 0.3}
    empty = {"boxes": np.zeros((1, 4)), "labels": np.zeros(1, np.int64), "scores": np.zeros(1)}
    outputs = {name: value[None] for name, value in {**empty, "masks": np.zeros((1, 28, 28))}.items()}
    monkeypatch.setattr(predictor, "_run", lambda pixels: outputs)
    found = predictor(photo)
    assert (str(found), found.boxes.shape, found.masks.shape) == ("nothing", (0, 4), (0, 90, 120))


def test_light_runtime_takes_grey_images(photo: Path, tmp_path: Path) -> None:
    model = Small().eval()
    model.conv = nn.Conv2d(1, 4, 3)
    config = CONFIG.replace(mean=(0.4,), std=(0.2,))
    for preprocessing in (False, True):
        path = export(model, tmp_path / "m.onnx", config=config, preprocessing=preprocessing).path
        expected = load_predictor(path, "cpu")(photo)
        np.testing.assert_allclose(OnnxPredictor(path)(photo).scores, expected.scores, rtol=1e-3)


def test_light_runtime_squashes_images(photo: Path, tmp_path: Path) -> None:
    for crop_pct in (1.0, 0.8):
        config = CONFIG.replace(crop_mode="squash", crop_pct=crop_pct)
        path = export(Small().eval(), tmp_path / "m.onnx", config=config).path
        light_predictor = OnnxPredictor(path)
        pixels = light_predictor._crop(Image.open(photo))
        expected = preprocess(
            read_image(photo, config), config.replace(mean=(0,) * 3, std=(1,) * 3), torch.device("cpu")
        )
        np.testing.assert_allclose(pixels.transpose(2, 0, 1) / 255, expected, atol=1e-6)


def test_preprocessing_inside(tmp_path: Path) -> None:
    """uint8 images in, classes out; `predict` takes the file like any other."""
    model = Small().eval()
    report = export(model, tmp_path / "m.onnx", config=CONFIG, preprocessing=True, size=24)
    file = load_exported(report.path)
    pixels = torch.randint(256, (1, 24, 24, 3), dtype=torch.uint8)
    scores, classes = file.run(pixels)
    mean, std = (torch.tensor(v)[:, None, None] for v in (CONFIG.mean, CONFIG.std))
    normalised = (pixels.permute(0, 3, 1, 2) / 255 - mean) / std
    expected = model(normalised).softmax(1)
    np.testing.assert_allclose(scores, expected.detach(), rtol=1e-4)
    assert classes == expected.argmax(1)
    torch.testing.assert_close(file(normalised).softmax(1), expected.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("to", ["openvino", "torch-export"])
def test_other_targets(to: str, tmp_path: Path) -> None:
    model = Small().eval()
    nn.init.normal_(model.norm.running_mean)
    report = export(model, tmp_path / f"m{write.SUFFIX[to]}", to=to, config=CONFIG, size="dynamic")
    assert len(report.checks) == 4
    file, images = load_exported(report.path), torch.randn(5, 3, 31, 45)
    torch.testing.assert_close(file(images), model(images).detach(), rtol=1e-4, atol=1e-5)


def test_openvino_weights_are_constants() -> None:
    """NNCF quantises weights of depthwise convolutions that are still Reshapes along a wrong axis."""
    program = torch.export.export(nn.Conv2d(4, 4, 3, groups=4).eval(), (torch.zeros(1, 4, 8, 8),))
    model = write.to_openvino(program, ["y"], 20)
    (conv,) = (op for op in model.get_ops() if op.get_type_name() == "GroupConvolution")
    assert conv.input_value(1).get_node().get_type_name() == "Constant"


@pytest.mark.parametrize(
    ("to", "precision", "low", "high"),
    [
        ("onnx", "fp16", 1e-5, 1e-2),
        ("openvino", "bf16", 1e-5, 5e-2),
        ("torch-export", "fp16", 1e-5, 1e-2),
        ("torch-export", "bf16", 1e-4, 5e-2),
    ],
)
def test_half_precision(to: str, precision: str, low: float, high: float, tmp_path: Path) -> None:
    """Files are as exact as their precision, and no more; they keep the preprocessing and class names."""
    torch.manual_seed(0)
    report = export(
        Small().eval(), tmp_path / f"m{write.SUFFIX[to]}", to=to, precision=precision, config=CONFIG, size=24
    )
    assert low <= report.checks[0].error < high
    assert load_model(report.path)[1] == CONFIG


def test_features(tmp_path: Path) -> None:
    model = tokamix.create_body("columnar_tiny", "sima", num_classes=3, depth=2, dim=8, num_heads=1).eval()
    report = export(model, tmp_path / "m.onnx", features=True, size=32, config=CONFIG)
    images = torch.randn(1, 3, 32, 32)
    expected = model.forward_intermediates(images, output_fmt="NCHW", intermediates_only=True)
    actual = load_exported(report.path)(images)
    assert len(actual) == len(expected) == 2
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e.detach(), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="holds a feature extractor"):
        load_model(report.path)


class OnlyAt24(Small):
    """Computes something else at other sizes, which a graph traced at one size cannot know."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (2 if x.shape[0] * x.shape[-1] > 300 else 1)


def test_a_file_that_differs_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scale(program, path, metadata, opset):
        proto = write.to_onnx(program, metadata["outputs"], opset)
        weight = next(w for w in proto.graph.initializer if onnx.numpy_helper.to_array(w).ndim == 4)
        weight.CopyFrom(onnx.numpy_helper.from_array(1.5 * onnx.numpy_helper.to_array(weight), weight.name))
        write.add_metadata(proto, metadata)
        onnx.save(proto, str(path))

    monkeypatch.setitem(write.WRITERS, "onnx", scale)
    (tmp_path / "m.onnx").write_text("the previous file")
    with pytest.raises(ValueError, match="not written: the exported file differs from PyTorch for 1 image of 24x24"):
        export(Small().eval(), tmp_path / "m.onnx", config=CONFIG, size=24)
    assert [path.name for path in tmp_path.iterdir()] == ["m.onnx"]
    assert (tmp_path / "m.onnx").read_text() == "the previous file"


def test_a_file_that_claims_too_much_is_not_written(tmp_path: Path, onnx_report: ExportReport) -> None:
    """Its metadata promise any size, and the graph takes one."""
    proto = onnx.load(str(onnx_report.path))
    metadata = json.loads(proto.metadata_props[0].value)
    exact = check.Graph(Small().eval(), CONFIG, preprocessing=False, features=False, dtype=torch.float32)
    write.add_metadata(proto, {**metadata, "size": None})
    onnx.save(proto, str(tmp_path / "m.onnx"))
    with pytest.raises(ValueError, match=r"claims to take 2 images of 45x31, but fails: \[ONNXRuntimeError\]"):
        check.check_file(tmp_path / "m.onnx", exact, [((45, 31), 2)], "fp32")


def test_reasons_of_runtimes_are_said() -> None:
    """OpenVINO's errors begin with places in its source."""
    error = RuntimeError("Exception from src/a.cpp:1:\nException from src/b.cpp:2:\n[CPU] shapes do not match\n\n")
    assert first_reason(error) == "[CPU] shapes do not match"
    assert first_reason(RuntimeError("Exception from src/a.cpp:1:\n")) == "RuntimeError"
    assert first_reason(AssertionError()) == "AssertionError"


def test_bad_input(classifier_run: Path, onnx_report: ExportReport, tmp_path: Path) -> None:
    """One sentence each, and nothing is written."""

    def error(*args: object) -> str:
        return call("export", classifier_run, *args, code=1)

    target = ("-o", tmp_path / "m.onnx")
    assert "--size is '22x', but must be a side such as 224" in error("--size", "22x", *target)
    assert "opset 11 is not supported; choose 18 to 23" in error("--opset", "11", *target)
    assert "int8 needs images to calibrate on" in error("--precision", "int8", *target)
    assert "onnx files cannot be bf16; choose one of fp32, fp16, int8" in error("--precision", "bf16", *target)
    assert "a file for onnx ends with .onnx, got m.pt2" in error("-o", tmp_path / "m.pt2")
    assert "--device cuda is for --to aoti" in error("--device", "cuda", *target)
    if not torch.cuda.is_available():
        assert "--device cuda needs a GPU" in error("--device", "cuda", "--to", "aoti", "-o", tmp_path / "m.pt2")
    assert "--runner is for ONNX files" in error("--runner", "--to", "openvino", *target)
    (tmp_path / "file").write_text("")
    assert "cannot write" in error("-o", tmp_path / "file" / "m.onnx")
    assert "has no pretrained weights" in call("export", "stvit_small", *target, code=1)
    with pytest.raises(ValueError, match=r"was exported for images of \d+x\d+, got 48x48; export it with --size 48x48"):
        load_exported(onnx_report.path)(torch.zeros(1, 3, 48, 48))
    text = call("predict", onnx_report.path, tmp_path / "file", "--model", "stvit_small", code=1)
    assert "model.onnx holds columnar_tiny_softmax, not stvit_small; leave out --model" in text
    text = call("export", "pyramid_nano_sima.imagenette", "--model", "stvit_small", *target, code=1)
    assert "pyramid_nano_sima.imagenette holds pyramid_nano_sima, not stvit_small; leave out --model" in text
    assert "there is no exported model" in call("predict", tmp_path / "none.onnx", tmp_path / "file", code=1)
    assert "name the model first: tokamix predict m.onnx IMAGES" in call("predict", "photo.jpg", "m.onnx", code=1)
    (tmp_path / "bad.onnx").write_text("no graph")
    with pytest.raises(ValueError, match=r"bad\.onnx cannot be opened"):
        load_exported(tmp_path / "bad.onnx")
    with pytest.raises(ValueError, match="this onnxruntime runs on the CPU only; pip install onnxruntime-gpu"):
        load_exported(onnx_report.path, "cuda")
    with pytest.raises(ValueError, match="onnxruntime runs on the CPU only"):
        load_model(onnx_report.path, device="cuda")
    (tmp_path / "bad.xml").touch()
    with pytest.raises(ValueError, match=r"bad\.xml runs on the CPU only; leave out the device"):
        load_model(tmp_path / "bad.xml", device="cuda:0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.onnx", "bad.xml", "file"]


def test_few_tokens_in_openvino(tmp_path: Path) -> None:
    """OpenVINO 2026.4 crashed on the residual connections of 4 tokens; in a process of its own, which may end."""
    pytest.importorskip("openvino")
    torch.manual_seed(0)
    shape: dict[str, Any] = {"dim": 16, "depth": 1, "num_heads": 2, "mlp_ratio": 2}
    model = tokamix.create_model("columnar_tiny_softmax", patch_size=4, num_classes=3, **shape).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.1)
    torch.save(model, tmp_path / "model.pt")
    script = "import sys, torch, tokamix; model = torch.load(sys.argv[1], weights_only=False);"
    script += " print(tokamix.export(model, sys.argv[2], to='openvino', size=8).checks)"
    command = [sys.executable, "-c", script, str(tmp_path / "model.pt"), str(tmp_path / "m.xml")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert "size=(8, 8)" in result.stdout


def test_unwritable_target_is_refused_before_tracing(
    classifier_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in place of the file or of its weights, a file in place of a folder, a folder that takes no files."""
    from tokamix.export import run

    def trace(*_: object, **__: object) -> None:
        raise AssertionError("nothing may be traced for a file that cannot be written")

    monkeypatch.setattr(run, "create_graph", trace)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    (tmp_path / "weights.bin").mkdir()
    (tmp_path / f"{classifier_run.name}.onnx").mkdir()
    (tmp_path / "locked").mkdir(mode=0o555)
    before = sorted(tmp_path.rglob("*"))

    def error(*args: object) -> str:
        return call("export", classifier_run, *args, code=1)

    assert f"{classifier_run.name}.onnx is a folder; name a file" in error("-o", f"{classifier_run.name}.onnx")
    assert f"cannot write {classifier_run.name}.onnx: it is a folder; name another file" in error()
    assert "cannot write weights.bin: it is a folder" in error("--to", "openvino", "-o", "weights.xml")
    assert "cannot write file/new/m.onnx: file is a file, not a folder" in error("-o", "file/new/m.onnx")
    if Path("/proc/self").exists():  # takes no files of anyone's
        assert "cannot write into /proc:" in error("-o", "/proc/new/m.onnx")
    if os.access("locked", os.W_OK) is False:  # root may write there
        assert "cannot write into locked: Permission denied" in error("-o", "locked/m.onnx")
    assert sorted(tmp_path.rglob("*")) == before
    with pytest.raises(AssertionError, match="nothing may be traced"):  # a missing folder is created at the end
        export(classifier_run, tmp_path / "new" / "folder" / "m.onnx")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"keep_layers": 1}, "--keep-layers is for --precision int8, got fp32"),
        ({"max_drop": 1.0}, "--max-drop is for --precision int8, got fp32"),
        ({"attention": True}, "--int8-attention is for --precision int8, got fp32"),
        ({"precision": "int8", "data": "x", "features": True}, "feature maps do not have; leave out --features"),
        ({"precision": "int8", "data": "x", "max_drop": -1.0}, "max_drop and keep_layers must be 0 or more"),
        ({"precision": "int8", "data": "x", "max_drop": float("nan")}, "max_drop and keep_layers must be 0 or more"),
        (
            {"precision": "int8", "data": "x", "to": "openvino", "attention": True},
            "--int8-attention is for ONNX files, got --to openvino",
        ),
        (
            {"precision": "int8", "data": "x", "to": "torch-export", "keep_layers": 2},
            "--keep-layers is for ONNX and OpenVINO files",
        ),
        ({"to": "torch-export", "opset": 18}, "--opset is for ONNX and OpenVINO files, got --to torch-export"),
        ({"to": "aoti", "device": "tpu"}, "device is 'tpu', but must be cpu or cuda"),
        ({"model": "stvit_small"}, "model='stvit_small' is for a checkpoint file"),
        ({"config": CONFIG.replace(class_names=("a", "b"))}, "the model has 3 classes, but the config names 2"),
    ],
)
def test_options_without_effect_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    suffix = write.SUFFIX[options.get("to", "onnx")]
    with pytest.raises(ValueError, match=message):
        export(Small().eval(), tmp_path / f"m{suffix}", **{"config": CONFIG, "size": 24, **options})
    assert not list(tmp_path.iterdir())


@pytest.mark.filterwarnings("ignore:.torch.jit:FutureWarning")
def test_sources_that_cannot_be_exported(onnx_report: ExportReport, classifier_run: Path, tmp_path: Path) -> None:
    target = tmp_path / "m.onnx"
    assert "is an exported file; export the run" in call("export", onnx_report.path, "-o", target, code=1)
    with pytest.raises(ValueError, match="config is for a model given as a module"):
        export(classifier_run, target, config=CONFIG)
    with pytest.raises(ValueError, match="the model is a TorchScript module; export the module that it was made from"):
        export(torch.jit.trace(Small().eval(), torch.zeros(1, 3, 24, 24)), target, config=CONFIG)
    text = call("export", classifier_run, "-o", target, "--triton", code=1)
    assert "Triton needs a file REPOSITORY/NAME/1/model.onnx" in text
    text = call("export", "stvit_small", "--untrained", "--model", "atmnet_tiny", "-o", target, code=1)
    assert "--model is for a checkpoint file" in text
    assert not list(tmp_path.iterdir()), "checked before the export, which may take minutes"


def test_a_segmenter_as_a_module_is_exported_as_one(tmp_path: Path) -> None:
    """Its task and number of classes are known without a config."""
    torch.manual_seed(0)
    shape = {"dims": (8, 8, 8, 8), "depths": (1, 1, 1, 1), "num_heads": (1, 1, 1, 1)}
    model = tokamix.create_segmenter("semantic_fpn", "pyramid_tiny_softmax", 3, width=8, neck_width=8, **shape).eval()
    report = export(model, tmp_path / "m.onnx", size=32)
    _, config = load_model(report.path)
    assert (config.task, config.class_names) == ("segment", ("0", "1", "2"))
    assert load_predictor(report.path, "cpu")(np.zeros((20, 32, 3), np.uint8)).segmentation.shape == (20, 32)
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (20, 27, 3), np.uint8))
    expected, actual = load_predictor(report.path, "cpu")(picture), OnnxPredictor(report.path)(picture)
    assert actual.segmentation.shape == (20, 27)
    assert (actual.segmentation == np.asarray(expected.segmentation)).mean() > 0.99, "the script predicts the same"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writers of PyTorch and AOTInductor end the process there."""

    def compile_to(program: object, *, package_path: Any, inductor_configs: dict[str, Any]) -> None:
        package_path.write(b"package")

    monkeypatch.setattr("torch._inductor.aoti_compile_and_package", compile_to)
    program = torch.export.export(Small().eval(), (torch.zeros(1, 3, 24, 24),))
    for save in (write.write_torch_export, write.write_aoti):
        with pytest.raises(OSError, match="No space left"):
            save(program, Path("/dev/full"), {}, 20)

    def save_model(*_: object, **__: object) -> None:
        raise RuntimeError("basic_ios::clear: iostream error")

    monkeypatch.setattr("openvino.save_model", save_model)
    with pytest.raises(OSError, match=r"cannot write .*m\.xml: OpenVINO fails to write its files .*is the disk full"):
        export(Small().eval(), tmp_path / "m.xml", to="openvino", config=CONFIG, size=24)


@pytest.mark.parametrize("text", ["not JSON", "[1]", "3", "{}"])
def test_metadata_of_other_programs(text: str, tmp_path: Path) -> None:
    report = export(Small().eval(), tmp_path / "m.xml", to="openvino", config=CONFIG, size=24)
    openvino = pytest.importorskip("openvino")
    model = openvino.Core().read_model(str(report.path))
    model.set_rt_info(text, ["tokamix"])
    openvino.save_model(model, str(tmp_path / "other.xml"))
    with pytest.raises(ValueError, match=r"other\.xml does not say how to preprocess images"):
        load_exported(tmp_path / "other.xml")


def hooked(model: nn.Module) -> nn.Module:
    model.conv.register_forward_hook(lambda *_: None)
    return model


def compiled_layer(model: nn.Module) -> nn.Module:
    model.conv = torch.compile(model.conv)
    return model


def compiled_in_place(model: nn.Module) -> nn.Module:
    model.conv.compile()
    return model


def distributed(model: nn.Module) -> nn.Module:
    """DDP as it stands around a model, without a process group."""
    wrapper = nn.parallel.DistributedDataParallel.__new__(nn.parallel.DistributedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper.module = model
    return wrapper


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (hooked, r"conv \(Conv2d\) has forward hooks, which a graph cannot hold; remove them before the export"),
        (torch.compile, r"the model is compiled; export the model as it was before torch\.compile"),
        (compiled_layer, r"conv is compiled; export the model as it was before torch\.compile"),
        (compiled_in_place, r"conv is compiled; export the model as it was before torch\.compile"),
        (nn.DataParallel, r"the model is wrapped in DataParallel; export its `\.module`"),
        (distributed, r"the model is wrapped in DistributedDataParallel; export its `\.module`"),
    ],
)
def test_hooks_and_wrappers_are_refused(wrap: Callable[[nn.Module], nn.Module], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        export(wrap(Small().eval()), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("package", "suffix", "options", "extra"),
    [
        ("onnxscript", ".onnx", {}, "export"),
        ("openvino", ".xml", {"to": "openvino"}, "openvino"),
        ("executorch.exir", ".pte", {"to": "executorch"}, "executorch"),
    ],
)
def test_a_missing_package_names_its_extra(
    package: str, suffix: str, options: dict, extra: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    name = package.partition(".")[0]
    with pytest.raises(ImportError, match=rf"needs {name}: pip install 'tokamix\[{extra}\]'"):
        export(Small().eval(), tmp_path / f"m{suffix}", config=CONFIG, size=24, **options)
    assert not list(tmp_path.iterdir())


def test_a_missing_runtime_names_its_extra(monkeypatch: pytest.MonkeyPatch, onnx_report: ExportReport) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(ImportError, match=r"model\.onnx needs onnxruntime: pip install 'tokamix\[onnx\]'"):
        load_exported(onnx_report.path)


def test_models_of_one_size_are_not_exported_as_dynamic(tmp_path: Path) -> None:
    model = tokamix.create_model("deit_tiny_patch16_224", depth=1, embed_dim=24, num_heads=1, num_classes=2).eval()
    with pytest.raises(ValueError, match=r"does not take images of other sizes .* export it with --size 224"):
        export(model, tmp_path / "m.onnx", size="dynamic")


class SidesOf8(Small):
    """Refuses what its graph takes: sides under 16 px and sides that are not multiples of 8."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not dispatch.is_exporting() and (min(x.shape[2:]) < 16 or x.shape[2] % 8 or x.shape[3] % 8):
            raise ValueError("the sides must be multiples of 8")
        return super().forward(x)


def test_sizes_that_the_network_refuses_are_refused_by_the_file(tmp_path: Path) -> None:
    """The graph itself would return numbers that mean nothing."""
    report = export(SidesOf8().eval(), tmp_path / "m.onnx", config=CONFIG, size="dynamic")
    assert "sides that are multiples of 8 from 16 px on, any batch" in report.lines()[0]
    assert [d.size for d in report.checks] == [(64, 96), (24, 24), (24, 40), (16, 16)]
    file = load_exported(report.path)
    assert file(torch.zeros(1, 3, 16, 40)).shape == (1, 3)
    for size in ((8, 16), (16, 44)):
        with pytest.raises(ValueError, match=rf"sides that are multiples of 8 from 16 px on, got {size[0]}x{size[1]}"):
            file(torch.zeros(1, 3, *size))
    anything = export(Small().eval(), tmp_path / "any.onnx", config=CONFIG, size="dynamic")
    assert "any size from 3 px on" in anything.lines()[0], "the kernel is 3x3"


def test_weights_and_outputs_that_are_not_numbers_are_refused(tmp_path: Path) -> None:
    model = Small().eval()
    model.head.weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match=r"head\.weight has values that are NaN or infinite"):
        export(model, tmp_path / "m.onnx", config=CONFIG, size=24)

    class Overflow(Small):
        def forward_intermediates(self, x: torch.Tensor, **_: object) -> list[torch.Tensor]:
            return [self.conv(x), (self.conv(x) - 1e30).log()]

    with pytest.raises(ValueError, match="the model itself gives NaN or infinite values for 1 image of 24x24"):
        export(Overflow().eval(), tmp_path / "m.onnx", config=CONFIG, size=24, features=True)
    with pytest.raises(ValueError, match=r"conv\.weight is on the meta device"):
        export(Small().to("meta").eval(), tmp_path / "m.onnx", config=CONFIG, size=24)
    good, bad = torch.ones(2), torch.full((2,), torch.nan)
    assert not check.compare_outputs([good, good], [good, bad], "classify") <= 1
    assert not list(tmp_path.iterdir())


def test_a_classifier_for_images_that_are_not_square(tmp_path: Path) -> None:
    """predict crops squares: the export says so, and not predict alone."""
    report = export(Small().eval(), tmp_path / "m.onnx", config=CONFIG, size=(24, 32))
    assert any("crop squares, so they do not take this file" in line for line in report.lines())
    assert load_exported(report.path)(torch.zeros(1, 3, 24, 32)).shape == (1, 3)


def test_a_check_that_compares_no_detection_says_so() -> None:
    def report(*found: int) -> str:
        checks = [check.Difference((64, 64), 1, 0.0, n) for n in found]
        return "\n".join(ExportReport(Path("m.onnx"), "onnx", "fp32", None, 1, 1, 1, checks, 1.0, 1.0).lines())

    assert "1 x 64x64: nothing detected" in report(0)
    assert "its boxes could not be compared" in report(0, 0)
    assert "could not be compared" not in report(0, 7)

    class FindsBlobs(nn.Module):
        """Finds an object where neighbouring pixels are alike, never in noise."""

        task, in_chans, preprocessing = "detect", 3, False

        def example(self, size: tuple[int, int], batch: int) -> torch.Tensor:
            return torch.randn(batch, 3, *size)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            score = ((x[..., 1:] - x[..., :-1]).abs().mean((1, 2, 3)) < 0.5).float()[:, None]
            return torch.zeros(len(x), 1, 4), torch.zeros(len(x), 1, dtype=torch.int64), score

    detector: Any = FindsBlobs()
    assert not detector(detector.example((64, 96), 1))[2].any()
    assert detector(check.draw_images(detector, (64, 96), 1))[2] == 1


def test_count_exp_in_files(onnx_report: ExportReport, classifier_run: Path, tmp_path: Path) -> None:
    """As many as tracing finds; with SimA and ReLU none are left, and LayerNorm's square roots are named."""
    model, config = load_model(classifier_run)
    assert tokamix.count_exp(onnx_report.path) == tokamix.count_exp(model, config.image_size)
    assert tokamix.count_exp(onnx_report.path)["softmax"] > 0
    assert "nodes that evaluate exp: 2 Gelu, 2 Softmax" in onnx_report.lines()[-1].replace(
        "2 Softmax, 2 Gelu", "2 Gelu, 2 Softmax"
    )
    free = tokamix.create_model(
        "deit_small_sima_relu", depth=1, embed_dim=16, num_heads=1, img_size=32, num_classes=3
    ).eval()
    report = export(free, tmp_path / "m.onnx", config=CONFIG, size=32)
    assert tokamix.count_exp(report.path).total() == 0
    assert "nodes that evaluate exp: none; square roots: 3 LayerNormalization" in report.lines()
    with pytest.raises(FileNotFoundError, match="there is no ONNX file"):
        tokamix.count_exp(tmp_path / "none.onnx")


def test_count_exp_in_branches_and_functions(tmp_path: Path) -> None:
    """Nodes there are found; those of branches cannot be counted, which is said."""

    def save(*nodes: str, opset: str = "", functions: str = "") -> Path:
        text = f'<ir_version: 9, opset_import: ["" : 18{opset}]> m (float[1,3,4,4] x) => (float[1,3,4,4] y) '
        onnx.save(onnx.parser.parse_model(f"{text} {{ {' '.join(nodes)} }} {functions}"), str(tmp_path / "m.onnx"))
        return tmp_path / "m.onnx"

    path = save(
        "y = own.f(x)",
        opset=', "own" : 1',
        functions='<domain: "own", opset_import: ["" : 18]> f (a) => (b) { b = Exp(a) }',
    )
    assert tokamix.count_exp(path) == {"exp": 48}
    branches = "then_branch = t () => (float[1,3,4,4] p) { p = Sigmoid(x) }, else_branch = e () => (q) { q = Sqrt(x) }"
    path = save("c = Constant<value = bool {1}>()", f"y = If (c) <{branches}>")
    assert exp_nodes(path) == ({"Sigmoid": 1}, {"Sqrt": 1})
    with pytest.raises(ValueError, match=r"evaluates exp in branches or loops \(1 nodes\)"):
        tokamix.count_exp(path)
    (tmp_path / "m.onnx").write_text("no graph")
    with pytest.raises(ValueError, match=r"m\.onnx cannot be read as an ONNX file"):
        tokamix.count_exp(tmp_path / "m.onnx")


def test_triton_layout(onnx_report: ExportReport, tmp_path: Path) -> None:
    """The config names the inputs and outputs of the file, without the batch."""
    path = tmp_path / "photos" / "1" / "model.onnx"
    path.parent.mkdir(parents=True)
    path.write_bytes(onnx_report.path.read_bytes())
    assert write_triton_config(path).read_text().splitlines() == [
        'name: "photos"',
        'backend: "onnxruntime"',
        "max_batch_size: 64",
        'input [ { name: "images", data_type: TYPE_FP32, dims: [ 3, 8, 8 ] } ]',
        'output [ { name: "logits", data_type: TYPE_FP32, dims: [ 4 ] } ]',
        "dynamic_batching { max_queue_delay_microseconds: 2000 }",
    ]
    with pytest.raises(ValueError, match=r"Triton needs a file REPOSITORY/NAME/1/model\.onnx"):
        write_triton_config(onnx_report.path)
    for version in ("0", "01"):
        with pytest.raises(ValueError, match="Triton ignores versions that begin with 0"):
            check_triton_path(tmp_path / "photos" / version / "model.onnx")


def test_inductor_may_raise_cant_split_without_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11 does, which would end in a TypeError."""
    from torch._inductor.codegen import simd

    class CantSplit(Exception):
        def __init__(self, expr: object, remaining: object) -> None:
            super().__init__()

    monkeypatch.setattr(simd, "CantSplit", CantSplit)
    write._give_defaults_to_cant_split()
    bare: type[Exception] = CantSplit
    with pytest.raises(CantSplit):
        raise bare
