"""Suites of `tokamix bench` on a machine without its command line; resumable.

    python benchmarks/run_suites.py scaling images --deadline 230

Rows go to OUTPUT/<suite>.csv one by one. The same command again measures what is missing. `benchmarks/report.py` draws
them, elsewhere if need be: this script needs PyTorch, Triton and timm alone.
"""

import argparse
import time
from pathlib import Path

import torch

from tokamix.bench.suites import SUITES, environment, run


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
