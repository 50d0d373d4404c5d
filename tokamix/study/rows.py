"""The rows of a study: one per finished run, in results/studies/NAME.csv."""

import base64
import contextlib
import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = ["arm", "seed", "phase", "lr_factor", "data", "holdout", "train_images", "epochs", "model", "parameters"]
COLUMNS += ["status", "score", "metrics", "seconds", "train_seconds", "images_per_second", "processes", "mps"]
COLUMNS += ["settings_hash", "commit", "gpu", "torch", "settings", "curve"]
SPEED_COLUMNS = ["arm", "mode", "size", "batch", "images_per_second", "peak_gb", "status", "commit", "gpu", "torch"]
CORRECT_COLUMNS = ["arm", "seed", "settings_hash", "correct"]  # see pack_bits
Row = dict[str, Any]
Key = tuple[int, str]  # seed, and hash of settings and data


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file; none if it does not exist. Half a line at its end is none."""
    csv.field_size_limit(10**8)
    return list(csv.DictReader(io.StringIO(_complete_lines(path).decode(), newline="")))


def write_row(path: Path, row: Row, columns: list[str] = COLUMNS) -> None:
    """Append a row; a new file starts with the header. Half a line of a process that was killed is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    complete = len(_complete_lines(path))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, extrasaction="ignore", restval="")
    if not complete:
        writer.writeheader()
    writer.writerow(row)
    with path.open("ab") as file:
        file.truncate(complete)
        file.write(text.getvalue().encode())


def _complete_lines(path: Path) -> bytes:
    """The file up to its last line break: a process killed while it writes leaves half a line after it."""
    content = b""
    with contextlib.suppress(FileNotFoundError):
        content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def read_all_rows(output: Path, study: str) -> list[Row]:
    """The rows of a study, and those of all others in the folder: arms with the same settings share their runs."""
    others = sorted(p for p in output.glob("*.csv") if p.stem != study and not p.stem.endswith(("_speed", "_correct")))
    return [row for path in (output / f"{study}.csv", *others) for row in read_rows(path)]


def pack_bits(flags: Iterable[bool]) -> str:
    """One bit for each image, such as whether it is classified correctly, as text for a CSV file (base64)."""
    return base64.b64encode(np.packbits(np.fromiter(flags, bool)).tobytes()).decode()


def unpack_bits(text: str, count: int) -> np.ndarray:
    """The flags of `pack_bits`, for so many images."""
    return np.unpackbits(np.frombuffer(base64.b64decode(text), np.uint8), count=count).astype(bool)


def key_of(row: Row) -> Key:
    """What identifies a run: a finished one is never repeated, under whatever name."""
    return int(row["seed"]), row["settings_hash"]


def score_of(row: Row, metric: str) -> float:
    """A metric of a run's last weights; "score" is the one of its task: top-1, mean IoU or average precision."""
    if metric == "score":
        return float(row["score"])
    metrics = json.loads(row["metrics"])
    if metric not in metrics:
        raise ValueError(f"the run {row['arm']} {row['seed']} has no metric {metric!r}, only {', '.join(metrics)}")
    return float(metrics[metric])


def gpu_minutes(rows: Iterable[Row]) -> float:
    """Minutes of the GPU: runs that shared it count by their share. A resumed run's earlier training counts too."""
    total = 0.0
    for row in rows:
        seconds = max(float(row["seconds"] or 0), float(row["train_seconds"] or 0))
        total += seconds / max(1, int(row["processes"] or 1)) / 60
    return total
