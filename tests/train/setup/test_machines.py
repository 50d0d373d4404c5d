"""Runs over several machines, and other launchers: two agents of torchrun on this machine, and `accelerate launch`."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.train.launch import ROOT
from tests.train.loop.test_resume import Stop, stop_at
from tests.train.setup.test_parallel import assert_same_run
from tests.train.tiny import PARALLEL, run
from tokamix.train import RunResult

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def finish(*commands: list[str]) -> None:
    """Run commands side by side until all have ended."""
    jobs = [
        subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for command in commands
    ]
    try:
        outputs = [job.communicate(timeout=300)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()
    for job, output in zip(jobs, outputs, strict=True):
        assert job.returncode == 0, output[-3000:]


def test_two_machines_resume_the_run_of_one(reference: Callable[..., RunResult], tmp_path: Path) -> None:
    """A run of one process, stopped, is resumed by two agents with a rendezvous, one process each."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 4)
        with pytest.raises(Stop):
            run(tmp_path / "run", **PARALLEL)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "test"]
    job = {"runs": [{**PARALLEL, "output": str(tmp_path / "run")}]}
    finish(*[[*command, "-m", "tests.train.worker", json.dumps(job)]] * 2)
    assert_same_run(reference(**PARALLEL).folder, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["processes"] == 2


def test_accelerate_launch(reference: Callable[..., RunResult], tmp_path: Path) -> None:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi-gpu", "--num-processes", "2"]
    job = {"runs": [{**PARALLEL, "output": str(tmp_path / "run")}]}
    finish([*command, "-m", "tests.train.worker", json.dumps(job)])
    assert_same_run(reference(**PARALLEL).folder, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["processes"] == 2
