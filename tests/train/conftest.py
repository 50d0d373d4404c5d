"""Fixtures of the training tests."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.processes import ROOT
from tests.train import tiny, tiny_dense
from tests.train.launch import CONVERSION, DENSE_RUNS, DINO_RUN, DISTRIBUTED
from tokamix.train import RunResult


@pytest.fixture(autouse=True)
def short_runs(no_drawings: None) -> None:
    """Drawing takes longer than a tiny run; `finished` in test_run.py has the real curves and reports."""


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., RunResult]:
    """Uninterrupted runs by their settings, each trained once; `task` selects a dense task."""
    runs: dict[str, RunResult] = {}

    def train_once(task: str | None = None, **settings: Any) -> RunResult:
        key = json.dumps([task, settings], sort_keys=True, default=str)
        if key not in runs:
            folder = tmp_path_factory.mktemp("reference")
            runs[key] = tiny_dense.run(task, folder, **settings) if task else tiny.run(folder, **settings)
        return runs[key]

    return train_once


@pytest.fixture(scope="session")
def two_processes(tmp_path_factory: pytest.TempPathFactory, classifier_run: Path) -> tuple[Path, str]:
    """Runs of all tasks in one job of two processes, and its output; `accelerate launch` starts interpreters."""
    folder = tmp_path_factory.mktemp("two_processes")
    runs = [{**tiny.PARALLEL, **more, "output": str(folder / name)} for name, more in DISTRIBUTED.items()]
    others = {**DENSE_RUNS, "dino": DINO_RUN, "conversion": {**CONVERSION, "convert": str(classifier_run)}}
    runs += [{**settings, "output": str(folder / name)} for name, settings in others.items()]
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi-gpu", "--num-processes", "2"]
    command += ["-m", "tests.train.worker", json.dumps({"runs": runs})]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    job = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert job.returncode == 0, job.stderr[-3000:]
    return folder, job.stdout + job.stderr
