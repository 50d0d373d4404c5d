"""Models compiled at the same time, each in its own process, then timed in turn: ours and peers interleaved.

    python benchmarks/models_together.py targets --deadline 400    # results/targets.csv: the table of speed targets
    python benchmarks/models_together.py models                    # results/models.csv, like `tokamix bench`

Compilation takes most of the time and little of the GPU, so on a rented GPU this is several times cheaper than
`tokamix bench`. Groups of models run one after the other, most wanted first; the models of a group take several turns
each. Rows are written group by group, and the same command again measures what is missing. The first call of a model
(`first_call_s`) is measured with empty caches and two compiler threads, while the others of its group compile.
`--profile REGEX` writes the slowest kernels of the models whose labels match to results/<suite>_kernels.csv.
`--start-when FILE` compiles all groups at once and waits for this file before anything is timed, so that a GPU can do
other work while models compile.
"""

import argparse
import csv
import math
import multiprocessing
import os
import re
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from tokamix.bench.rows import RowFile
from tokamix.bench.suites import CASES
from tokamix.bench.timing import list_costs

CONTEXT = multiprocessing.get_context("spawn")
COMPILE_SECONDS = 280
TURNS, TURN_SECONDS = 3, 0.5
STOP_SECONDS = 20
KERNELS = 15  # of a profile


def work(create: Callable[[], Any], parent: Connection) -> None:
    """Create and compile a model, then check and time it on demand."""
    try:
        timed = create()
        timed.first_call()
        if timed.device == "cuda":
            torch.cuda.empty_cache()  # for the others
        parent.send(None)
        while (command := parent.recv()) != "stop":
            if command == "profile":
                parent.send(list_costs(timed.step, timed.device))
                continue
            if command == "check":
                timed.check()
            else:
                timed.time(TURN_SECONDS)
            if timed.device == "cuda":
                torch.cuda.empty_cache()
            parent.send(timed.row.as_dict())
    except Exception as error:
        parent.send(f"FAILED, {type(error).__name__}: {str(error)[:300]}")


class Worker:
    """A model in its own process, with compiler caches of its own."""

    def __init__(self, label: str, create: Callable[[], Any]) -> None:
        self.label, self.row, self.problem = label, {}, ""
        self.costs: list[tuple[str, int, float]] = []  # of its kernels, the slowest first
        self.caches = tempfile.TemporaryDirectory()
        os.environ |= {
            "TORCHINDUCTOR_COMPILE_THREADS": "2",
            "OMP_NUM_THREADS": "2",  # else each of many processes uses all cores for what runs on the CPU
            "TORCHINDUCTOR_CACHE_DIR": f"{self.caches.name}/inductor",
            "TRITON_CACHE_DIR": f"{self.caches.name}/triton",
        }
        self.connection, other = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=work, args=(create, other))
        self.process.start()
        other.close()  # so that `recv` ends if the process dies

    def receive(self) -> None:
        try:
            answer: Any = self.connection.recv()
        except (EOFError, OSError):
            answer = "FAILED, its process died"
        if isinstance(answer, str):
            self.problem = answer
        elif isinstance(answer, list):
            self.costs = answer
        elif answer:
            self.row = answer

    def ask(self, command: str) -> None:
        with suppress(OSError):  # the process may have died; `receive` notices
            self.connection.send(command)
        self.receive()

    def close(self) -> None:
        if not self.problem:
            with suppress(OSError):
                self.connection.send("stop")
            self.process.join(STOP_SECONDS)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(STOP_SECONDS)
        self.caches.cleanup()


def measure(
    creates: dict[str, Callable[[], Any]],
    end: float = math.inf,
    log: Callable[[str], object] = print,
    compile_seconds: float | None = None,
    profiled: str = "",
    start_when: Path | None = None,
) -> list[Worker]:
    """Compile the models of a group at the same time, then check and time them in turn.

    Args:
        creates: label -> function that creates a `tokamix.bench.models.Timed`.
        end: value of `time.monotonic()` after which no further turn begins.
        log: called with one line per event.
        compile_seconds: time after which the compiled models are timed, even if others still compile.
        profiled: regular expression of the labels that are profiled after they were timed; "" for none.
        start_when: a file; nothing is timed before it exists.
    """
    with ExitStack() as stack:
        workers = [Worker(label, create) for label, create in creates.items()]
        for worker in workers:
            stack.callback(worker.close)
        compiling = {worker.connection: worker for worker in workers}
        stop = min(time.monotonic() + (compile_seconds or COMPILE_SECONDS), end)
        while compiling and (left := stop - time.monotonic()) > 0:
            for connection in wait(list(compiling), timeout=left):
                worker = compiling.pop(connection)
                worker.receive()
                log(f"{worker.label}: {worker.problem or 'compiled'}")
        for worker in compiling.values():
            worker.problem = "FAILED, not compiled in time"
        for worker in workers:
            if not worker.problem:
                worker.ask("check")
        if start_when is not None:
            log(f"all is compiled and checked; waiting for {start_when}")
            while not start_when.exists() and time.monotonic() < end:
                time.sleep(0.2)
        for turn in range(TURNS):
            for worker in workers:
                if not worker.problem and (turn == 0 or time.monotonic() < end):  # at least one turn each
                    worker.ask("time")
                    log(f"{worker.label}: {worker.problem or worker.row['milliseconds']} ms after turn {turn + 1}")
        for worker in workers:
            if profiled and re.search(profiled, worker.label) and not worker.problem and time.monotonic() < end:
                worker.ask("profile")
    return workers


def write_kernels(path: Path, worker: Worker) -> None:
    """Append the slowest kernels of a model and the sum of all."""
    is_new = not path.exists()
    everything = ("all", sum(times for _, times, _ in worker.costs), sum(ms for _, _, ms in worker.costs))
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(("label", "kernel", "calls", "milliseconds"))
        for name, times, ms in (everything, *worker.costs[:KERNELS]):
            writer.writerow((worker.label, name[:100], times, f"{ms:.4f}"))


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=CASES)
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder of the CSV file")
    parser.add_argument("--only", default="", help="regular expression that labels must match")
    parser.add_argument("--deadline", type=float, default=math.inf, help="seconds after which no group or turn begins")
    parser.add_argument("--profile", default="", help="regular expression of the labels whose kernels are listed")
    parser.add_argument("--compile-seconds", type=float, help="after which what is compiled is timed")
    parser.add_argument("--start-when", type=Path, help="a file; nothing is timed before it exists")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = RowFile(options.output / f"{options.suite}.csv", keep=True)

    def log(line: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {line}", flush=True)

    groups: dict[str, dict[str, Callable[[], Any]]] = {}
    for group, label, create in CASES[options.suite](device):
        if re.search(options.only, label) and label not in rows.labels:
            groups.setdefault("" if options.start_when else group, {})[label] = create
    for group, creates in groups.items():
        if time.monotonic() > start + options.deadline:
            log(f"deadline: {len(creates)} rows of {group!r} are missing; run the same command again")
            continue
        end, wait_for = start + options.deadline, options.start_when
        for worker in measure(creates, end, log, options.compile_seconds, options.profile, wait_for):
            if not worker.problem:
                rows.append(worker.label, worker.row, device)
            if worker.costs:
                write_kernels(options.output / f"{options.suite}_kernels.csv", worker)
            log(f"{worker.label}: {worker.problem or worker.row}")


if __name__ == "__main__":
    main()
