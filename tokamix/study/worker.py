"""Runs of a study in one process, which share compiled code: `python -m tokamix.study.worker`.

The names of job files come in on standard input, one after the other. If the input ends during a run, the study has
been killed: the run saves its state and stops, so that a restarted study can resume it.
"""

import gc
import json
import math
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tokamix.files import write_json
from tokamix.recipes import create_recipe
from tokamix.study.data import load_splits
from tokamix.study.probes import correct_images, measure_probes
from tokamix.study.rows import Row, pack_bits
from tokamix.train import train
from tokamix.train.loop.engine import NotFiniteError
from tokamix.train.output.lock import is_locked

WORKERS = 4  # processes that decode photos, for each run
PATIENCE = 120.0  # seconds for the run of a killed study to save its state and stop


def train_job(job: Row) -> Row:
    """Train one run and return its row; a run whose loss is not finite is a result, too."""
    device = job["device"] or ("cuda" if torch.cuda.is_available() else "cpu")
    settings = job["settings"]
    if device == "cpu":
        settings = settings | {"precision": "fp32", "compile": False}
    data: Any = load_splits(job["source"], job["holdout"], job["images"], job["seed"])
    recipe = create_recipe(settings)
    row: Row = {
        "epochs": recipe.num_epochs,
        "model": recipe.model,
        "torch": torch.__version__,
        "gpu": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "settings": json.dumps(job["settings"], sort_keys=True),
    }
    if not isinstance(data, str):
        row["train_images"] = len(data.train)
    _wait_for_folder(Path(job["folder"]))
    begun = time.perf_counter()
    try:
        options: Any = {"pretrained": recipe.finetune, "device": device, "quiet": True}
        if device == "cuda" and isinstance(data, str):  # photos that are decoded again and again
            options["workers"] = WORKERS
        run = train(None, data, recipe, job["folder"], **options)
    except NotFiniteError as error:
        print(error, flush=True)
        return row | {"status": "diverged", "seconds": round(time.perf_counter() - begun, 1), "metrics": "{}"}
    seconds = time.perf_counter() - begun
    metrics = {key: value for key, value in run.last.items() if key not in ("epoch", "averaged")}
    if not math.isfinite(metrics.get("loss", 0.0)):  # accuracies of outputs that are NaN mean nothing
        return row | {"status": "diverged", "seconds": round(seconds, 1), "metrics": "{}"}
    metrics |= measure_probes(run, data, job["probes"], device)
    if not isinstance(data, str) and recipe.select == "last" and not job["holdout"]:
        row["correct"] = pack_bits(correct_images(run, data, device))
    speeds = sorted(epoch["images_per_second"] for epoch in run.epochs)
    return row | {
        "status": "finished",
        "score": run.last[run.metric],
        "metrics": json.dumps(metrics),
        "parameters": sum(parameter.numel() for parameter in run.load().parameters()),
        "seconds": round(seconds, 1),  # of this process; a resumed run trained before
        "train_seconds": round(sum(epoch["seconds"] for epoch in run.epochs), 1),
        "images_per_second": speeds[len(speeds) // 2],
        "curve": json.dumps(curve(run.epochs, run.metric)),
    }


def _wait_for_folder(folder: Path) -> None:
    """Wait while the same run of a study that was killed a moment ago saves its state, and stops."""
    end = time.monotonic() + PATIENCE
    while is_locked(folder) and time.monotonic() < end:
        time.sleep(0.1)


def curve(epochs: list[Row], metric: str) -> list[list[float]]:
    """[epoch, seconds of training so far, metric of the last weights, averaged if EMA is on] of each evaluation."""
    points, seconds, ema = [], 0.0, f"ema_{metric}"
    for row in epochs:
        seconds += row["seconds"]
        if metric in row:
            points.append([row["epoch"], round(seconds, 1), round(row[ema if ema in row else metric], 3)])
    return points


def work(read_line: Callable[[], str], stop: Callable[[], object]) -> None:
    """Train the runs whose job files the lines name, until a line is empty; each row goes to the file its job names.

    `stop` is called if the lines end while a run is in work.
    """
    waiting: queue.Queue[str] = queue.Queue()
    in_work = threading.Event()

    def listen() -> None:
        for line in iter(read_line, ""):
            waiting.put(line.strip())
        if in_work.is_set() or not waiting.empty():
            stop()
        waiting.put("")

    threading.Thread(target=listen, daemon=True).start()
    while name := waiting.get():
        in_work.set()
        job: Row = json.loads(Path(name).read_text())
        row = train_job(job)
        gc.collect()  # the network's memory is free before the next one needs it
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        in_work.clear()
        write_json(Path(job["result"]), row)


if __name__ == "__main__":
    work(sys.stdin.readline, lambda: os.kill(os.getpid(), signal.SIGTERM))
