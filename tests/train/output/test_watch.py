"""Runs seen from outside: state, position, time left, curves and pictures."""

import json
import shutil
from pathlib import Path

import pytest

from tests.train.tiny import run
from tokamix.train.output.lock import lock_folder
from tokamix.train.output.watch import is_run, read_run


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("watch") / "run", epochs=3, log_every=2, ema=0.9).folder


def test_a_finished_run(finished: Path) -> None:
    status = read_run(finished)
    assert is_run(finished)
    assert (status.state, status.update, status.steps, status.epochs) == ("finished", 15, 5, 3)
    assert status.seconds_left() == 0
    assert status.metric == "top1"
    assert status.best["top1"] == max(point.value for point in status.scores())
    assert [point.epoch for point in status.scores()] == [1, 2, 3, 1, 2, 3]
    kinds = {point.kind for point in status.loss()}
    assert kinds == {"training", "validation", "validation, EMA"}
    assert max(point.epoch for point in status.loss()) == 3
    assert [path.name for path in status.pictures()] == ["mistakes.png", "confusion_matrix.png", "curves.png"]


def test_a_run_that_is_being_trained(finished: Path, tmp_path: Path) -> None:
    """While a process holds the lock; the time left follows from the latest speed."""
    folder = shutil.copytree(finished, tmp_path / "run")
    (folder / "state" / "state.safetensors").unlink()
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if json.loads(line)["update"] <= 8]
    rows = [row | {"images_per_second": 20.0} for row in rows]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"event": "tra')
    with lock_folder(folder):
        status = read_run(folder)
    assert (status.state, status.update, status.steps) == ("running", 8, 5)
    assert status.seconds_left() == pytest.approx(7 * 16 / 20)
    assert read_run(folder).state == "stopped"


def test_before_the_first_epoch(finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished, tmp_path / "run", ignore=shutil.ignore_patterns("state", "metrics*"))
    status = read_run(folder)
    assert (status.update, status.metric, status.seconds_left()) == (0, "", None)
    assert status.loss() == status.scores() == []


def test_a_folder_without_a_run(tmp_path: Path) -> None:
    assert not is_run(tmp_path)
    with pytest.raises(ValueError, match="is not the folder of a tokamix run"):
        read_run(tmp_path)
    (tmp_path / "environment.json").write_text("[]")
    with pytest.raises(ValueError, match="is not the folder of a tokamix run"):
        read_run(tmp_path)
