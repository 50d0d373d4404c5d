"""Run the training command in processes and kill them at random moments, until one finishes."""

import json
import os
import random
import signal
import time
from importlib import import_module
from pathlib import Path

from tokamix.cli import app
from tokamix.data import create_dataset

COMMAND = "train --data digits --recipe digits --save-every 3 --log-every 2 --quiet --device cpu"
KILLS = 4
SETTINGS = """
    epochs=6 batch_size=256 accumulate=2 warmup_epochs=1 image_size=8 drop_path=0.1 ema=0.9 mixup=0.8
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


def kill_repeatedly(folder: Path) -> None:
    """Train in FOLDER/whole without and in FOLDER/killed with kills; prints how many there were."""
    # what the command imports, before the forks: the children reach the training sooner, where the kills should fall
    import_module("matplotlib.figure")
    import_module("torch.utils.tensorboard")
    create_dataset("digits")
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
