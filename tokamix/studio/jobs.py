"""Training runs that the page starts: one at a time, each a process of its own."""

import atexit
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import IO

TRAIN = (sys.executable, "-m", "tokamix.train.child", "train")
START = 120.0  # seconds in which a run opens its data and writes its folder
GRACE = 30.0  # seconds in which a stopped run may save its state
LOG_LINES, LOG_BYTES = 8, 4096


class Jobs:
    """Starts and stops `tokamix train`; none of the runs outlives the studio."""

    def __init__(self, command: Sequence[str] = TRAIN) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._log: IO[bytes] | None = None
        self._stopped = False
        atexit.register(self.close)

    def is_running(self) -> bool:
        """Whether a run that was started here is not over."""
        return self._process is not None and self._process.poll() is None

    def start(self, arguments: Sequence[str], begun: Callable[[], bool]) -> None:
        """Start a run with these arguments and wait until `begun()`.

        Raises:
            ValueError: if another run is going on, or if this one ends before; with the last line that it printed.
        """
        with self._lock:
            if self._process is not None and self._stopped:  # its folder is free before its process has ended
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(GRACE)
            if self.is_running():
                raise ValueError("the studio trains one run at a time: stop the other one first")
            self._stopped = False
            self._log = tempfile.TemporaryFile()  # noqa: SIM115, it lives as long as the run
            self._process = subprocess.Popen(
                [*self._command, *arguments],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal is for the studio, which then stops the run
            )
            end = time.monotonic() + START
            while not begun() and time.monotonic() < end:
                if not self.is_running():
                    raise ValueError(f"the run did not start: {self._last_line()}")
                time.sleep(0.05)

    def stop(self) -> None:
        """Ask the run to save its state and end; returns at once."""
        if self._process is None or not self.is_running():
            raise ValueError("no run of this studio is being trained")
        self._stopped = True
        self._process.terminate()

    def log(self) -> str:
        """The last lines that the run printed."""
        if self._log is None:
            return ""
        number = self._log.fileno()
        end = os.fstat(number).st_size
        text = os.pread(number, LOG_BYTES, max(0, end - LOG_BYTES))  # a seek would move the place the run writes to
        return "\n".join(text.decode(errors="replace").splitlines()[-LOG_LINES:])

    def close(self) -> None:
        """Stop the run and wait for it."""
        if self._process is None:
            return
        if self.is_running():
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(GRACE)
        with suppress(ProcessLookupError):  # nothing is left of it
            os.killpg(self._process.pid, signal.SIGKILL)  # its data workers too
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()

    def _last_line(self) -> str:
        lines = [line for line in self.log().splitlines() if line.strip()] or ["it printed nothing"]
        return lines[-1].removeprefix("error: ")
