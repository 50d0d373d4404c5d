"""Training jobs of two processes."""

import json
from typing import Any

from tests.processes import ROOT, TWO_PROCESSES

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


def torchrun_arguments(job: dict[str, Any], *options: str) -> list[str]:
    """Arguments of torchrun that run tests.train.worker, in two processes unless the options say otherwise."""
    return [*(options or TWO_PROCESSES), str(ROOT / "tests" / "train" / "worker.py"), json.dumps(job)]
