"""Atomic file writers: a killed process or a full disk never leaves a partial file."""

import contextlib
import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor


class WriteError(OSError):
    """A file could not be written; its previous version, if any, is unchanged."""


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` with a temporary path in the same folder, flush the file to disk and rename it to `path`."""
    temporary = path.with_name(f".{uuid.uuid4().hex[:8]}.{path.name}.part")  # two processes may write the same file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(temporary)
        _fsync(temporary)
        os.replace(temporary, path)
        _fsync(path.parent)
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):  # a read-only folder, or a file in place of the folder
            temporary.unlink()
        kept = "; the previous file is kept" if path.exists() else ""
        reason = f"{path.parent} is a file, not a folder" if path.parent.is_file() else _reason(error)
        raise WriteError(f"cannot write {path}: {reason}{kept}") from error


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically."""
    write_atomically(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Write a JSON file atomically."""
    write_text(path, json.dumps(value, indent=indent))


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file atomically."""
    metadata = {"format": "pt", **(metadata or {})}  # timm and the Hub look for this entry

    def write(temporary: Path) -> None:
        save_file(dict(tensors), temporary, metadata=metadata)
        temporary.chmod(path.parent.stat().st_mode & 0o666)  # safetensors makes it readable by its owner only

    write_atomically(path, write)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
