"""benchmarks/models_together.py: processes that compile at the same time and are timed in turn."""

import importlib
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import CONTEXT
from tokamix.bench.models import ModelRow, Timed


class Counted(Timed):
    """A model that notes its calls in a file all models share."""

    device = "cpu"

    def __init__(self, name: str, log: Path, fault: str = "") -> None:
        self.log, self.fault, self.step = log, fault, lambda: torch.zeros(2).add(1)
        self.row = ModelRow(name, "infer", 224, 8, "fp32", "", "auto")
        if fault == "create":
            raise ValueError("no such model")

    def note(self, what: str) -> None:
        with self.log.open("a") as file:
            file.write(f"{self.row.model} {what}\n")

    def first_call(self) -> None:
        if self.fault == "slow":
            time.sleep(60)
        if self.fault == "dies":
            os._exit(1)

    def check(self) -> float:
        self.note("check")
        if self.fault == "wrong":
            raise RuntimeError("not timed, because the result is wrong")
        return 0.0

    def time(self, seconds: float) -> None:
        self.note("time")
        self.row.milliseconds = 2.0


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    module: Any = importlib.import_module("models_together")
    monkeypatch.setattr(module, "CONTEXT", CONTEXT)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return module


@pytest.mark.xdist_group("processes")
def test_turns(together: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Good models are checked first and take turns; the others say why they are left out."""
    monkeypatch.setattr(together, "COMPILE_SECONDS", 25)
    log = tmp_path / "log"
    faults = {"a": "", "missing": "create", "dead": "dies", "wrong": "wrong", "b": ""}
    creates = {name: partial(Counted, name, log, fault) for name, fault in faults.items()}
    lines: list[str] = []
    found = together.measure(creates, math.inf, lines.append, profiled="^(a|wrong)$")
    workers = {worker.label: worker for worker in found}
    assert log.read_text().split("\n")[:-1] == ["a check", "wrong check", "b check", *["a time", "b time"] * 3]
    assert workers["a"].row["milliseconds"] == 2
    assert [workers[name].problem for name in ("a", "b")] == ["", ""]
    assert workers["missing"].problem == "FAILED, ValueError: no such model"
    assert workers["dead"].problem == "FAILED, its process died"
    assert "the result is wrong" in workers["wrong"].problem
    assert not any(worker.process.is_alive() for worker in workers.values())
    assert "a: compiled" in lines
    assert [bool(workers[name].costs) for name in faults] == [True, False, False, False, False]
    together.write_kernels(tmp_path / "kernels.csv", workers["a"])
    header, first, *rest = (tmp_path / "kernels.csv").read_text().splitlines()
    assert header == "label,kernel,calls,milliseconds"
    assert first.startswith("a,all,")
    assert any(line.startswith("a,aten::add,1,") for line in rest)


@pytest.mark.xdist_group("processes")
def test_deadline(together: Any, tmp_path: Path) -> None:
    """What has not compiled is given up and stopped; what has gets one turn."""
    log = tmp_path / "log"
    ready = CONTEXT.Process(target=int)  # the first process waits for the imports
    ready.start()
    ready.join()
    creates = {name: partial(Counted, name, log, fault) for name, fault in (("slow", "slow"), ("a", ""))}
    start = time.monotonic()
    slow, a = together.measure(creates, start + 3, lambda line: None)
    assert time.monotonic() - start < 30
    assert slow.problem == "FAILED, not compiled in time"
    assert not slow.process.is_alive()
    assert a.row["milliseconds"] == 2
    assert log.read_text() == "a check\na time\n"


def touch(path: Path) -> None:
    path.touch()


@pytest.mark.xdist_group("processes")
def test_kernels_are_compiled_in_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """benchmarks/run_suites.py: those that take too long are stopped."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    script: Any = importlib.import_module("run_suites")
    monkeypatch.setattr(script, "CONTEXT", CONTEXT)
    script.compile_kernels([partial(touch, tmp_path / "done")], 60)
    assert (tmp_path / "done").exists()
    start = time.monotonic()
    script.compile_kernels([partial(time.sleep, 60)], 0.2)
    assert time.monotonic() - start < 30
