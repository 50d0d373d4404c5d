"""int8."""

from typing import Any


def write_int8(*args: Any) -> None:
    """Write int8."""
    raise ValueError("int8 is not implemented")
