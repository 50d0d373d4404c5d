"""Atomic writers; a full, failing or read-only disk stops a run, which keeps its last good state."""

import errno
import os
import resource
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.processes import finish
from tests.train.tiny import assert_same_bits, run
from tokamix import files
from tokamix.files import WriteError, write_atomically, write_tensors, write_text


def test_writes_are_atomic(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "first")

    def write_half(temporary: Path) -> None:
        temporary.write_text("sec")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(WriteError, match=r"file.txt: No space left on device; the previous file is kept"):
        write_atomically(path, write_half)
    assert path.read_text() == "first"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match=r"cannot write .*file/out.csv: .*file is a file, not a folder$"):
        write_text(tmp_path / "file" / "out.csv", "text")


def test_weights_have_the_permissions_of_their_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write_tensors(tmp_path / "w.safetensors", {"w": torch.ones(2)})
    assert (tmp_path / "w.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.usefixtures("no_drawings")
def test_a_failing_disk_keeps_the_last_good_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever write fails (weights, training state or the rename), the run resumes to the same bits."""
    whole = run(tmp_path / "whole", save_every=2)
    numbers = (errno.ENOSPC, errno.EROFS, errno.EIO) * 2
    for failing, number in zip(range(3, 9), numbers, strict=True):
        folder = tmp_path / f"broken {failing}"
        count = 0
        real = files._fsync

        def fsync(path: Path, failing: int = failing, number: int = number, real=real) -> None:
            nonlocal count
            count += path.name.endswith(".safetensors.part")
            if count >= failing:
                raise OSError(number, os.strerror(number))
            real(path)

        with monkeypatch.context() as patch:
            patch.setattr(files, "_fsync", fsync)
            with pytest.raises(WriteError, match=os.strerror(number)):
                run(folder, save_every=2)
        assert not list(folder.rglob("*.part"))
        load_file(folder / "state" / "state.safetensors")  # readable
        assert run(folder, save_every=2).best == whole.best
        assert_same_bits(tmp_path / "whole", folder)


def train_with_a_limit(folder: Path, size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    run(folder, epochs=4, save_every=5, resume=False)


@pytest.mark.xdist_group("processes")
@pytest.mark.usefixtures("no_drawings")
def test_a_full_disk(tmp_path: Path) -> None:
    """A real failed write: a limit on the file size acts as a full disk."""
    folder = tmp_path / "a"
    run(folder, epochs=2, save_every=5)
    size = (folder / "state" / "state.safetensors").stat().st_size
    before = (folder / "last.safetensors").read_bytes()
    code, output = finish(tmp_path / "log", train_with_a_limit, folder, size // 2)
    assert code == 1
    assert "WriteError: cannot write" in output
    assert "File too large" in output
    assert not list(folder.rglob("*.part"))
    assert len((folder / "last.safetensors").read_bytes()) == len(before)


def train_without_rights(folder: Path) -> None:
    if os.getuid() == 0:
        os.setuid(65534)
    run(folder)


@pytest.mark.xdist_group("processes")
def test_a_read_only_folder(tmp_path: Path) -> None:
    """In a process of another user if this one is root, because root may write everywhere."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        code, output = finish(tmp_path / "log", train_without_rights, Path(folder) / "run")
        assert not os.listdir(folder)
    assert code == 1
    assert "WriteError: cannot write" in output
    assert "Permission denied" in output
