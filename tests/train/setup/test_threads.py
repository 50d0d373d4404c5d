"""The number of CPU threads."""

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.train.tiny import run, tiny_data
from tokamix.train.loop.state import read_header
from tokamix.train.setup.threads import choose_threads, default_workers, is_set_by_user


@pytest.mark.parametrize(
    ("macs", "cores", "workers", "threads"),
    [(4e6, 64, 0, 1), (6e8, 64, 0, 2), (1e12, 8, 0, 8), (1e12, 8, 5, 3), (1e12, 2, 8, 1), (float("inf"), 4, 1, 3)],
)
def test_threads_follow_the_work(
    monkeypatch: pytest.MonkeyPatch, macs: float, cores: int, workers: int, threads: int
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert choose_threads(macs, cores, workers) == threads


@pytest.mark.parametrize("variable", [{"GOMP_SPINCOUNT": "1000"}, {"OMP_WAIT_POLICY": "passive"}])
def test_threads_that_wait_briefly_share_cores_with_workers(
    monkeypatch: pytest.MonkeyPatch, variable: dict[str, str]
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert choose_threads(1e12, 2, 1) == 1
    monkeypatch.setenv(*next(iter(variable.items())))
    assert choose_threads(1e12, 2, 1) == 2


@pytest.mark.parametrize(("device", "gpu", "workers"), [("cpu", True, 4), (None, False, 4), (None, True, 8)])
def test_default_workers(monkeypatch: pytest.MonkeyPatch, device: str | None, gpu: bool, workers: int) -> None:
    """They leave most cores to the training where the CPU trains."""
    monkeypatch.setattr(sys.modules[default_workers.__module__], "usable_cores", lambda: 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    assert default_workers(device) == workers


def test_a_choice_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("MKL_NUM_THREADS", raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: os.cpu_count())
    assert not is_set_by_user()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1000)
    assert is_set_by_user()
    monkeypatch.setattr(torch, "get_num_threads", lambda: os.cpu_count())
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert is_set_by_user()


def test_a_resumed_run_keeps_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tiny model has one thread; a run that began with two resumes with two."""
    module = sys.modules["tokamix.train.run"]
    monkeypatch.setattr(module, "is_set_by_user", lambda: False)
    monkeypatch.setattr(module, "usable_cores", lambda: 2)
    before = torch.get_num_threads()
    run(tmp_path / "a", tiny_data(), epochs=2, quiet=False)
    assert "CPU threads: 1 of 2 cores; OMP_NUM_THREADS changes it" in capsys.readouterr().out
    with monkeypatch.context() as patch:
        patch.setattr(module, "choose_threads", lambda *_: 2)
        run(tmp_path / "b", tiny_data(), epochs=2)
    run(tmp_path / "b", tiny_data(), epochs=2, quiet=False)
    assert "CPU threads: 2 of 2 cores" in capsys.readouterr().out
    assert read_header(tmp_path / "b" / "state" / "state.safetensors")["threads"] == 2
    assert torch.get_num_threads() == before
