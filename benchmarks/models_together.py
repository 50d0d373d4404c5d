"""The models suite, compiled in parallel, then timed one by one: python benchmarks/models_together.py FOLDER [REGEX].

Compilation takes most of the time and little of the GPU, so on a rented GPU this is several times cheaper. Writes
FOLDER/models.csv, like `tokamix bench --suite models`, and FOLDER/environment.txt.
"""

import contextlib
import csv
import itertools
import os
import queue
import re
import sys
import threading
import time
from pathlib import Path

import torch.multiprocessing as mp

COMPILE_TIMEOUT = 280  # seconds after which the compiled models are timed, even if others still compile


def work(label: str, barrier: mp.Barrier, turn: mp.Lock, rows: mp.Queue) -> None:
    """Compile, wait for the others, then time alone."""
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "2"
    from tokamix.bench.suites import SUITES

    waited = False

    def wait_for_compilation() -> None:
        nonlocal waited
        waited = True
        with contextlib.suppress(threading.BrokenBarrierError):
            barrier.wait(COMPILE_TIMEOUT)

    def wait() -> None:
        wait_for_compilation()
        turn.acquire()

    try:
        rows.put((label, dict(SUITES["models"]("cuda"))[label](before_timing=wait).as_dict()))
    except Exception as error:
        rows.put((label, f"FAILED, {type(error).__name__}: {str(error)[:300]}"))
        if not waited:
            return wait_for_compilation()
    turn.release()


def main() -> None:
    from tokamix.bench.suites import SUITES, environment

    folder, only = Path(sys.argv[1]), (sys.argv[2:] or [""])[0]
    labels = [label for label, _ in SUITES["models"]("cuda") if re.search(only, label)]
    results: dict[str, dict | str] = {}
    (folder / "environment.txt").write_text(environment("cuda"))
    for _, group in itertools.groupby(labels, key=lambda label: label.split()[-1]):
        measure(list(group), labels, results, folder)


def measure(group: list[str], labels: list[str], results: dict[str, dict | str], folder: Path) -> None:
    """Measure the models of one compilation mode, adding to `results` and to the file row by row."""
    context = mp.get_context("spawn")
    barrier, turn, rows = context.Barrier(len(group)), context.Lock(), context.Queue()
    start = time.perf_counter()
    workers = [context.Process(target=work, args=(label, barrier, turn, rows), daemon=True) for label in group]
    for worker in workers:
        worker.start()
    while any(label not in results for label in group) and any(w.is_alive() for w in workers):
        try:
            label, row = rows.get(timeout=5)
        except queue.Empty:
            continue
        results[label] = row
        print(f"{time.perf_counter() - start:5.0f} s  {label}: {row}", flush=True)
        measured = [row for name in labels if isinstance(row := results.get(name), dict)]
        if measured:
            with (folder / "models.csv").open("w", newline="") as file:
                writer = csv.DictWriter(file, list(measured[0]))
                writer.writeheader()
                writer.writerows({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in m.items()} for m in measured)


if __name__ == "__main__":
    main()
