"""Stopping when asked to, between two steps and not within one."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Notes Ctrl-C and SIGTERM in `asked` instead of breaking off; the second one breaks off."""

    def __init__(self, active: bool) -> None:
        self.active = active and threading.current_thread() is threading.main_thread()
        self.asked = False

    def __enter__(self) -> Self:
        if self.active:
            self.before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.active:
            for number, handler in self.before.items():
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
