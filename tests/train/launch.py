"""Launches training jobs of two processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DISTRIBUTED: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"fsdp": True}}  # of the tiny classifier
MASKS = {"method": "mask_rcnn", "method_kwargs": {"width": 16, "rois_per_image": 32}}
SMALL_STVIT = {"dims": [16] * 4, "depths": [1] * 4, "num_heads": [2] * 4, "stoken_sizes": [4, 2, 1, 1]}
SHORT = {"iterations": 2, "eval_every": 2}
DENSE_RUNS: dict[str, dict[str, Any]] = {
    "segment": {"task": "segment", **SHORT},
    # the norm of its finest level gets no gradient
    "normed": {"task": "detect", **SHORT, "backbone": "stvit_small", "model_kwargs": SMALL_STVIT},
    "detect": {"task": "detect", **SHORT},
    "masks": {"task": "detect", **SHORT, **MASKS},
    "cascade": {"task": "detect", "iterations": 1, "eval_every": 1, **MASKS, "method": "cascade_mask_rcnn"},
}
CONVERSION: dict[str, Any] = {"epochs": 4, "device": "cpu", "quiet": True, "sizes": (8, 16), "calibration_images": 64}
DINO_RUN: dict[str, Any] = {"task": "dino", "save_every": 3, "log_every": 1}


def torchrun_command(job: dict[str, Any], restarts: int = 0) -> list[str]:
    """The command that runs tests.train.worker in two processes."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return [*command, f"--max-restarts={restarts}", "-m", "tests.train.worker", json.dumps(job)]


def torchrun(job: dict[str, Any], restarts: int = 0, timeout: float = 400) -> subprocess.CompletedProcess:
    """Run tests.train.worker in two processes."""
    return subprocess.run(torchrun_command(job, restarts), cwd=ROOT, capture_output=True, text=True, timeout=timeout)
