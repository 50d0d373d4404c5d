"""Run the training command in processes and kill them at random moments, until one finishes.

`python -m tests.train.kill_loop FOLDER`: FOLDER/whole is the uninterrupted run, FOLDER/killed the other one.
"""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

# imports of the command, before the forks: the children reach the training sooner, where the kills should fall
from matplotlib.figure import Figure  # noqa: F401
from torch.utils.tensorboard import SummaryWriter  # noqa: F401

import tokamix.train  # noqa: F401
from tokamix.cli import app
from tokamix.data import create_dataset

COMMAND = "train --data digits --recipe digits --save-every 3 --log-every 2 --quiet --device cpu"
KILLS = 6
SETTINGS = """
    epochs=8 batch_size=256 accumulate=2 warmup_epochs=1 image_size=8 drop_path=0.1 ema=0.9 mixup=0.8
    model_kwargs.dim=16 model_kwargs.depth=2
"""


def start(output: Path) -> int:
    """Fork a process that runs the command."""
    child = os.fork()
    if child == 0:
        arguments = [*COMMAND.split(), *(word for setting in SETTINGS.split() for word in ("--set", setting))]
        code = app([*arguments, "--output", str(output)], standalone_mode=False)
        os._exit(int(code or 0))
    return child


def stamp(file: Path) -> int:
    return file.stat().st_mtime_ns if file.is_file() else 0


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    create_dataset("digits")  # happens once, as the imports do
    draw = random.Random(0)
    begun = time.monotonic()
    child = start(folder / "whole")
    assert os.waitpid(child, 0)[1] == 0
    length = time.monotonic() - begun
    output = folder / "killed"
    state = output / "state" / "state.safetensors"
    kills, resumed, status = 0, 0, None
    while status != 0:
        resumed += state.is_file()
        child = start(output)
        # some time after a number of saves: between and within steps, during evaluation and during writes
        saves, until = draw.randint(0, 1), 0.0
        last, status = stamp(state), None
        while status is None:
            if stamp(state) != last:
                last, saves = stamp(state), saves - 1
            if saves <= 0 and not until:
                until = time.monotonic() + draw.random() * length / 8
            if until and time.monotonic() > until and kills < KILLS:
                os.kill(child, signal.SIGKILL)
                kills, until = kills + 1, float("inf")
            ended, code = os.waitpid(child, os.WNOHANG)
            status = code if ended else None
            time.sleep(0.003)
        assert status == 0 or os.WTERMSIG(status) == signal.SIGKILL, f"the run failed with {status}"
    print(json.dumps({"kills": kills, "resumed": resumed, "seconds": round(time.monotonic() - begun, 1)}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
