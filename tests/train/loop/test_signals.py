"""Signals that stop a run, as `timeout`, Slurm, systemd and torchrun send them."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from torchvision.transforms.functional import to_pil_image

from tests.processes import ROOT, started, torchrun
from tests.train.launch import torchrun_arguments
from tests.train.tiny import TINY, assert_same_bits, run, tiny_data
from tokamix.train import RunResult
from tokamix.train.loop.signals import Interrupts
from tokamix.train.loop.state import read_header
from tokamix.train.tasks.classify import Classify


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "waited too long"
        time.sleep(0.05)


def rows(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def saved_update(folder: Path) -> int:
    state = read_header(folder / "state" / "state.safetensors")
    return state["epoch"] * state["steps"] + state["step"]


def test_signal_to_the_process_group(tmp_path: Path) -> None:
    """The workers of the data loader leave the signal to their parent, which saves; nothing is left running."""
    images, labels = tiny_data().train.arrays()
    for part in ("train", "val"):
        for i, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
            folder = tmp_path / "files" / part / f"class {label}"
            folder.mkdir(parents=True, exist_ok=True)
            to_pil_image(image).save(folder / f"{i}.png")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(TINY.replace(epochs=100_000, augment="rand-m9-mstd0.5-inc1").to_yaml())
    command = f"-m tokamix train --data {tmp_path}/files --recipe {recipe} --output {tmp_path}/run --device cpu"
    command += " --workers 2 --log-every 1 --save-every 1000000"
    job = subprocess.Popen(
        [sys.executable, *command.split()],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        wait_for(lambda: len(rows(tmp_path / "run")) > 3, 120)
        processes = psutil.Process(job.pid).children(recursive=True)
        assert len(processes) >= 2
        for number in (signal.SIGTERM, signal.SIGTERM):  # `timeout` sends it to its child and to the group
            os.killpg(job.pid, number)
        output, _ = job.communicate(timeout=30)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(job.pid, signal.SIGKILL)
    assert job.returncode == 130, output
    assert "Traceback" not in output
    assert "stopped after step" in output
    assert saved_update(tmp_path / "run") == rows(tmp_path / "run")[-1]["update"]
    assert not any(process.is_running() for process in processes)


@pytest.mark.xdist_group("processes")
def test_signals_to_torchrun(tmp_path: Path) -> None:
    """All ranks stop at the same step and save; after kill -9 of torchrun too, where they would train on."""
    last = 0
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGKILL):
        settings = {"epochs": 100_000, "log_every": 1, "output": str(tmp_path / "run")}
        with started(tmp_path / "log", torchrun, torchrun_arguments({"runs": [settings]})) as job:
            wait_for(lambda: len(rows(tmp_path / "run")) > last + 4, 120)  # noqa: B023, called at once
            ranks = psutil.Process(job.pid).children()
            for process in ranks if number == signal.SIGUSR1 else [psutil.Process(job.pid)]:
                process.send_signal(number)
            job.join(40)
            assert job.exitcode is not None
            wait_for(lambda: not any(map(psutil.Process.is_running, ranks)), 10)  # noqa: B023
        assert saved_update(tmp_path / "run") == rows(tmp_path / "run")[-1]["update"]
        last = len(rows(tmp_path / "run"))


def test_signal_during_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: Callable[..., RunResult]
) -> None:
    """The state before the evaluation is saved at once, with the weights themselves, not their average."""
    calls: list[int] = []

    def interrupted(*args) -> dict:
        calls.append(1)
        if len(calls) == 2:  # of the averaged weights
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    real = Classify.evaluate
    monkeypatch.setattr(Classify, "evaluate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "a", ema=0.9)
    monkeypatch.undo()
    assert saved_update(tmp_path / "a") == 5
    assert_same_bits(reference(ema=0.9).folder, run(tmp_path / "a", ema=0.9).folder)


@pytest.mark.parametrize(("processes", "waited", "interrupts"), [(1, 0, False), (1, 2, True), (2, 2, False)])
def test_second_ctrl_c(monkeypatch: pytest.MonkeyPatch, processes: int, waited: float, interrupts: bool) -> None:
    """In a single process it interrupts at once, unless it is the same key press, sent twice."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with Interrupts(processes) as handler:
        signal.raise_signal(signal.SIGINT)
        assert handler.received
        now[0] = waited
        if interrupts:
            with pytest.raises(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        else:
            signal.raise_signal(signal.SIGINT)
