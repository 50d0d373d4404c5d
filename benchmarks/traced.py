"""Training steps of models compiled without CUDA graphs: kernels launched by the generated code, or by our operators.

    python benchmarks/traced.py [--deadline 190] [--output results/traced.csv]

bfloat16 autocast, forward and backward without the optimizer. Every model is compiled in its own process, with empty
caches; then they are timed in turn. Ours are compiled twice: "launches" are part of the generated code, which is the
default; "operators" run in Python (`TOKAMIX_TRACE=0`). Gradients are compared with float32 before. The sum of the
kernels of a step, and the slowest, are written to `<output>_kernels.csv`: a step that takes longer waits for the host.
Prints each turn; writes the rows after the last. For a trial without a GPU:

    python benchmarks/traced.py --device cpu --models stvit_small --size 64 --batch 1 --output /tmp/traced.csv
"""

import argparse
import time
from functools import partial
from pathlib import Path

import timm
from models_together import measure, write_kernels

from tokamix.bench.models import TimedModel
from tokamix.bench.rows import RowFile
from tokamix.ops import dispatch

MODELS = ("atmnet_tiny", "stvit_small", "convnext_tiny")
TIMING_SECONDS = 45  # kept for checks, turns and profiles


def create(name: str, kernels: str, size: int, batch: int, device: str) -> TimedModel:
    dispatch._traced = kernels != "operators"
    timed = TimedModel(name, "train", size, batch, "default", device=device)
    timed.row.backend = kernels
    return timed


def main() -> None:
    start = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--kernels", nargs="+", default=["launches", "operators"], choices=["launches", "operators"])
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--deadline", type=float, default=190, help="seconds in all")
    parser.add_argument("--output", type=Path, default=Path("results/traced.csv"))
    parser.add_argument("--start-when", type=Path, help="a file; nothing is timed before it exists")
    options = parser.parse_args()

    def log(line: str) -> None:
        print(f"{time.monotonic() - start:5.0f} s  {line}", flush=True)

    creates = {}
    for name in options.models:
        ours = "tokamix" in timm.model_entrypoint(name).__module__
        for kernels in options.kernels if ours else [""]:
            label = f"{name}, {kernels}" if ours else name
            creates[label] = partial(create, name, kernels, options.size, options.batch, options.device)
    compile_seconds, end = options.deadline - TIMING_SECONDS, start + options.deadline
    workers = measure(creates, end, log, compile_seconds, ".", options.start_when)
    rows = RowFile(options.output)
    costs = options.output.with_name(f"{options.output.stem}_kernels.csv")
    costs.unlink(missing_ok=True)
    for worker in workers:
        if worker.row and not worker.problem:
            rows.append(worker.label, worker.row, options.device)
        if worker.costs:
            write_kernels(costs, worker)
            log(f"{worker.label}: {sum(ms for _, _, ms in worker.costs):.1f} ms in kernels")
        log(f"{worker.label}: {worker.problem or worker.row}")


if __name__ == "__main__":
    main()
