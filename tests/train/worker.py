"""Trains the tiny model; torchrun starts it. `python -m tests.train.worker '{"runs": [{...}], ...}'`

"runs" holds the settings of one run after the other, "kill" a step before which process 1 kills itself the first time.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

from tests.train.tiny import run
from tokamix.train.loop.engine import Engine


def kill_before(update: int) -> None:
    real = Engine._train_step

    def step(self: Engine, batches) -> None:
        if self.update == update and os.environ["RANK"] == "1" and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        real(self, batches)

    Engine._train_step = step


if __name__ == "__main__":
    torch.set_num_threads(1)
    told = json.loads(sys.argv[1])
    if "kill" in told:
        kill_before(told["kill"])
    for settings in told["runs"]:
        run(Path(settings.pop("output")), **settings)
