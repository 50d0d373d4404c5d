"""Benchmarks check the timed call against float32 first; suites report empty selections and failures."""

import csv
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from tokamix.bench import detectors, models, ops, scaling, suites
from tokamix.bench.rows import RowFile

SMALL = {"size": 32, "batch": 2, "device": "cpu", "depth": 1, "img_size": 32}


def small(mode: str, **options: Any) -> models.ModelRow:
    return models.measure(partial(models.TimedModel, "columnar_tiny_sima", mode, **SMALL, **options), seconds=0)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_model(mode: str) -> None:
    row = small(mode, compiled="")
    assert row.error < 1e-5
    assert row.images_per_second == pytest.approx(2e3 / row.milliseconds)
    assert min(row.first_call_s, row.milliseconds) > 0
    assert row.spread == 0  # one turn


def test_graphed_model() -> None:
    row = small("infer", compiled="graphed")
    assert (row.compiled, row.error < 1e-5) == ("graphed", True)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_wrong_output_is_not_timed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, mode: lambda images: 1.1 * model(images))
    with pytest.raises(RuntimeError, match="not timed, because the result is wrong"):
        small(mode)


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * grad


class Copy(nn.Module):
    """The identity; with `wrong`, its gradient is wrong unless the eager backend is forced."""

    wrong = False

    def forward(self, x: Tensor) -> Tensor:
        from tokamix.ops import dispatch

        return WrongBackward.apply(x) if self.wrong and dispatch.forced() != "eager" else x.clone()


def test_wrong_gradients_are_not_timed() -> None:
    copy = Copy()
    case = ops.OpCase("copy", "small", 4, copy, [torch.randn(2, 4)], ("torch",))
    assert ops.measure(case, "torch", "cpu", 0.0).gradient_error == 0
    copy.wrong = True
    with pytest.raises(RuntimeError, match=r"not timed, because the result is wrong.* 0\.0e\+00 .* 1\.0e\+00"):
        ops.measure(case, "torch", "cpu", 0.0)


def test_an_empty_selection_is_an_error_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--only 'nomatch' matches none of the \d+ measurements of suite 'models'"):
        suites.run("models", tmp_path, "cpu", only="nomatch")
    assert not list(tmp_path.iterdir())


def test_failed_measurements_are_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> ops.OpRow:
        raise RuntimeError("out of memory")

    row = ops.OpRow("copy", "small", 4, "torch", *[1.0] * 9)
    lines: list[str] = []
    monkeypatch.setitem(suites.SUITES, "ops", lambda device: iter([("bad", fail), ("good", lambda: row)]))
    path = suites.run("ops", tmp_path, "cpu", log=lines.append)
    (line,) = path.read_text().splitlines()[1:]
    assert line.startswith("good,copy,small,4,torch,1,1,1,1,1,1,1,1,1,")
    assert lines[0] == "bad: FAILED, RuntimeError: out of memory"
    with pytest.raises(RuntimeError, match="all 1 measurements of suite 'ops' failed"):
        suites.run("ops", tmp_path / "none", "cpu", only="bad", log=lines.append)
    assert not (tmp_path / "none").exists()


def read(path: Path) -> dict[str, dict[str, str]]:
    return {row["label"]: row for row in csv.DictReader(path.open())}


def test_a_suite_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing begins after the deadline; the next run measures what is missing and keeps what is there."""
    measured: list[str] = []

    def measure(label: str) -> ops.OpRow:
        measured.append(label)
        return ops.OpRow(label, "small", 4, "torch", *[float(len(measured))] * 9)

    monkeypatch.setitem(suites.SUITES, "ops", lambda device: ((label, partial(measure, label)) for label in "abc"))
    lines: list[str] = []
    run = partial(suites.run, "ops", tmp_path, "cpu", log=lines.append, resume=True)
    run(only="b")
    run(deadline=time.monotonic() - 1)
    assert measured == ["b"]
    assert "2 measurements of suite 'ops' are missing" in lines[-1]
    run()
    run()
    assert measured == ["b", "a", "c"]
    rows = read(tmp_path / "ops.csv")
    assert [row["forward_ms"] for row in rows.values()] == ["1", "2", "3"]
    assert rows["a"]["processor"] == "CPU"
    suites.run("ops", tmp_path, "cpu", only="c", log=lines.append)  # without resume: a new file
    assert list(read(tmp_path / "ops.csv")) == ["c"]


def test_rows_of_other_columns(tmp_path: Path) -> None:
    """A file of an earlier format without labels is replaced; one with labels and other columns is not touched."""
    path = tmp_path / "a.csv"
    path.write_text("op,ms\nx,1\n")
    RowFile(path, keep=True).append("new", {"op": "x"}, "cpu")
    assert list(read(path)) == ["new"]
    with pytest.raises(ValueError, match="has other columns than this measurement; move it away"):
        RowFile(path, keep=True).append("more", {"op": "x", "ms": 1.0}, "cpu")
    assert list(read(path)) == ["new"]


@pytest.mark.parametrize("name", [*scaling.OURS, *scaling.PEERS])
def test_mixers_of_the_scaling_suite(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All map tokens to tokens; mixers with windows get the next smaller multiple of 14."""
    monkeypatch.setattr(scaling, "DIM", 12)
    row = scaling.measure_mixer(name, 16, "cpu", 0.0)
    assert row.tokens == (14 * 14 if name in scaling.WINDOWED else 16 * 16)
    assert row.error < 1e-5
    assert min(row.forward_ms, row.training_ms) > 0


def test_peers_compute_what_their_networks_do() -> None:
    """Windows and blocks as timm's own modules give them, each window for itself."""
    x = torch.randn(2, 14 * 14, 8)
    swin, block = scaling.SwinWindows(8, 2), scaling.ConvNeXtLayer(8)
    corner = x.unflatten(1, (14, 14))[:, :7, 7:].flatten(1, 2)
    torch.testing.assert_close(swin(x, (14, 14)).unflatten(1, (14, 14))[:, :7, 7:].flatten(1, 2), swin.attend(corner))
    expected = block.block(x.mT.unflatten(2, (14, 14)).contiguous()).flatten(2).mT
    torch.testing.assert_close(block(x, (14, 14)), expected)


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_large_images(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "IMAGE_SIZES", (64, 32))
    measure = partial(scaling.measure_image, "columnar_tiny_sima", mode, device="cpu", seconds=0.0, depth=1)
    rows = [measure(size, img_size=size) for size in (64, 32)]
    assert all(row.fits and row.milliseconds > 0 for row in rows)
    assert [math.isnan(row.error) for row in rows] == [True, mode == "train"]

    def full(*args: Any) -> None:
        raise torch.OutOfMemoryError("full")

    monkeypatch.setattr(scaling, "median_ms", full)
    row = measure(64, img_size=64)
    assert not row.fits
    assert math.isnan(row.milliseconds)


def test_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of all our mixers, and of all our models in both modes, are compiled beforehand."""
    mixers: Any = suites.list_launches("scaling", "cpu")
    assert [launch.args[0] for launch in mixers] == list(scaling.OURS)
    images: Any = suites.list_launches("images", "cpu")
    assert {launch.args[:2] for launch in images} == {(name, m) for name, _ in suites.OURS for m in ("infer", "train")}
    assert suites.list_launches("ops", "cpu") == []
    seen: list[tuple] = []
    original = ops.OnGrid.forward
    monkeypatch.setattr(scaling, "DIM", 12)
    monkeypatch.setattr(scaling, "SIDES", (14, 16))
    monkeypatch.setattr(scaling, "IMAGE_SIZES", (64, 32))
    monkeypatch.setattr(ops.OnGrid, "forward", lambda self, x: (seen.append(x.shape), original(self, x))[1])
    for launch in mixers:
        launch()
    assert len(seen) == 8
    scaling.launch_image("columnar_tiny_sima", "train", "cpu", depth=1, img_size=32)


def test_step_for_graph_leaves_no_gradients() -> None:
    timed = models.TimedModel("columnar_tiny_sima", "train", compiled="", **SMALL)
    timed.step_for_graph()
    assert all(p.grad is None for p in timed.model.parameters())


def test_targets() -> None:
    """Labels are unique, models exist, and every group has a peer."""
    cases = list(suites.target_cases("cpu"))
    assert len({label for _, label, _ in cases}) == len(cases) > 20
    for mode, size, batch, compiled, names in suites.TARGETS:
        assert all(map(timm.is_model, names.split()))
        assert "convnext_tiny" in names, (mode, size, batch, compiled)
    assert [label for _, label, _ in cases if label.startswith("detect")][::2] == [
        "detect eager: mask_rcnn atmnet_tiny",
        "detect best: mask_rcnn atmnet_tiny",
    ]


@pytest.mark.parametrize("name", [detectors.OURS, detectors.TORCHVISION])
def test_detectors(name: str) -> None:
    ours = {"width": 16, "dims": (8, 8, 8, 8), "depths": (1, 1, 1, 1)}
    options = ours if name == detectors.OURS else {"rpn_post_nms_top_n_test": 8}
    timed = detectors.TimedDetector(name, size=(64, 96), device="cpu", **options)
    timed.first_call()
    assert timed.check() < 1e-5
    timed.time(0.0)
    assert (timed.row.size, timed.row.batch, timed.row.compiled) == ("64x96", 1, "")
    assert timed.row.milliseconds > 0
    timed.call = lambda images: [{"boxes": torch.empty(0, 4)}]
    with pytest.raises(RuntimeError, match=f"not timed, because {name} detects nothing"):
        timed.check()


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*scaling.OURS, *scaling.PEERS])
def test_mixers_on_a_gpu(name: str) -> None:
    """All can be replayed from a CUDA graph, forward and backward."""
    row = scaling.measure_mixer(name, 28, seconds=0.01)
    assert min(row.graph_ms, row.training_graph_ms, row.forward_gb, row.peak_gb) > 0
    assert row.backend == ("triton" if name in scaling.OURS else "torch")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["infer", "train"])
def test_large_images_on_a_gpu(mode: str) -> None:
    row = scaling.measure_image("stvit_small", mode, 256, seconds=0.01)
    assert row.fits
    assert 0 < row.graph_ms < 10 * row.milliseconds


@pytest.mark.gpu
@pytest.mark.parametrize("name", [detectors.OURS, detectors.TORCHVISION])
def test_detectors_on_a_gpu(name: str) -> None:
    """Autocast; the best mode is compiled, which takes a minute, and is left to the benchmark."""
    row = models.measure(partial(detectors.TimedDetector, name, size=(256, 320)), seconds=0.01)
    assert (row.dtype, row.milliseconds > 0) == ("bf16", True)
