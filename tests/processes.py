"""Processes of tests, forked from one that has done the imports: these take seconds in a new interpreter."""

import multiprocessing
import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
TWO_PROCESSES = ("--standalone", "--nproc-per-node", "2")
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.train.worker", "torch.distributed.run"])


def _run(function: Callable[..., Any], args: tuple, log: Path, environment: dict[str, str]) -> None:
    """Call the function as a new process would: with this environment, and standard output and errors in a file."""
    import torch

    torch.set_num_threads(1)
    os.setsid()
    os.environ.clear()  # the environment is that of the moment when the first process was started
    os.environ.update(environment)
    with log.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    function(*args)


@contextmanager
def started(log: Path, function: Callable[..., Any], *args: Any, **environment: str) -> Iterator[ForkServerProcess]:
    """Call a function in a process and a session of its own; whatever is left of the session is killed.

    Args:
        log: file of its output and errors.
        function: a function of a module; `args` are its arguments.
        environment: variables that it has besides those of this process.
    """
    process = CONTEXT.Process(target=_run, args=(function, args, log, {**os.environ, **environment}))
    process.start()
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # it may have no session yet
        process.join()


def torchrun(arguments: list[str]) -> None:
    """What the command `torchrun` does, except that the ranks are forked; the script is a path, not a module."""
    from torch.distributed.run import main

    main(["--run-path", "--start-method", "fork", *arguments])


def finish(log: Path, function: Callable[..., Any], *args: Any, seconds: float = 200) -> tuple[int | None, str]:
    """Call a function in a process of its own until it ends; gives its exit code and its output."""
    with started(log, function, *args) as process:
        process.join(seconds)
        code = process.exitcode
    return code, log.read_text()


def run_script(path: Path, folder: Path, *arguments: str) -> None:
    """Run a Python file in a folder, as `python FILE ARGUMENTS` does there."""
    os.chdir(folder)
    sys.argv = [str(path), *arguments]
    runpy.run_path(str(path), run_name="__main__")
