"""Files are whole or not there; a disk that is full or closed stops a run with its last good state kept."""

import errno
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.train.tiny import assert_same_bits, run
from tokamix import files
from tokamix.files import WriteError, write_atomically, write_tensors, write_text

ROOT = Path(__file__).parents[1]


def test_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "first")

    def half(beside: Path) -> None:
        beside.write_text("sec")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(WriteError, match=r"file.txt: No space left on device; the previous file is kept"):
        write_atomically(path, half)
    assert path.read_text() == "first"
    assert [p.name for p in path.parent.iterdir()] == ["file.txt"]


def test_weights_are_as_open_as_their_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    write_tensors(tmp_path / "w.safetensors", {"w": torch.ones(2)})
    assert (tmp_path / "w.safetensors").stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_keeps_the_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whichever write fails: weights, state or the move into place."""
    whole = run(tmp_path / "whole", save_every=2)
    for failing in range(3, 9):
        folder = tmp_path / f"broken {failing}"
        count = 0
        real = files._fsync

        def fsync(path: Path, failing: int = failing, real=real) -> None:
            nonlocal count
            count += path.name.endswith(".safetensors.part")
            if count >= failing:
                raise OSError(number, os.strerror(number))
            real(path)

        monkeypatch.setattr(files, "_fsync", fsync)
        with pytest.raises(WriteError, match=os.strerror(number)):
            run(folder, save_every=2)
        monkeypatch.undo()
        assert not list(folder.rglob("*.part"))
        load_file(folder / "state" / "state.safetensors")  # readable
        assert run(folder, save_every=2).best == whole.best
        assert_same_bits(tmp_path / "whole", folder)


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """The kernel refuses the write: a limit on the size of files stands in for the end of the disk."""
    code = (
        "import resource, sys; from pathlib import Path; from tests.train.tiny import run\n"
        "out = Path(sys.argv[1]); run(out, epochs=2, save_every=5)\n"
        "size = (out / 'state' / 'state.safetensors').stat().st_size\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (size // 2, size // 2))\n"
        "before = (out / 'last.safetensors').read_bytes()\n"
        "try: run(out, epochs=4, save_every=5, resume=False)\n"
        "except OSError as error: print(type(error).__name__, error)\n"
        "print([p.name for p in out.rglob('*.part')], len((out / 'last.safetensors').read_bytes()) == len(before))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "a")], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    said, left = done.stdout.splitlines()[-2:]
    assert said.startswith("WriteError cannot write")
    assert "File too large" in said
    assert left == "[] True"


def test_a_folder_that_may_not_be_written() -> None:
    """In a process of another user where this one is root, whom no permission stops."""
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        end, start = os.pipe()
        child = os.fork()
        if child == 0:
            if os.getuid() == 0:
                os.setuid(65534)
            said = b"nothing"
            try:
                run(Path(folder) / "run")
            except OSError as error:
                said = f"{type(error).__name__} {error}".encode()
            finally:
                os.write(start, said)
                os._exit(0)
        os.waitpid(child, 0)
        said = os.read(end, 10_000).decode()
        assert not os.listdir(folder)
    assert said.startswith("WriteError cannot write")
    assert "Permission denied" in said
