"""The processes that torchrun starts, and this one's place among them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist


def join(backend: str) -> None:
    """Meet the other processes, if there are any.

    torchrun keeps its meeting place over an elastic restart, and with it the addresses of processes that are dead; each
    attempt has a corner of its own here.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or dist.is_initialized():
        return
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    store, rank, world = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world)


def share() -> dict[str, Any]:
    """Rank and world of this process, as loaders take them; alone where nobody was met."""
    together = dist.is_initialized()
    return {"rank": dist.get_rank() if together else 0, "world_size": dist.get_world_size() if together else 1}


@contextmanager
def together(device: str | None) -> Iterator[int]:
    """Work with the other processes for a while, on this kind of device; gives the rank among them."""
    join("nccl" if device != "cpu" and torch.cuda.is_available() else "gloo")
    yield share()["rank"]
    if dist.is_initialized():
        dist.destroy_process_group()
