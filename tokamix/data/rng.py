"""Random numbers that depend on seed, epoch and position alone, not on what ran before."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def key(*parts: int | str) -> int:
    """Hash such as (seed, epoch, step) to a seed: the same on every machine, different for different parts."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest(), "big")


def generator(*parts: int | str) -> torch.Generator:
    """Create a generator seeded with `key`; it draws on the CPU, so that numbers do not depend on the device."""
    return torch.Generator().manual_seed(key(*parts))


def seed_everything(*parts: int | str) -> None:
    """Seed Python, NumPy and torch's CPU generator with `key`; timm's and torchvision's transforms use all three."""
    value = key(*parts)
    random.seed(value)
    np.random.seed(value)
    torch.default_generator.manual_seed(value)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Restore the three generators at the end, so that loading data does not change the training loop's dropout."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
