"""Signals stop a run between two steps, not within one, and in all processes at the same step."""

import signal
import threading
import time
from collections.abc import Iterator
from types import FrameType, TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

NAMES = ("SIGINT", "SIGTERM", "SIGUSR1")  # Slurm sends SIGUSR1 before a time limit; Windows has none
SIGNALS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))
SECOND_CTRL_C = 1.0  # seconds after the first one; `timeout` and torchrun send the same signal twice at once


class Interrupts:
    """Sets `received` on Ctrl-C, SIGTERM or SIGUSR1. In a single process a second Ctrl-C interrupts at once.

    Args:
        processes: number of processes of the run. In one of several, nothing interrupts at once: the others would wait
            for it.
    """

    def __init__(self, processes: int) -> None:
        self.active = threading.current_thread() is threading.main_thread()
        self.alone = processes == 1
        self.received, self.first = False, 0.0

    def __enter__(self) -> Self:
        if self.active:
            self.before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.active:
            for number, handler in self.before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        again = self.received and number == signal.SIGINT and time.monotonic() - self.first > SECOND_CTRL_C
        if not self.received:
            self.received, self.first = True, time.monotonic()
        if again and self.alone:
            raise KeyboardInterrupt


class StoppableLoader:
    """A loader whose batches end with KeyboardInterrupt after a signal to a single process, for evaluations."""

    def __init__(self, loader: Any, interrupts: Interrupts) -> None:
        self.loader, self.interrupts = loader, interrupts

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def __len__(self) -> int:
        return len(self.loader)

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        """Batches of an epoch, from step `start` on."""
        for batch in self.loader.epoch(number, start):
            if self.interrupts.received and self.interrupts.alone:
                raise KeyboardInterrupt
            yield batch


class Agreement:
    """Two flags, "stop" and "save", that any process may set and that all of them read at the same step.

    With several processes the flags are exchanged in the background over a CPU group of their own and read one step
    later, so that no step waits for the device.

    Args:
        processes: number of processes.
    """

    def __init__(self, processes: int) -> None:
        self.group: Any = dist.new_group(backend="gloo") if processes > 1 else None
        self.flags = torch.zeros(2, dtype=torch.int32)
        self.pending: dist.Work | None = None

    def exchange(self, stop: bool, save: bool) -> tuple[bool, bool]:
        """Set the flags of this process; returns the agreed flags of the previous call, or these in one process."""
        if self.group is None:
            return stop, save
        before = self._wait()
        self.flags = torch.tensor([stop and not before[0], save and not before[1]], dtype=torch.int32)
        self.pending = dist.all_reduce(self.flags, dist.ReduceOp.MAX, group=self.group, async_op=True)
        return before

    def settle(self, stop: bool = False, save: bool = False) -> tuple[bool, bool]:
        """Set the flags and wait for those of all processes, including the ones of the previous call."""
        before, now = self.exchange(stop, save), (stop, save)
        if self.group is not None:
            now = self._wait()
        return before[0] or now[0], before[1] or now[1]

    def _wait(self) -> tuple[bool, bool]:
        if self.pending is None:
            return False, False
        self.pending.wait()
        self.pending = None
        stop, save = self.flags.tolist()
        return bool(stop), bool(save)
