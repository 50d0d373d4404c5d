"""Suites of measurements, and the function that runs one and writes its rows as CSV."""

import csv
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tokamix.bench import models, ops, softmax
from tokamix.mixers import list_mixers

# the authors' released AMixer-T differs from the table in their paper; their speed is known for the released one
AMIXER_RELEASED = {"depths": (2, 2, 10, 2), "num_heads": (3, 6, 12, 24), "bank_sizes": (4, 9, 18, 36)}
OURS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("atmnet_tiny", {}),
    ("stvit_small", {}),
    ("amixer_tiny", AMIXER_RELEASED),
    ("xcit_small_12_p16_sima", {}),
    ("deit_small_sima", {}),
)
PEERS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("deit_small_patch16_224", {}),
    ("swin_tiny_patch4_window7_224", {"drop_path_rate": 0.0}),  # default 0.1, with which two runs differ
    ("convnext_tiny", {}),
    ("xcit_small_12_p16_224", {}),
)
LARGE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("stvit_small", {}),
    ("atmnet_tiny", {}),
    ("deit_small_sima", {"img_size": 1024}),
    ("deit_small_patch16_224", {"img_size": 1024}),
    ("convnext_tiny", {}),
)

H200 = ("ops", "scaling", "models")  # the source of docs/benchmarks.md

Measurement = tuple[str, Callable[[], Any]]  # label, function that returns the row


def _models(device: str) -> Iterator[Measurement]:
    """Our models without CUDA graphs, which also gives their memory; then all models with them."""
    small = [(name, mode, 224, 128, kwargs) for mode in ("infer", "train") for name, kwargs in (*OURS, *PEERS)]
    large = [(name, "infer", 1024, 8, kwargs) for name, kwargs in LARGE]
    ours = [case for case in small if case[0] in dict(OURS)]
    for compiled, cases in (("default", ours), ("reduce-overhead", small + large)):
        for name, mode, size, batch, kwargs in cases:
            label = f"{name} {mode} {size} {compiled}"
            yield label, partial(models.measure, name, mode, size, batch, compiled, device=device, **kwargs)


def _ops(cases: Callable[[], Iterator[ops.OpCase]], device: str, plain: bool = True) -> Iterator[Measurement]:
    for case in cases():
        backends = case.backends if plain else case.backends[:1]
        for backend in backends if device == "cuda" else case.backends[-1:]:  # kernels need a GPU
            label = f"{case.op} {backend}: {case.case}, {case.tokens} tokens"
            yield label, partial(ops.measure, case, backend, device)


def _mixers(device: str) -> Iterator[Measurement]:
    for mixer in list_mixers():
        name = f"columnar_small_{mixer}"
        yield f"{name} infer 224", partial(models.measure, name, device=device)


def _softmax(device: str) -> Iterator[Measurement]:
    """SimA's figure 1: by resolution, then by width."""
    for side, width in (*((side, 384) for side in (14, 24, 32, 48, 64)), *((32, width) for width in (64, 192, 768))):
        label = f"softmax {side * side} tokens, width {width}"
        yield label, partial(softmax.measure_softmax, side, width, device)


SUITES: dict[str, Callable[[str], Iterator[Measurement]]] = {
    "ops": lambda device: _ops(ops.model_cases, device),
    "scaling": lambda device: _ops(ops.scaling_cases, device, plain=False),
    "models": _models,
    "mixers": _mixers,
    "softmax": _softmax,
}


def environment(device: str) -> str:
    """Date, processor and versions of a measurement, one per line."""
    processor = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    if device == "cuda" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        processor += ", " + subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    versions = " ".join(f"{name} {version(name)}" for name in ("torch", "triton", "timm") if find_spec(name))
    return f"{time.strftime('%d %B %Y')}\n{processor}\n{versions}\n"


def run(suite: str, output: Path, device: str, only: str = "", log: Callable[[str], None] = print) -> Path:
    """Run a suite and write `output`/<suite>.csv row by row; failed measurements are logged and left out.

    Raises an error if no label matches `only` or all measurements fail; then no file is written.

    Args:
        suite: a key of SUITES.
        output: folder for the CSV file.
        device: "cuda" or "cpu".
        only: a regular expression that labels must match.
        log: called with one line per measurement.
    """
    path = output / f"{suite}.csv"
    labels, failed = [], 0
    with ExitStack() as stack:
        writer = None
        for label, measure in SUITES[suite](device):
            labels.append(label)
            if not re.search(only, label):
                continue
            start = time.perf_counter()
            try:
                row = measure().as_dict()
            except Exception as error:  # the other measurements must still run
                log(f"{label}: FAILED, {type(error).__name__}: {str(error)[:300]}")
                failed += 1
                continue
            if writer is None:
                output.mkdir(parents=True, exist_ok=True)
                file = stack.enter_context(path.open("w", newline=""))
                writer = csv.DictWriter(file, list(row))
                writer.writeheader()
            writer.writerow({k: f"{v:.4g}" if isinstance(v, float) else v for k, v in row.items()})
            file.flush()
            numbers = ", ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float))
            log(f"{label}: {numbers} ({time.perf_counter() - start:.0f} s)")
    if writer is None and not failed:
        raise ValueError(
            f"--only {only!r} matches none of the {len(labels)} measurements of suite {suite!r}; labels look like"
            f" {labels[0]!r}"
        )
    if writer is None:
        raise RuntimeError(f"all {failed} measurements of suite {suite!r} failed; {path} is not written")
    return path
