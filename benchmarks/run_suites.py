"""Suites of `tokamix bench` on a machine without its command line; resumable.

    python benchmarks/run_suites.py scaling images --deadline 230

Rows go to OUTPUT/<suite>.csv one by one. The same command again measures what is missing. On a GPU, Triton's kernels of
the suites scaling and images are compiled first, in several processes at the same time. `benchmarks/report.py` draws
the rows, elsewhere if need be: this script needs PyTorch, torchvision, Triton and timm alone.
"""

import argparse
import multiprocessing
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tokamix.bench.suites import SUITES, environment, list_launches, run

COMPILE_SECONDS = 100  # after which the measurements begin, even if some kernels are not compiled yet
CONTEXT = multiprocessing.get_context("spawn")


def compile_kernels(launches: list[Callable[[], None]], seconds: float) -> None:
    """Fill Triton's cache: each call in its own process, all at the same time."""
    end = time.monotonic() + seconds
    processes = [CONTEXT.Process(target=launch, daemon=True) for launch in launches]
    for process in processes:
        process.start()
    for process in processes:
        process.join(max(0, end - time.monotonic()))
        if process.is_alive():
            process.terminate()
            process.join()


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suites", nargs="+", choices=SUITES)
    parser.add_argument("--output", type=Path, default=Path("results"), help="folder of the CSV files")
    parser.add_argument("--only", default="", help="regular expression that labels must match")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds after which nothing new begins")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    print(environment(device), end="", flush=True)
    if device == "cuda" and not options.only:
        launches = [launch for suite in options.suites for launch in list_launches(suite, device)]
        compile_kernels(launches, min(COMPILE_SECONDS, options.deadline / 2))
        print(f"{time.monotonic() - start:5.0f} s  compiled", flush=True)
    for suite in options.suites:
        run(
            suite,
            options.output,
            device,
            options.only,
            lambda line: print(f"{time.monotonic() - start:5.0f} s  {line}", flush=True),
            resume=True,
            deadline=start + options.deadline,
        )


if __name__ == "__main__":
    main()
