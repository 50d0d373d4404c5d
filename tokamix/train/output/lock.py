"""The lock of a run's folder: two jobs never write into the same one."""

import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tokamix.files import WriteError

LOCK = ".lock"
# variables that name a job, and its attempts: a restarted job may run on another machine
JOBS = (("SLURM_JOB_ID", "SLURM_RESTART_COUNT"), ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT"))


class LockedError(ValueError):
    """Another job uses the folder."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Create the folder and hold its lock; a new folder that stays empty is removed again.

    The lock is a file with process, host, job and time. That of a process that has died is taken over; on another
    host, where this cannot be seen, only by the next attempt of the same Slurm or torchrun job.
    """
    is_new = not folder.exists()
    if not is_new and not folder.is_dir():
        raise ValueError(f"{folder} is a file, not a folder; use another --output")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _exclusive(folder):
            _remove_stale_lock(folder)
            _create(folder)
    except FileExistsError:  # created by another host at this moment
        raise LockedError(f"another job uses {folder}; use another --output") from None
    except OSError as error:
        raise WriteError(f"cannot write {folder / LOCK}: {error.strerror}; use another --output") from error
    try:
        for leftover in folder.rglob(".*.part"):  # of a process that was killed
            leftover.unlink(missing_ok=True)
        yield
    finally:
        (folder / LOCK).unlink(missing_ok=True)
        if is_new:
            with suppress(OSError):
                folder.rmdir()


def is_locked(folder: Path) -> bool:
    """Whether another job uses the folder."""
    owner = _read(folder)
    return owner is not None and _is_in_use(owner)


def _create(folder: Path) -> None:
    jobs = {name: (os.environ[name], os.environ.get(attempt, "0")) for name, attempt in JOBS if name in os.environ}
    owner = {"pid": os.getpid(), "started": psutil.Process().create_time(), "host": socket.gethostname(), "jobs": jobs}
    owner["time"] = time.strftime("%Y-%m-%d %H:%M:%S %z")
    with (folder / LOCK).open("x") as file:
        json.dump(owner, file)


def _remove_stale_lock(folder: Path) -> None:
    owner = _read(folder)
    if owner is None:
        return
    if _is_in_use(owner):
        text = f"{folder} is used by process {owner.get('pid')} on {owner.get('host')} since {owner.get('time')}"
        if owner.get("host") == socket.gethostname():
            raise LockedError(f"{text}; wait until it ends, or use another --output")
        raise LockedError(f"{text}; if that job has ended, delete {folder / LOCK}, or use another --output")
    (folder / LOCK).unlink(missing_ok=True)


def _read(folder: Path) -> dict[str, Any] | None:
    """The owner of the lock, {} if a kill has cut the file off, None without a lock."""
    try:
        owner = json.loads((folder / LOCK).read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _is_in_use(owner: dict[str, Any]) -> bool:
    if not owner:
        return False
    if owner.get("host") == socket.gethostname():
        try:  # the number of a dead process may be in use again
            return abs(psutil.Process(owner["pid"]).create_time() - owner["started"]) < 1
        except (psutil.Error, KeyError, TypeError):
            return False
    for name, attempt in JOBS:
        job = owner.get("jobs", {}).get(name)
        if job and job[0] == os.environ.get(name, "none") != "none" and job[1] != os.environ.get(attempt, "0"):
            return False
    return True


@contextmanager
def _exclusive(folder: Path) -> Iterator[None]:
    """Only one process of this host at a time looks at the lock, so that two cannot take over the same one."""
    descriptor = None
    with suppress(ImportError, OSError):  # not on Windows and some network disks
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        if descriptor is not None:
            os.close(descriptor)
