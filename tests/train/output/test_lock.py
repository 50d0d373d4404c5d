"""Two jobs never write into the same folder."""

import json
import os
import threading
from pathlib import Path

import pytest

from tests.processes import finish
from tests.train.tiny import run
from tokamix.files import write_text
from tokamix.train.loop.engine import Engine
from tokamix.train.output.lock import LOCK, LockedError, lock_folder


def test_second_run_in_the_same_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second one is refused and the first one finishes; without --output the second one has its own folder."""
    monkeypatch.chdir(tmp_path)
    others: list[Path] = []
    real = Engine._train_epoch

    def train_epoch(self: Engine) -> None:
        if self.epoch == 1 and not others:
            with pytest.raises(LockedError, match=rf"is used by process {os.getpid()} on .*; wait until it ends, or"):
                run(self.folder.path)
            others.append(self.folder.path)
            others.append(run(None).folder)
        real(self)

    monkeypatch.setattr(Engine, "_train_epoch", train_epoch)
    assert run(None).folder == Path("runs/train")
    assert others == [Path("runs/train"), Path("runs/train-2")]
    assert not list(tmp_path.rglob(LOCK))


def exit_with_lock(folder: Path) -> None:
    with lock_folder(folder):
        os._exit(0)


@pytest.mark.xdist_group("processes")
def test_locks_of_other_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a dead process is taken over, on another host only by the next attempt of the same job."""
    finish(tmp_path / "log", exit_with_lock, tmp_path)
    lock = tmp_path / LOCK
    dead = json.loads(lock.read_text())
    with lock_folder(tmp_path):
        own = json.loads(lock.read_text())
        assert own["pid"] == os.getpid()
    reused = {**own, "started": own["started"] - 100}  # the same number, but another process
    for stale in (json.dumps(dead), json.dumps(reused), '{"pid": 12'):
        lock.write_text(stale)
        with lock_folder(tmp_path):
            pass
    lock.write_text(json.dumps({**dead, "host": "node7", "jobs": {"SLURM_JOB_ID": ["11", "0"]}}))
    with (
        pytest.raises(LockedError, match=rf"on node7 since {dead['time'][:10]}.*; if .* ended, delete {lock}"),
        lock_folder(tmp_path),
    ):
        pass
    monkeypatch.setenv("SLURM_JOB_ID", "11")
    with pytest.raises(LockedError), lock_folder(tmp_path):
        pass
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    with lock_folder(tmp_path):
        pass


def test_output_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("")
    with pytest.raises(ValueError, match=r"a is a file, not a folder; use another --output"):
        run(tmp_path / "a")
    with pytest.raises(OSError, match=r"cannot write .*Not a directory; use another --output"):
        run(tmp_path / "a" / "b")


def test_two_processes_write_the_same_file(tmp_path: Path) -> None:
    """Each has its own temporary file."""
    texts = ["a" * 100_000, "b" * 100_000]
    threads = [
        threading.Thread(target=lambda text=text: [write_text(tmp_path / "file", text) for _ in range(30)])
        for text in texts
    ]
    errors: list[object] = []
    hook, threading.excepthook = threading.excepthook, errors.append
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threading.excepthook = hook
    assert not errors
    assert (tmp_path / "file").read_text() in texts
    assert len(list(tmp_path.iterdir())) == 1
