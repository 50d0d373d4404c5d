"""Models in plain eager mode on a GPU: training, inference and one image, ours beside timm's peers.

    python benchmarks/eager.py [--light on|off|both] [--deadline 240] [--output results/eager.csv]

bfloat16, 224 px: training is forward and backward of batch 128 under autocast, without the optimizer; inference is
batch 128 and batch 1 with bfloat16 weights and folded batch norms. All models of a mode run in one process, in turn,
round after round; a row is the median over the rounds. `--light` chooses our operators' light path ("on"), the
registered operators ("off"), or both, whose logits and gradients are compared first. Kernels are compiled beforehand,
in one process for each model. `host_ms` is the time until Python has queued a step: near `ms`, the host limits the
speed. `peak_gb` is the largest memory of a step, weights and images included.

Writes a row to `--output` as soon as it is finished; and to `<output>_ops.csv` the operators that take most of the
host's time in one step and the kernels that take most of the GPU's, without what they call, in microseconds. For a
trial without a GPU: `--device cpu --batch 1 --models deit_small_sima`.
"""

import argparse
import csv
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from timm import create_model
from timm.utils import reparameterize_model
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import tokamix.models  # noqa: F401  registers our models with timm
from tokamix.ops import dispatch

OURS = ("atmnet_tiny", "stvit_small", "amixer_tiny", "xcit_small_12_p16_sima", "deit_small_sima")
PEERS = ("convnext_tiny", "caformer_s18", "deit_small_patch16_224", "xcit_small_12_p16_224")
SIZE = 224
STEPS = {"train": 4, "one image": 20, "infer": 8}  # timed together
SHARES = {"train": 0.45, "one image": 0.3, "infer": 0.25}  # of the time for timing
PROFILE_SECONDS = 40  # kept for profiles
ROUNDS = 7
TOP = 15  # operators of a profile
FIELDS = (
    *("model", "mode", "light", "batch", "ms", "host_ms", "images_per_second", "spread", "rounds", "peak_gb"),
    *("date", "versions"),
)
OPERATOR_FIELDS = ("model", "mode", "light", "where", "operator", "calls", "microseconds")

Case = tuple[str, bool]  # model, light
Step = Callable[[], Any]


def build(name: str, mode: str, batch: int, device: str) -> tuple[Step, Callable[[], Tensor]]:
    """A step of a model, and a function that returns its logits or gradients for a few images."""
    torch.manual_seed(0)
    batch = 1 if mode == "one image" else batch
    model = create_model(name).to(device).train(mode == "train")
    images = torch.randn(batch, 3, SIZE, SIZE, device=device)
    labels = torch.randint(1000, (batch,), device=device)
    if mode != "train":
        model, images = reparameterize_model(model, inplace=True).bfloat16(), images.bfloat16()

    def infer(count: int = batch) -> Tensor:
        with torch.inference_mode():
            return model(images[:count])

    def backward(count: int) -> None:
        with torch.autocast(device, torch.bfloat16):
            loss = F.cross_entropy(model(images[:count]), labels[:count])
        loss.backward()

    def train() -> None:
        backward(batch)
        model.zero_grad(set_to_none=True)

    def gradients() -> Tensor:
        backward(4)
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad(set_to_none=True)
        return found

    return (train, gradients) if mode == "train" else (infer, lambda: infer(4))


def compile_kernels(names: list[str], batch: int, seconds: float) -> None:
    """Fill Triton's cache: one process for each model runs every mode once."""
    context = mp.get_context("spawn")
    workers = [context.Process(target=run_once, args=(name, batch), daemon=True) for name in names if name in OURS]
    for worker in workers:
        worker.start()
    end = time.perf_counter() + seconds
    for worker in workers:
        worker.join(max(0, end - time.perf_counter()))
        if worker.is_alive():
            worker.terminate()


def run_once(name: str, batch: int) -> None:
    for mode in STEPS:
        step, result = build(name, mode, batch, "cuda")
        step()
        result()


def check(name: str, result: Callable[[], Tensor]) -> None:
    """Stop if the light path changes logits or gradients by more than the last bits of a sum in another order."""
    results = []
    for light in (True, True, False):  # the second call finds cached launches
        with dispatch.use_light(light):
            results.append(result().double())
    error = max(((x - results[2]).norm() / results[2].norm()).item() for x in results[:2])
    if not error < 1e-3:
        raise RuntimeError(f"{name}: the light path differs from the registered operators by {error:.1e}")


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def allocated(device: str) -> int:
    """Bytes that tensors occupy."""
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def memory_of(step: Step, device: str) -> int:
    """Bytes that a step needs besides what is allocated before it."""
    if device != "cuda":
        return 0
    before = allocated(device)
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def time_steps(step: Step, steps: int, device: str) -> tuple[float, float]:
    """Milliseconds of a step, and until it is queued."""
    synchronize(device)
    start = time.perf_counter()
    for _ in range(steps):
        step()
    queued = time.perf_counter()
    synchronize(device)
    return (time.perf_counter() - start) / steps * 1e3, (queued - start) / steps * 1e3


def measure(cases: list[Case], mode: str, batch: int, device: str, until: float) -> Iterator[dict[str, Any]]:
    """Time the cases in turn, until all rounds are done or time is up."""
    built, peaks = {}, {}
    for name in dict(cases):
        try:
            before = allocated(device)
            step, result = build(name, mode, batch, device)
            step()
            own = allocated(device) - before
            peaks[name] = own + memory_of(step, device)
            if name in OURS:
                check(name, result)
            built[name] = step
        except RuntimeError as error:
            print(f"{name}, {mode}, is left out: {error}", flush=True)
    cases = [case for case in cases if case[0] in built]
    gc.collect()
    gc.freeze()  # a collection would walk the modules of all models; a training run has one
    times: dict[Case, list[tuple[float, float]]] = {case: [] for case in cases}
    for i in range(ROUNDS + 1):
        for name, light in cases:
            with dispatch.use_light(light):
                found = time_steps(built[name], STEPS[mode], device)
            if i:  # the first round is a warm-up
                times[name, light].append(found)
        if i >= 2 and time.perf_counter() > until:
            break
    versions = " ".join(f"{package} {version(package)}" for package in ("torch", "triton", "timm"))
    for (name, light), pairs in times.items():
        totals, hosts = zip(*pairs, strict=True)
        ms, count = statistics.median(totals), 1 if mode == "one image" else batch
        yield describe(name, mode, light) | {
            "batch": count,
            "ms": f"{ms:.3f}",
            "host_ms": f"{statistics.median(hosts):.3f}",
            "images_per_second": f"{count / ms * 1e3:.0f}",
            "spread": f"{(max(totals) - min(totals)) / ms:.3f}",
            "rounds": len(pairs),
            "peak_gb": f"{peaks[name] / 1e9:.2f}" if device == "cuda" else "",
            "date": time.strftime("%Y-%m-%d"),
            "versions": versions,
        }


def describe(name: str, mode: str, light: bool) -> dict[str, Any]:
    return {"model": name, "mode": mode, "light": ("on" if light else "off") if name in OURS else ""}


def profile_step(name: str, mode: str, light: bool, batch: int, device: str) -> list[dict[str, Any]]:
    """The operators that take most of the host's time in one step, the kernels, and the sums of all."""
    step, _ = build(name, mode, batch, device)
    rows = []
    for where, activity in (("host", ProfilerActivity.CPU), ("gpu", ProfilerActivity.CUDA)):
        if where == "gpu" and device != "cuda":
            continue
        with dispatch.use_light(light):
            for _ in range(3):
                step()
            synchronize(device)
            with profile(activities=[activity]) as record:
                step()
                synchronize(device)
        own = attrgetter("self_cpu_time_total" if where == "host" else "self_device_time_total")
        events = [event for event in record.key_averages() if "Synchronize" not in event.key]
        found = [(where, event.key, event.count, round(own(event))) for event in events]
        found.sort(key=lambda row: -row[3])
        rows += [(where, "all", sum(row[2] for row in found), sum(row[3] for row in found)), *found[:TOP]]
    return [describe(name, mode, light) | dict(zip(OPERATOR_FIELDS[3:], row, strict=True)) for row in rows]


class Table:
    """A CSV file that is written row by row and printed."""

    def __init__(self, path: Path, fields: tuple[str, ...]) -> None:
        self.file = path.open("w", newline="")
        self.writer = csv.DictWriter(self.file, fields, lineterminator="\n")
        self.writer.writeheader()

    def add(self, row: dict[str, Any]) -> None:
        """Write and print a row."""
        self.writer.writerow(row)
        self.file.flush()
        print("  ".join(str(value) for value in row.values()), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--light", choices=("on", "off", "both"), default="both")
    parser.add_argument("--deadline", type=float, default=240, help="seconds in all; fewer rounds if they are short")
    parser.add_argument("--output", type=Path, default=Path("results/eager.csv"))
    parser.add_argument("--models", nargs="+", default=[*OURS, *PEERS])
    parser.add_argument("--modes", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    start = time.perf_counter()
    if options.device == "cuda":
        compile_kernels(options.models, options.batch, options.deadline / 2)
        print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    paths = {"on": (True,), "off": (False,), "both": (True, False)}[options.light]
    cases = [(name, light) for name in options.models for light in (paths if name in OURS else (True,))]
    table = Table(options.output, FIELDS)
    begin, seconds = time.perf_counter(), start + options.deadline - PROFILE_SECONDS - time.perf_counter()
    share = 0.0
    for mode in options.modes:
        share += SHARES[mode]
        for row in measure(cases, mode, options.batch, options.device, begin + share * seconds):
            table.add(row)
    operators = Table(options.output.with_name(f"{options.output.stem}_ops.csv"), OPERATOR_FIELDS)
    for mode in options.modes:
        for name, light in cases:
            if mode == "infer" or time.perf_counter() > start + options.deadline:
                continue  # the same operators as for one image
            for row in profile_step(name, mode, light, options.batch, options.device):
                operators.add(row)


if __name__ == "__main__":
    main()
