"""A training run as a child process: `python -m tokamix.train.child train ...`.

It is `tokamix train`, but stops, with its state saved, when its parent ends, however that happens: the parent holds the
other end of its standard input.
"""

import os
import runpy
import signal
import threading


def stop_with_parent() -> None:
    """Send SIGTERM to this process when its standard input ends."""

    def wait() -> None:
        # not sys.stdin: data workers are forked and close it, and would wait for this thread's lock on it for ever
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    stop_with_parent()
    runpy.run_module("tokamix", run_name="__main__")
