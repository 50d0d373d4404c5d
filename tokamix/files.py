"""Writing files that are whole or not there: a killed process or a full disk never leaves half of one."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


class WriteError(OSError):
    """A file could not be written; what stood there before still does."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a file beside `path`, bring it to the disk, then put it in its place in one move."""
    beside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(beside)
        _to_disk(beside)
        os.replace(beside, path)
        _to_disk(path.parent)
    except (OSError, SafetensorError) as error:
        beside.unlink(missing_ok=True) if os.access(path.parent, os.W_OK) else None
        kept = "; the file of before is kept" if path.exists() else ""
        raise WriteError(f"cannot write {path}: {_reason(error)}{kept}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file, whole or not at all."""
    write_atomically(path, lambda beside: beside.write_text(text, encoding="utf-8"))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, whole or not at all."""
    metadata = {"format": "pt", **(metadata or {})}  # what timm and the Hub look for

    def write(beside: Path) -> None:
        save_file(dict(tensors), beside, metadata=metadata)
        beside.chmod(path.parent.stat().st_mode & 0o666)  # safetensors leaves it to its owner alone

    write_atomically(path, write)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
