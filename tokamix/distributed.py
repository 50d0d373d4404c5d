"""torch.distributed for processes that torchrun or `accelerate launch` started."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def init_process_group(backend: str) -> None:
    """Initialise the process group; do nothing in a single process or where it is initialised already.

    The store is prefixed per restart: torchrun keeps one store over elastic restarts, with the addresses of processes
    that have died.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    _stop_with_torchrun()
    store, rank, world_size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)


def _stop_with_torchrun() -> None:
    """Get SIGTERM when torchrun is gone, even after kill -9, so that no rank trains and writes on its own (Linux)."""
    if "TORCHELASTIC_RUN_ID" in os.environ and sys.platform == "linux":
        set_parent_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGTERM)


def rank_and_world_size() -> tuple[int, int]:
    """Rank of this process and number of processes; (0, 1) without a process group."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


@contextmanager
def process_group(device: str | None) -> Iterator[int]:
    """Initialise the process group for a device and destroy it at the end; gives the rank.

    Args:
        device: "cpu" or "cuda"; None: a GPU if there is one.
    """
    init_process_group("nccl" if device != "cpu" and torch.cuda.is_available() else "gloo")
    yield rank_and_world_size()[0]
    if dist.is_initialized():
        dist.destroy_process_group()
