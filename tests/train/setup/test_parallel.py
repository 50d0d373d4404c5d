"""Distributed runs: the same numbers as one process, and no hang."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import tokamix
from tests.processes import TWO_PROCESSES, finish, torchrun
from tests.train.launch import torchrun_arguments
from tests.train.tiny import PARALLEL, TINY, run
from tokamix.layers import BatchNorm
from tokamix.train import RunResult
from tokamix.train.setup.accelerator import synchronise_batch_norm


def losses(folder: Path) -> torch.Tensor:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("loss", "top1", "ema_top1", "ema_loss")
    return torch.tensor([row[key] for row in rows for key in keys if key in row], dtype=torch.float64)


def assert_same_run(one: Path, other: Path) -> None:
    torch.testing.assert_close(losses(other), losses(one), rtol=1e-4, atol=1e-5)
    weights = [load_file(folder / "last.safetensors") for folder in (one, other)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.xdist_group("processes")
def test_two_processes_are_like_one(reference: Callable[..., RunResult], two_processes: tuple[Path, str]) -> None:
    """DDP and FSDP2 give the losses and weights of one process with the whole batch."""
    folder, _ = two_processes
    one = reference(**PARALLEL).folder
    for name in ("ddp", "fsdp"):
        assert_same_run(one, folder / name)
    assert json.loads((folder / "fsdp" / "environment.json").read_text())["processes"] == 2


def test_accumulation_is_like_one_batch(tmp_path: Path) -> None:
    # each part would be augmented and mixed in its own way
    plain = {**PARALLEL, "mixup": 0.0, "cutmix": 0.0, "random_erasing": 0.0, "crop_padding": 0, "hflip": 0.0}
    run(tmp_path / "one", **plain)
    run(tmp_path / "parts", **plain, accumulate=4)
    assert_same_run(tmp_path / "one", tmp_path / "parts")


@pytest.mark.xdist_group("processes")
def test_killed_processes(reference: Callable[..., RunResult], tmp_path: Path) -> None:
    """An elastic restart resumes the run; without restarts left the job ends with an error instead of hanging.

    The second run is sharded when process 1 is killed; one process resumes it.
    """
    runs = [{**PARALLEL, "kill": [0, 7], "output": str(tmp_path / "elastic")}]
    runs += [{**PARALLEL, "fsdp": True, "kill": [1, 4], "output": str(tmp_path / "ended")}]
    arguments = torchrun_arguments({"runs": runs}, *TWO_PROCESSES, "--max-restarts=1")
    code, output = finish(tmp_path / "log", torchrun, arguments, seconds=350)
    assert code == 1, output[-3000:]
    assert not list((tmp_path / "ended").glob("metrics.csv")), "process 1 was not killed in the first epoch"
    one = reference(**PARALLEL).folder
    assert_same_run(one, tmp_path / "elastic")
    run(tmp_path / "ended", **PARALLEL)
    assert_same_run(one, tmp_path / "ended")


@pytest.mark.parametrize("name", ["test_resnet", "stvit_small", "columnar_tiny_softmax"])
def test_batch_norm_is_synchronised(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On GPUs, unless the recipe switches it off; gloo has no synchronised BatchNorm, so a warning must do."""
    model = tokamix.create_model(name)
    norms = sum(isinstance(module, BatchNorm) for module in model.modules())

    def synchronised() -> int:
        return sum(isinstance(module, torch.nn.SyncBatchNorm) for module in model.modules())

    assert synchronise_batch_norm(model, TINY) is None  # one process
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    assert synchronise_batch_norm(model, TINY) is None
    assert ("PyTorch synchronises it on GPUs only" in caplog.text) == bool(norms)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert synchronise_batch_norm(model, TINY.replace(eval_mode=True)) is None
    line = synchronise_batch_norm(model, TINY.replace(sync_bn=False))
    assert synchronised() == 0
    assert line == (
        f"{norms} BatchNorm layers use the images of each process alone (sync_bn: false)" if norms else None
    )
    line = synchronise_batch_norm(model, TINY)
    assert line == (f"{norms} BatchNorm layers are synchronised over 2 processes" if norms else None)
    assert synchronised() == norms
