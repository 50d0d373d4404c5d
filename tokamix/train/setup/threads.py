"""The number of threads that PyTorch computes with on a CPU."""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import nn

from tokamix._openmp import is_spinning_limited
from tokamix.cost import count_macs

# Threads that wait for each other on busy cores slow small models down: with two threads on two shared cores, a step of
# 4 million MACs took 1232 ms instead of 9, one of 100 million 405 ms instead of 56.
MACS_PER_THREAD = 500_000_000  # of the forward pass of a batch
VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_set_by_user() -> bool:
    """Whether the environment or torch.set_num_threads has chosen a number; torchrun sets OMP_NUM_THREADS too."""
    defaults = {usable_cores(), os.cpu_count(), psutil.cpu_count(logical=False)}
    return any(name in os.environ for name in VARIABLES) or torch.get_num_threads() not in defaults


def choose_threads(macs: float, cores: int, workers: int) -> int:
    """One thread, and another one for each 500 million MACs of a batch, on the cores without a loader worker.

    On all cores where waiting threads leave them to the workers soon, as in the `tokamix` command.

    A function of the run's settings, not a measurement: the number of threads changes the order of sums, and with it
    the last bits of the weights.
    """
    free = cores if is_spinning_limited() else cores - workers
    return max(1, int(min(1 + macs / MACS_PER_THREAD, free)))


def default_workers(device: str | None) -> int:
    """Loader workers of a run: one per core, at most 8; where the CPU also trains, a quarter of the cores."""
    if device == "cpu" or not torch.cuda.is_available():
        return max(1, min(8, usable_cores() // 4))
    return min(8, usable_cores())


@contextmanager
def set_threads(threads: int | None) -> Iterator[None]:
    """Compute with this many threads; None changes nothing."""
    before = torch.get_num_threads()
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def batch_macs(model: nn.Module, image_size: int, batch_size: int) -> float:
    """MACs of the forward pass of a batch; infinite if the model cannot be traced."""
    try:
        return count_macs(model, image_size) * batch_size
    except Exception:  # any module may be trained
        return float("inf")


def macs_per_second() -> float:
    """MACs of a matrix product in fp32 on the CPU, at its fastest: networks do not reach it."""
    side, seconds = 768, float("inf")
    one, two = torch.ones(2, side, side)
    for _ in range(5):
        begun = time.perf_counter()
        one @ two
        seconds = min(seconds, time.perf_counter() - begun)
    return side**3 / seconds
