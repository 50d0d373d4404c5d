"""AOTInductor packages against torch.compile on a GPU; writes results/aoti.csv.

    python benchmarks/aoti.py [--models stvit_small,atmnet_tiny] [--batches 1,64] [--runtimes aoti,graphs]

Each model, batch and runtime has its own process. All prepare at the same time: eager, torch.compile, torch.compile
with CUDA graphs, and the package, which is written, opened and called through AOTInductor's loader. Outputs are
compared with float32. Then the processes are timed in turn, one at a time: a call from Python until the GPU is done.
All run in bf16, with folded batch norms, at 224 px; a package takes and returns float32 and converts inside. What is
not ready after `--prepare-seconds` is left out. `python benchmarks/deploy.py page` shows the rows. For a trial without
a GPU, in fp32: `--device cpu --models pyramid_nano_sima --batches 1 --prepare-seconds 400 --deadline 500`.
"""

import argparse
import csv
import platform
import statistics
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from models_together import measure

from tokamix.bench.models import Timed
from tokamix.bench.runtimes import prepare_calls

MODELS = "stvit_small,atmnet_tiny,xcit_small_12_p16_sima"
RUNTIMES = {"cuda": ("aoti", "compile", "graphs", "eager"), "cpu": ("aoti", "compile", "eager")}  # the slowest first
SIZE = 224
WARM_UP, MIN_CALLS = 3, 3
COLUMNS = ("model", "runtime", "size", "batch", "milliseconds", "spread", "images_per_second", "error")


class TimedRuntime(Timed):
    """A model in one runtime, prepared by the first call."""

    def __init__(self, name: str, runtime: str, batch: int, device: str) -> None:
        self.case, self.device, self.times = (name, runtime, batch), device, []

    def first_call(self) -> None:
        """Compile or export the model, and compare its output with float32."""
        name, runtime, batch = self.case
        lines: list[str] = []
        with tempfile.TemporaryDirectory() as folder:
            found = list(prepare_calls([name], SIZE, batch, [runtime], self.device, Path(folder), lines.append))
        if not found:
            raise RuntimeError(lines[-1])
        ((self.row, self.step),) = found

    def check(self) -> float:
        """The error that `first_call` found; a larger one than allowed has raised an exception there."""
        for _ in range(WARM_UP):
            self.step()
        return self.row.error

    def time(self, seconds: float) -> None:
        """Time calls for some seconds; the row holds the median of all turns."""
        end, least = time.perf_counter() + seconds, len(self.times) + MIN_CALLS
        self.step()  # the clock of an idle GPU is low
        while len(self.times) < least or time.perf_counter() < end:
            start = time.perf_counter()
            self.step()
            self.times.append(1e3 * (time.perf_counter() - start))
        row = self.row
        row.milliseconds = statistics.median(self.times)
        low, _, high = statistics.quantiles(self.times, n=4)
        row.spread = (high - low) / 2 / row.milliseconds
        row.images_per_second = 1e3 * row.batch / row.milliseconds


def main() -> None:
    begin = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--batches", default="1,64")
    parser.add_argument("--runtimes", help="comma-separated; default: all; fewer are ready sooner")
    parser.add_argument("--device", choices=tuple(RUNTIMES), default="cuda")
    parser.add_argument("--prepare-seconds", type=float, default=105.0)
    parser.add_argument("--deadline", type=float, default=150.0, help="seconds after which no turn begins")
    parser.add_argument("--output", type=Path, default=Path("results/aoti.csv"))
    parser.add_argument("--start-when", type=Path, help="a file; nothing is timed before it exists")
    options = parser.parse_args()

    def log(line: str) -> None:
        print(f"{time.monotonic() - begin:5.0f} s  {line}", flush=True)

    creates = {
        f"{name} {runtime} {batch}": partial(TimedRuntime, name, runtime, int(batch), options.device)
        for runtime in (options.runtimes.split(",") if options.runtimes else RUNTIMES[options.device])
        for name in options.models.split(",")
        for batch in options.batches.split(",")
    }
    end = begin + options.deadline
    workers = measure(creates, end, log, options.prepare_seconds, start_when=options.start_when)
    for worker in workers:
        if worker.problem:
            log(f"{worker.label} is left out: {worker.problem}")
    rows = [worker.row for worker in workers if not worker.problem]
    hardware = torch.cuda.get_device_name() if options.device == "cuda" else platform.machine()
    with options.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, (*COLUMNS, "hardware", "torch"), lineterminator="\n")
        writer.writeheader()
        for row in sorted(rows, key=lambda row: (row["model"], row["batch"])):
            cells = {key: f"{row[key]:.4g}" if isinstance(row[key], float) else row[key] for key in COLUMNS}
            writer.writerow(cells | {"hardware": hardware, "torch": torch.__version__})
            log("  ".join(map(str, cells.values())))


if __name__ == "__main__":
    main()
