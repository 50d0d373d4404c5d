"""Benchmarks refuse to time what is wrong: the very call that is timed is held against float32."""

import pytest
import torch
from torch import Tensor, nn

from tokamix.bench import models, ops

SMALL = {"size": 32, "batch": 2, "device": "cpu", "seconds": 0.0, "depth": 1}


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_model(mode: str) -> None:
    row = models.measure("columnar_tiny_sima", mode, compiled="", img_size=32, **SMALL)
    assert row.error < 1e-5
    assert row.images_per_second > 0


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_a_wrongly_compiled_model(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, mode: lambda images: 1.1 * model(images))
    with pytest.raises(RuntimeError, match="not timed, because it is wrong"):
        models.measure("columnar_tiny_sima", mode, img_size=32, **SMALL)


class WrongOnTheWayBack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return 2 * grad


class Copy(nn.Module):
    """What kernels would do, and on the `wrong` backend something else."""

    wrong = False

    def forward(self, x: Tensor) -> Tensor:
        from tokamix.ops import dispatch

        return WrongOnTheWayBack.apply(x) if self.wrong and dispatch.forced() != "eager" else x.clone()


def test_an_operator_with_wrong_gradients() -> None:
    case = ops.OpCase("copy", "small", 4, Copy(), [torch.randn(2, 4)], ("torch",))
    assert ops.measure(case, "torch", "cpu", 0.0).gradient_error == 0
    case.run.wrong = True
    with pytest.raises(RuntimeError, match=r"not timed, because it is wrong.* 0\.0e\+00 .* 1\.0e\+00"):
        ops.measure(case, "torch", "cpu", 0.0)
