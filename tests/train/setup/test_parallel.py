"""Many processes: the same numbers as one, and clear ends."""

import json
import subprocess
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests.train.tiny import run

ROOT = Path(__file__).parents[3]
# nothing that differs in each process: no dropout; mixed pairs are the same however a batch is dealt out
SETTINGS = {"log_every": 1, "save_every": 3, "ema": 0.9, "clip_grad": 1.0, "mixup": 0.8, "cutmix": 1.0, "epochs": 2}
SETTINGS |= {"random_erasing": 0.3, "crop_padding": 1, "hflip": 0.5}


def torchrun(told: dict, restarts: int = 0, timeout: float = 200) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [f"--max-restarts={restarts}", "-m", "tests.train.worker", json.dumps(told)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout)


def losses(folder: Path) -> torch.Tensor:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    keys = ("loss", "top1", "ema_top1", "ema_loss")
    return torch.tensor([row[key] for row in rows for key in keys if key in row], dtype=torch.float64)


def assert_same_run(one: Path, other: Path) -> None:
    torch.testing.assert_close(losses(other), losses(one), rtol=1e-4, atol=1e-5)
    weights = [load_file(folder / "last.safetensors") for folder in (one, other)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weights[1][name], weight, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_two_processes_are_like_one(tmp_path: Path) -> None:
    """DDP, FSDP2 and accumulation give the losses of one process with the whole batch, epoch by epoch."""
    run(tmp_path / "one", **SETTINGS)
    kinds = {"ddp": {}, "fsdp": {"fsdp": True}}
    runs = [{**SETTINGS, **more, "output": str(tmp_path / name)} for name, more in kinds.items()]
    done = torchrun({"runs": runs})
    assert done.returncode == 0, done.stderr[-3000:]
    for name in kinds:
        assert_same_run(tmp_path / "one", tmp_path / name)
    assert json.loads((tmp_path / "fsdp" / "environment.json").read_text())["processes"] == 2


def test_accumulation_is_like_one_batch(tmp_path: Path) -> None:
    # each part would be augmented and mixed in its own way
    plain = {**SETTINGS, "mixup": 0.0, "cutmix": 0.0, "random_erasing": 0.0, "crop_padding": 0, "hflip": 0.0}
    run(tmp_path / "one", **plain)
    run(tmp_path / "parts", **plain, accumulate=4)
    assert_same_run(tmp_path / "one", tmp_path / "parts")


def test_a_killed_process_ends_the_job(tmp_path: Path) -> None:
    """No hang, but an error that says who died of what; and one process goes on with what two had sharded."""
    begun = time.monotonic()
    done = torchrun({"kill": 4, "runs": [{**SETTINGS, "fsdp": True, "output": str(tmp_path / "a")}]})
    assert done.returncode != 0
    assert time.monotonic() - begun < 150
    assert "Signal 9 (SIGKILL) received by PID" in done.stderr
    run(tmp_path / "a", **SETTINGS)
    run(tmp_path / "one", **SETTINGS)
    assert_same_run(tmp_path / "one", tmp_path / "a")


def test_an_elastic_restart_goes_on(tmp_path: Path) -> None:
    run(tmp_path / "one", **SETTINGS)
    done = torchrun({"kill": 7, "runs": [{**SETTINGS, "output": str(tmp_path / "a")}]}, restarts=1)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_same_run(tmp_path / "one", tmp_path / "a")
