"""How the CPU threads of PyTorch wait for each other."""

import os
from collections.abc import MutableMapping

SPINS = "1000"  # some microseconds


def limit_spinning(environment: MutableMapping[str, str] | None = None) -> None:
    """Let waiting threads spin for a moment and then sleep, unless the user has set how; before torch is imported.

    By default they spin for milliseconds. Where other programs use the cores too, such a thread takes the core from the
    one that it waits for: a training step on two busy cores took more than 20 times as long (docs/guides/train.md).
    Threads that sleep at once wake too late on idle cores, where a step takes 1.3 times as long.
    """
    environment = os.environ if environment is None else environment
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", SPINS)


def is_spinning_limited() -> bool:
    """Whether waiting threads leave their cores to others soon."""
    return "GOMP_SPINCOUNT" in os.environ or os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"
