"""Benchmarks check the timed call against float32 first; suites report empty selections and failures."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tokamix.bench import models, ops, suites

SMALL = {"size": 32, "batch": 2, "device": "cpu", "seconds": 0.0, "depth": 1}


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_model(mode: str) -> None:
    row = models.measure("columnar_tiny_sima", mode, compiled="", img_size=32, **SMALL)
    assert row.error < 1e-5
    assert row.images_per_second > 0


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_wrong_output_is_not_timed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, mode: lambda images: 1.1 * model(images))
    with pytest.raises(RuntimeError, match="not timed, because the result is wrong"):
        models.measure("columnar_tiny_sima", mode, img_size=32, **SMALL)


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

    row = ops.OpRow("copy", "small", 4, "torch", *[1.0] * 8)
    lines: list[str] = []
    monkeypatch.setitem(suites.SUITES, "ops", lambda device: iter([("bad", fail), ("good", lambda: row)]))
    path = suites.run("ops", tmp_path, "cpu", log=lines.append)
    assert path.read_text().splitlines()[1:] == ["copy,small,4,torch,1,1,1,1,1,1,1,1"]
    assert lines[0] == "bad: FAILED, RuntimeError: out of memory"
    with pytest.raises(RuntimeError, match="all 1 measurements of suite 'ops' failed"):
        suites.run("ops", tmp_path / "none", "cpu", only="bad", log=lines.append)
    assert not (tmp_path / "none").exists()
