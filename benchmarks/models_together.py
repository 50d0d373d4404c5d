"""Models compiled at the same time, each in its own process, then timed in turn: ours and peers interleaved.

    python benchmarks/models_together.py targets --deadline 540    # results/targets.csv: the table of speed targets
    python benchmarks/models_together.py models                    # results/models.csv, like `tokamix bench`

Compilation takes most of the time and little of the GPU, so on a rented GPU this is several times cheaper than
`tokamix bench`. Groups of models run one after the other, most wanted first; the models of a group take several turns
each. Rows are written group by group, and the same command again measures what is missing. The first call of a model
(`first_call_s`) is measured with empty caches and two compiler threads, while the others of its group compile.
"""

import argparse
import itertools
import multiprocessing as mp
import os
import re
import tempfile
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

COMPILE_SECONDS = 280  # after which the compiled models are timed, even if others still compile
TURNS, TURN_SECONDS = 3, 0.5


def work(suite: str, label: str, device: str, parent: Connection) -> None:
    """Create and compile a model, then check and time it on demand."""
    with tempfile.TemporaryDirectory() as caches:
        os.environ |= {"TORCHINDUCTOR_COMPILE_THREADS": "2"}
        os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
        try:
            import torch

            from tokamix.bench.suites import CASES

            create = {name: create for _, name, create in CASES[suite](device)}[label]
            timed = create()
            timed.first_call()
            parent.send(None)
            while (command := parent.recv()) != "stop":
                if command == "check":
                    timed.check()
                else:
                    timed.time(TURN_SECONDS if device == "cuda" else 0)
                if device == "cuda":
                    torch.cuda.empty_cache()  # for the others
                parent.send(timed.row.as_dict())
        except Exception as error:
            parent.send(f"FAILED, {type(error).__name__}: {str(error)[:300]}")


class Worker:
    """A model in its own process."""

    def __init__(self, suite: str, label: str, device: str) -> None:
        context = mp.get_context("spawn")
        self.label, self.row, self.problem = label, {}, ""
        self.connection, other = context.Pipe()
        self.process = context.Process(target=work, args=(suite, label, device, other), daemon=False)
        self.process.start()
        other.close()

    def receive(self) -> None:
        try:
            answer: Any = self.connection.recv()
        except EOFError:
            answer = "FAILED: its process died"
        if isinstance(answer, str):
            self.problem = answer
        elif answer:
            self.row = answer

    def ask(self, command: str) -> None:
        try:
            self.connection.send(command)
            self.receive()
        except OSError:
            self.problem = "FAILED: its process died"

    def close(self) -> None:
        if self.process.is_alive() and not self.problem and self.row:
            self.connection.send("stop")
            self.process.join(20)
        if self.process.is_alive():
            self.process.terminate()
            self.process.join(20)


def measure(suite: str, labels: list[str], device: str, end: float, log: Any) -> list[Worker]:
    """Compile the models of a group at the same time, then check and time them in turn."""
    with ExitStack() as stack:
        workers = [Worker(suite, label, device) for label in labels]
        for worker in workers:
            stack.callback(worker.close)
        compiling = {worker.connection: worker for worker in workers}
        stop = min(time.monotonic() + COMPILE_SECONDS, end)
        while compiling and (left := stop - time.monotonic()) > 0:
            for connection in wait(list(compiling), timeout=left):
                worker = compiling.pop(connection)
                worker.receive()
                log(f"{worker.label}: {worker.problem or 'compiled'}")
        for worker in compiling.values():
            worker.problem = "FAILED: not compiled in time"
        for command in ("check", *["time"] * TURNS):
            for worker in workers:
                if not worker.problem and (command == "check" or time.monotonic() < end or not worker.row):
                    worker.ask(command)
    return workers


def main() -> None:
    from tokamix.bench.rows import RowFile
    from tokamix.bench.suites import CASES

    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", choices=CASES)
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder of the CSV file")
    parser.add_argument("--only", default="", help="regular expression that labels must match")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds; slow compilations are given up")
    options = parser.parse_args()
    import torch

    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = RowFile(options.output / f"{options.suite}.csv", keep=True)
    end = start + options.deadline

    def log(line: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {line}", flush=True)

    cases = [
        (group, label)
        for group, label, _ in CASES[options.suite](device)
        if re.search(options.only, label) and label not in rows.labels
    ]
    for group, members in itertools.groupby(cases, key=lambda case: case[0]):
        labels = [label for _, label in members]
        if time.monotonic() > end:
            log(f"deadline: {group} is missing; run the same command again")
            continue
        for worker in measure(options.suite, labels, device, end, log):
            if worker.row and not worker.problem and worker.row["milliseconds"] > 0:
                rows.append(worker.label, worker.row, device)
            log(f"{worker.label}: {worker.problem or worker.row}")


if __name__ == "__main__":
    main()
