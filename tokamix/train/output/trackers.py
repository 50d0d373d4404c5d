"""Metrics for TensorBoard, and for Weights & Biases if requested.

Not Accelerate's trackers: those flush to the disk at every call.
"""

import contextlib
import hashlib
from pathlib import Path
from typing import Any


class Trackers:
    """Sends the metrics of a run to TensorBoard and Weights & Biases."""

    def __init__(self, folder: Path, update: int, settings: dict[str, Any], wandb: str | None) -> None:
        self.board: Any = None
        self.wandb: Any = None
        with contextlib.suppress(ImportError):  # an extra; metrics.jsonl has the same numbers
            from torch.utils.tensorboard import SummaryWriter

            self.board = SummaryWriter(str(folder / "tensorboard"), purge_step=update + 1 if update else None)
        if wandb is not None:
            try:
                import wandb as client
            except ImportError:
                raise ValueError("Weights & Biases is not installed: pip install wandb, or leave --wandb out") from None
            name = str(folder.resolve())
            run_id = hashlib.sha256(name.encode()).hexdigest()[:12]  # the same folder resumes the same run
            self.wandb = client.init(project=wandb, name=folder.name, id=run_id, resume="allow", config=settings)

    def add(self, row: dict[str, Any]) -> None:
        """Send one row of metrics."""
        prefix = row["event"]
        skipped = ("event", "update", "step")
        numbers = {f"{prefix}/{k}": v for k, v in row.items() if isinstance(v, (int, float)) and k not in skipped}
        if self.board is not None:
            for key, value in numbers.items():
                self.board.add_scalar(key, value, row["update"])
        if self.wandb is not None:
            self.wandb.log({**numbers, "update": row["update"]})

    def flush(self) -> None:
        """Write the metrics so far to the disk."""
        if self.board is not None:
            self.board.flush()

    def close(self) -> None:
        """Finish all trackers."""
        if self.board is not None:
            self.board.close()
        if self.wandb is not None:
            self.wandb.finish()
