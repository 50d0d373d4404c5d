"""Trains tiny models in a job of torchrun. `torchrun tests/train/worker.py '{"runs": [{...}, ...]}'`

"runs" holds the settings of one run after the other; one with "task" is a segmenter, detector or DINO, one with
"convert" converts the run in that folder to SimA. A run with "kill": [attempt, step] kills process 1 before that step
in that attempt of an elastic job.
"""

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

import torch

import tokamix
from tests.train import tiny, tiny_dense, tiny_dino
from tokamix.train.loop.engine import Engine

train_step = Engine._train_step


def kill_before(attempt: int, update: int) -> None:
    """Kill process 1 before a step."""

    def step(self: Engine, batches) -> None:
        restarts = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
        if self.update == update and os.environ["RANK"] == "1" and restarts == attempt:
            os.kill(os.getpid(), signal.SIGKILL)
        train_step(self, batches)

    Engine._train_step = step


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.platform == "linux":  # no signal at the death of torchrun, as in ranks that are not forked
        ctypes.CDLL(None).prctl(1, 0)
    try:
        for settings in json.loads(sys.argv[1])["runs"]:
            Engine._train_step = train_step
            if "kill" in settings:
                kill_before(*settings.pop("kill"))
            output = Path(settings.pop("output"))
            if "convert" in settings:
                tokamix.convert(settings.pop("convert"), tiny.tiny_data(), "sima", output, **settings)
            elif settings.get("task") == "dino":
                tiny_dino.run(output, **settings)
            elif "task" in settings:
                tiny_dense.run(settings.pop("task"), output, **settings)
            else:
                result = tiny.run(output, **settings)
                assert result.epochs and result.last, "every process gets the whole result"  # noqa: PT018
    except KeyboardInterrupt:  # torch.multiprocessing of torch 2.11 would end a forked rank with 0, and torchrun wait
        sys.exit(128 + signal.SIGINT)
