"""A CSV file of measurements that grows by one row at a time, so that a stopped run can be resumed."""

import csv
import time
from pathlib import Path
from typing import Any

import torch


class RowFile:
    """Rows with a label each, and the date, processor and version of PyTorch of each measurement.

    Args:
        path: the CSV file. It is created with the first row.
        keep: keep the rows that are there, if they have labels; otherwise the first row starts a new file.
    """

    def __init__(self, path: Path, keep: bool = False) -> None:
        self.path = path
        self.columns: list[str] = []
        self.labels: set[str] = set()
        if keep and path.is_file():
            with path.open(newline="") as file:
                reader = csv.DictReader(file)
                if "label" in (reader.fieldnames or ()):
                    self.columns = list(reader.fieldnames or ())
                    self.labels = {row["label"] for row in reader}

    def append(self, label: str, row: dict[str, Any], device: str) -> None:
        """Write one measurement."""
        processor = torch.cuda.get_device_name() if device == "cuda" else "CPU"
        shown = {key: f"{value:.4g}" if isinstance(value, float) else value for key, value in row.items()}
        whole = {"label": label, **shown, "date": time.strftime("%Y-%m-%d"), "processor": processor}
        whole["torch"] = torch.__version__
        if self.columns and self.columns != list(whole):
            raise ValueError(f"{self.path} has other columns than this measurement; move it away to start a new file")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a" if self.columns else "w", newline="") as file:
            writer = csv.DictWriter(file, list(whole))
            if not self.columns:
                writer.writeheader()
            writer.writerow(whole)
        self.columns, self.labels = list(whole), self.labels | {label}
