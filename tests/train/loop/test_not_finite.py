"""Losses and gradients that are not finite."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.tiny import run
from tokamix.train import run as train_run
from tokamix.train.loop.engine import NotFiniteError
from tokamix.train.loop.state import read_state
from tokamix.train.tasks.classify import Classify
from tokamix.train.tasks.task import Position


@pytest.fixture
def poison(monkeypatch: pytest.MonkeyPatch):
    """Make the loss of some batches NaN or infinite: {(epoch, batch): value}."""

    def set_(bad: dict[tuple[int, int], float]) -> None:
        real = Classify.loss

        def loss(self: Classify, model, images, labels, position: Position):
            value, logs = real(self, model, images, labels, position)
            factor = bad.get((position.epoch, position.batch), 1.0)
            return value * factor, logs | {"loss": value * factor}

        monkeypatch.setattr(Classify, "loss", loss)

    return set_


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("log_every", [1, 50])
def test_stops_and_keeps_the_last_good_state(tmp_path: Path, poison, value: float, log_every: int) -> None:
    poison({(1, 3): value})
    with pytest.raises(
        NotFiniteError,
        match=r"loss or gradient not finite at step 9 \(batch 4 of epoch 2\).*last good state is in .*--skip-nan",
    ):
        run(tmp_path / "a", save_every=2, log_every=log_every)
    groups, rest = read_state(tmp_path / "a" / "state" / "state.safetensors")
    assert (rest["epoch"], rest["step"]) == (1, 3)
    assert all(t.isfinite().all() for tensors in groups.values() for t in tensors.values())
    assert all(t.isfinite().all() for t in load_file(tmp_path / "a" / "model.safetensors").values())
    # the same command meets the same batch again and stops again
    with pytest.raises(NotFiniteError, match="at step 9"):
        run(tmp_path / "a", save_every=2, log_every=log_every)


def test_with_accumulation(tmp_path: Path, poison) -> None:
    poison({(0, 5): float("nan")})
    with pytest.raises(NotFiniteError, match=r"at step 3 \(batch 3 of epoch 1\); no state was saved"):
        run(tmp_path / "a", accumulate=2)


def test_skip_nan(tmp_path: Path, poison) -> None:
    poison({(0, 1): float("nan"), (1, 2): float("inf")})
    result = run(tmp_path / "a", skip_nan=2, ema=0.9)
    assert read_state(tmp_path / "a" / "state" / "state.safetensors")[1]["skipped"] == 2
    assert all(t.isfinite().all() for t in load_file(tmp_path / "a" / "last.safetensors").values())
    assert all(torch.isfinite(torch.tensor(row["train_loss"])) for row in result.epochs)
    with pytest.raises(NotFiniteError, match=r"at step 8 \(batch 3 of epoch 2\), after 1 skipped steps"):
        run(tmp_path / "b", skip_nan=1)


def test_skip_nan_in_fp16(tmp_path: Path, poison, monkeypatch: pytest.MonkeyPatch) -> None:
    """The scaler, here on the CPU, goes on after a skipped step, with a smaller scale as after an overflow."""
    real = train_run.create_accelerator

    def with_scaler(*args, **kwargs):
        accelerator = real(*args, **kwargs)
        scaler = accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        # as Accelerate does in fp16
        accelerator.unscale_gradients = lambda: [scaler.unscale_(one.optimizer) for one in accelerator._optimizers]
        return accelerator

    monkeypatch.setattr(train_run, "create_accelerator", with_scaler)
    poison({(0, 1): float("nan"), (1, 2): float("nan")})
    run(tmp_path, skip_nan=2)
    rest = read_state(tmp_path / "state" / "state.safetensors")[1]
    assert (rest["skipped"], rest["scaler"]["scale"]) == (2, 2.0)


def test_gradient_not_finite_with_finite_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Never saved: detected at once if gradients are clipped, else before the weights are saved."""
    real = Classify.cross_entropy
    steps = iter(range(100))

    def cross_entropy(self: Classify, logits, target):
        loss = real(self, logits, target)
        return loss + (logits * 0).sum().sqrt() if next(steps) == 8 else loss  # 0, with a slope of infinity times 0

    monkeypatch.setattr(Classify, "cross_entropy", cross_entropy)
    for name, settings, said in (
        ("plain", {}, "weights not finite at step 9"),
        ("clipped", {"clip_grad": 1.0}, "loss or gradient not finite at step 9"),
    ):
        steps = iter(range(100))
        with pytest.raises(NotFiniteError, match=said):
            run(tmp_path / name, save_every=1, **settings)
        groups, rest = read_state(tmp_path / name / "state" / "state.safetensors")
        assert (rest["epoch"], rest["step"]) == (1, 3)
        assert all(t.isfinite().all() for t in groups["model"].values())
    steps = iter(range(100))
    run(tmp_path / "skipped", skip_nan=1)
    assert all(t.isfinite().all() for t in load_file(tmp_path / "skipped" / "last.safetensors").values())


def test_outputs_that_are_not_finite_are_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Accuracies of outputs that are NaN look like accuracies, so the run says so."""
    evaluate = Classify.evaluate
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Classify, "evaluate", lambda *args: evaluate(*args) | {"loss": float("nan")})
        run(tmp_path, quiet=False)
    assert "epoch 3: loss not finite: some outputs are NaN or infinite" in capsys.readouterr().out


@pytest.mark.parametrize("key", ["loss", "top1"])
def test_weights_whose_outputs_are_not_finite_are_never_the_best(tmp_path: Path, key: str) -> None:
    """Neither is a first NaN kept for ever, nor does the accuracy of NaN, that of the first class, win."""
    evaluate, values = Classify.evaluate, iter([{"top1": 99.0} | {key: float("nan")}, {"top1": 50.0}, {"top1": 60.0}])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Classify, "evaluate", lambda *args: evaluate(*args) | next(values))
        result = run(tmp_path)
    assert (result.best["epoch"], result.top1) == (3, 60.0)
