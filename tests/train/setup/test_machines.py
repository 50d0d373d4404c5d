"""Runs over several machines: two agents of torchrun on this machine."""

import json
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.processes import started, torchrun
from tests.train.launch import torchrun_arguments
from tests.train.loop.test_resume import Stop, stop_at
from tests.train.setup.test_parallel import assert_same_run
from tests.train.tiny import PARALLEL, run
from tokamix.train import RunResult


@pytest.mark.xdist_group("processes")
def test_two_machines_resume_the_run_of_one(reference: Callable[..., RunResult], tmp_path: Path) -> None:
    """A run of one process, stopped, is resumed by two agents with a rendezvous, one process each."""
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 4)
        with pytest.raises(Stop):
            run(tmp_path / "run", **PARALLEL)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = ["--nnodes", "2", "--nproc-per-node", "1"]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "test"]
    arguments = torchrun_arguments({"runs": [{**PARALLEL, "output": str(tmp_path / "run")}]}, *options)
    logs = [tmp_path / "first", tmp_path / "second"]
    with started(logs[0], torchrun, arguments) as first, started(logs[1], torchrun, arguments) as second:
        for agent, log in zip((first, second), logs, strict=True):
            agent.join(300)
            assert agent.exitcode == 0, log.read_text()[-3000:]
    assert_same_run(reference(**PARALLEL).folder, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "environment.json").read_text())["processes"] == 2
