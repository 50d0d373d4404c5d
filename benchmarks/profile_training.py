"""Where a training step of a study's arm spends its time, on a GPU.

    python benchmarks/profile_training.py fair_comparison column_softmax

Trains the arm as the study does, but on noise, prints its speed, the time that the host needs for a step and the
kernels of a step, and stops. `--processes 12` trains as many copies at once under NVIDIA's multi-process service and
prints their speed together, and how busy CPU and GPU are. `--device cpu` tries the script without a GPU.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import count
from pathlib import Path
from typing import Any

import psutil
import torch

from tokamix.bench.timing import print_costs
from tokamix.data import ArrayDataset, DatasetSplits
from tokamix.recipes import create_recipe
from tokamix.study.processes import environment, start_mps, stop_mps
from tokamix.study.schema import load_study
from tokamix.train import train
from tokamix.train.loop.engine import Engine

WARM_UP = 40  # steps, with compilation and the recording of graphs


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class StopError(Exception):
    """The measurement is done."""


def create_noise(size: int, number: int = 10_240, classes: int = 100) -> DatasetSplits:
    """Random images, which cost as much as photos."""
    draw = torch.Generator().manual_seed(0)
    names = tuple(str(index) for index in range(classes))
    images = torch.randint(256, (number, 3, size, size), dtype=torch.uint8, generator=draw)
    data = ArrayDataset(images, torch.arange(number) % classes, names)
    return DatasetSplits("noise", data, data, names)


def profile(study: str, arm: str, steps: int, kernels: int, folder: str, device: str) -> None:
    """Train one arm until its step is measured."""
    settings = load_study(study).arms[arm].settings | {"name": arm, "eval_every": 10_000}
    if device == "cpu":
        settings |= {"batch_size": 8, "compile": False, "precision": "fp32"}
    recipe = create_recipe(settings)
    train_step = Engine._train_step

    def measured(engine: Engine, batches: Any) -> None:
        if engine.update != WARM_UP:
            return train_step(engine, batches)
        batches = (batch for epoch in count(1) for batch in engine.train_loader.epoch(epoch))
        times, host = [], []
        for _ in range(steps):
            synchronize()
            begun = time.perf_counter()
            train_step(engine, batches)
            host.append(time.perf_counter() - begun)
        synchronize()
        for _ in range(3):
            begun = time.perf_counter()
            for _ in range(steps):
                train_step(engine, batches)
            synchronize()
            times.append((time.perf_counter() - begun) / steps)
        ms, host_ms = 1e3 * statistics.median(times), 1e3 * statistics.median(host)
        speed = 1e3 * recipe.batch_size / ms
        print(f"{arm}: {speed:,.0f} images/s, {ms:.2f} ms a step, {host_ms:.2f} ms of the host", flush=True)
        if kernels:
            print_costs(lambda: train_step(engine, batches), device, 5, rows=kernels)
        raise StopError

    Engine._train_step = measured
    try:
        train(None, create_noise(recipe.image_size), recipe, f"{folder}/run", device=device, quiet=True)
    except StopError:
        return
    raise ValueError("the run ended before it was measured")


def load_test(arguments: argparse.Namespace, folder: Path) -> None:
    """Print what several processes reach together."""
    problem = start_mps(folder)
    print("MPS runs" if problem is None else f"no MPS: {problem}")
    command = [sys.executable, __file__, arguments.study, arguments.arm, "--kernels", "0"]
    processes = []
    try:
        for index in range(arguments.processes):
            options: Any = {"env": environment(folder, problem is None), "stdout": subprocess.PIPE, "text": True}
            extra = ["--steps", str(arguments.steps), "--folder", f"{folder}/{index}", "--device", arguments.device]
            processes.append(subprocess.Popen([*command, *extra], **options))
        psutil.cpu_percent()
        cpu, gpu = [], []
        while all(process.poll() is None for process in processes):
            time.sleep(1)
            query = ["nvidia-smi", "--query-gpu=utilization.gpu,power.draw,clocks.sm", "--format=csv,noheader,nounits"]
            cpu.append(psutil.cpu_percent())
            if arguments.device == "cuda":
                gpu.append([float(part) for part in subprocess.check_output(query, text=True).split(",")])
        lines = [process.communicate()[0].strip() for process in processes]
        speeds = [float(line.split(": ")[1].split(" ")[0].replace(",", "")) for line in lines if "images/s" in line]
        print(f"{arguments.arm} x {len(speeds)}: {sum(speeds):,.0f} images/s together, {min(speeds):,.0f} the slowest")
        last = slice(-8, -1)  # all processes train
        print(f"{os.cpu_count()} CPU cores {statistics.mean(cpu[last]):.0f} % busy")
        if not gpu:
            return
        busy = [statistics.mean(row[i] for row in gpu[last]) for i in range(3)]
        print(
            f"{os.cpu_count()} CPU cores {statistics.mean(cpu[last]):.0f} % busy; GPU {busy[0]:.0f} %, {busy[1]:.0f} W,"
        )
        print(f"{busy[2]:.0f} MHz", flush=True)
    finally:
        for process in processes:
            process.kill()
        if problem is None:
            stop_mps(folder)


def main() -> None:
    """Measure one process, or several."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study")
    parser.add_argument("arm")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--kernels", type=int, default=25, help="kernels to print")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--folder", help="for runs; default: a temporary one")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or temporary
        if arguments.processes > 1:
            load_test(arguments, Path(folder))
        else:
            profile(arguments.study, arguments.arm, arguments.steps, arguments.kernels, folder, arguments.device)


if __name__ == "__main__":
    main()
