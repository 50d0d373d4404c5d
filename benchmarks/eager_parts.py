"""What eager training gains from one cast of all weights, and from our LayerNorm; writes results/eager_parts.csv.

    python benchmarks/eager_parts.py [--models atmnet_tiny,stvit_small] [--deadline 60]

The step of `eager.py` (forward and backward of 128 images of 224 px under bf16 autocast) with both, without either one,
and without both, in turn in one process. `host_ms` is the time until Python has queued a step, `gpu_ms` the sum of its
kernels in a profile. For a trial without a GPU: `--device cpu --batch 1 --models stvit_small`.
"""

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eager import STEPS, Table, build, synchronize, time_steps
from torch.profiler import ProfilerActivity, profile

from tokamix.layers import cast, norm

MODELS = "atmnet_tiny,stvit_small,amixer_tiny,xcit_small_12_p16_sima"
VARIANTS = {"both": (True, True), "no cast": (False, True), "no norm": (True, False), "neither": (False, False)}
ROUNDS = 5
FIELDS = ("model", "mode", "variant", "batch", "ms", "host_ms", "gpu_ms", "images_per_second", "spread", "rounds")


@contextmanager
def use_parts(casts: bool, norms: bool) -> Iterator[None]:
    """Turn the cast of all weights and the kernels of LayerNorm on or off."""
    before = cast.ENABLED, norm.FEW_NUMBERS
    cast.ENABLED = casts
    if not norms:
        norm.FEW_NUMBERS = sys.maxsize
    try:
        yield
    finally:
        cast.ENABLED, norm.FEW_NUMBERS = before


def time_kernels(step, device: str) -> float:
    """Milliseconds that the kernels of a step take in all."""
    if device != "cuda":
        return 0.0
    with profile(activities=[ProfilerActivity.CUDA]) as record:
        step()
        synchronize(device)
    return sum(event.self_device_time_total for event in record.key_averages()) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=MODELS)
    parser.add_argument("--modes", default="train,infer")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--deadline", type=float, default=60, help="seconds after which no model begins")
    parser.add_argument("--output", type=Path, default=Path("results/eager_parts.csv"))
    options = parser.parse_args()
    end, table = time.perf_counter() + options.deadline, Table(options.output, FIELDS)
    for mode in options.modes.split(","):
        for name in options.models.split(","):
            if time.perf_counter() > end:
                print(f"deadline: {name}, {mode}, is missing", flush=True)
                continue
            step, _ = build(name, mode, options.batch, options.device)
            times: dict[str, list[tuple[float, float]]] = {variant: [] for variant in VARIANTS}
            gc.collect()
            for i in range(ROUNDS + 1):
                for variant, parts in VARIANTS.items():
                    with use_parts(*parts):
                        found = time_steps(step, STEPS[mode], options.device)
                    if i:  # the first round is a warm-up
                        times[variant].append(found)
            for variant, pairs in times.items():
                totals, hosts = zip(*pairs, strict=True)
                ms = statistics.median(totals)
                with use_parts(*VARIANTS[variant]):
                    kernels = time_kernels(step, options.device)
                row = (
                    *(name, mode, variant, options.batch, f"{ms:.3f}", f"{statistics.median(hosts):.3f}"),
                    *(f"{kernels:.3f}", f"{options.batch / ms * 1e3:.0f}", f"{(max(totals) - min(totals)) / ms:.3f}"),
                    len(pairs),
                )
                table.add(dict(zip(FIELDS, row, strict=True)))


if __name__ == "__main__":
    main()
