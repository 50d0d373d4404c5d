"""Randomness that depends on where something stands, never on what ran before it."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def key(*parts: int | str) -> int:
    """A seed for a place, such as (seed, epoch, step): the same on every machine, and unlike that of other places."""
    return int.from_bytes(hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=4).digest(), "big")


def generator(*parts: int | str) -> torch.Generator:
    """A generator on the CPU for a place; what it draws does not depend on the device that the numbers are used on."""
    return torch.Generator().manual_seed(key(*parts))


def seed_everything(*parts: int | str) -> None:
    """Seed Python, NumPy and torch's CPU generator for a place; timm's and torchvision's transforms use all three."""
    value = key(*parts)
    random.seed(value)
    np.random.seed(value)
    torch.default_generator.manual_seed(value)


@contextmanager
def preserve_rng_state() -> Iterator[None]:
    """Give the three generators back as they were: the training loop's own dropout must not notice the data."""
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
