"""Suites of measurements, and the function that runs one and writes its rows as CSV."""

import math
import platform
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from tokamix.bench import models, ops, scaling, softmax
from tokamix.bench.rows import RowFile
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
GRAPHS = "reduce-overhead"  # the mode of torch.compile that replays CUDA graphs
OUR_NAMES = " ".join(dict(OURS))
# mode, side of the images, batch, mode of torch.compile, models
TARGETS: tuple[tuple[str, int, int, str, str], ...] = (
    ("infer", 224, 1, GRAPHS, "atmnet_tiny convnext_tiny stvit_small deit_small_patch16_224"),
    ("infer", 224, 1, "graphed", "atmnet_tiny convnext_tiny stvit_small deit_small_patch16_224"),
    ("infer", 224, 128, GRAPHS, f"{OUR_NAMES} convnext_tiny caformer_s18 efficientvit_l1"),
    ("infer", 1024, 8, GRAPHS, "stvit_small convnext_tiny atmnet_tiny"),
    ("train", 224, 128, GRAPHS, f"{OUR_NAMES} convnext_tiny hiera_tiny_224"),
)
LARGE: tuple[tuple[str, dict[str, Any]], ...] = (
    ("stvit_small", {}),
    ("atmnet_tiny", {}),
    ("deit_small_sima", {"img_size": 1024}),
    ("deit_small_patch16_224", {"img_size": 1024}),
    ("convnext_tiny", {}),
)

H200 = ("ops", "scaling", "models")  # the source of docs/benchmarks.md
# largest images: ours, then timm's; those with position embeddings need the size
LARGE_IMAGES = (
    *("stvit_small", "convnext_tiny", "deit_small_sima", "deit_small_patch16_224", "atmnet_tiny"),
    *("swin_tiny_patch4_window7_224", "xcit_small_12_p16_sima", "amixer_tiny"),
)
SIZED = ("deit_", "swin_")  # models that are created for one image size

Measurement = tuple[str, Callable[[], Any]]  # label, function that returns the row
Case = tuple[str, str, Callable[[], models.Timed]]  # group, label, function that creates what is timed


def model_cases(device: str) -> Iterator[Case]:
    """Our models without CUDA graphs, which also gives their memory; then all models with them."""
    small = [(name, mode, 224, 128, kwargs) for mode in ("infer", "train") for name, kwargs in (*OURS, *PEERS)]
    large = [(name, "infer", 1024, 8, kwargs) for name, kwargs in LARGE]
    ours = [case for case in small if case[0] in dict(OURS)]
    for compiled, cases in (("default", ours), (GRAPHS, small + large)):
        for name, mode, size, batch, kwargs in cases:
            create = partial(models.TimedModel, name, mode, size, batch, compiled, device=device, **kwargs)
            yield compiled, f"{name} {mode} {size} {compiled}", create


def target_cases(device: str) -> Iterator[Case]:
    """The rows of the table of speed targets in docs/benchmarks.md, ours and peers in turn, most wanted first."""
    from tokamix.bench import detectors

    for mode, size, batch, compiled, names in TARGETS:
        for name in names.split():
            create = partial(models.TimedModel, name, mode, size, batch, compiled, device=device)
            way = {"default": f"{mode} compiled", GRAPHS: f"{mode} graphs"}.get(compiled, compiled)
            yield mode, f"{way}: {name}, {size} px, batch {batch}", create
    for compiled in ("eager", "best"):
        for name, best in detectors.BEST_MODE.items():
            make = partial(detectors.TimedDetector, name, best if compiled == "best" else "", device=device)
            yield "train", f"detect {compiled}: {name}", make  # they compile as long as training


CASES: dict[str, Callable[[str], Iterator[Case]]] = {"models": model_cases, "targets": target_cases}


def _timed(suite: str, device: str) -> Iterator[Measurement]:
    for _, label, create in CASES[suite](device):
        yield label, partial(models.measure, create)


def list_launches(suite: str, device: str) -> list[Callable[[], None]]:
    """Calls that compile the kernels of a suite, to be made in processes of their own; not all suites have them."""
    if suite == "scaling":
        return [partial(scaling.launch_mixer, name, device) for name in scaling.OURS]
    if suite == "images":
        ours = [name for name in LARGE_IMAGES if name in dict(OURS)]
        sized = {name: {"img_size": min(scaling.IMAGE_SIZES)} if name.startswith(SIZED) else {} for name in ours}
        return [partial(scaling.launch_image, n, mode, device, **sized[n]) for n in ours for mode in ("infer", "train")]
    return []


def _scaling(device: str) -> Iterator[Measurement]:
    for side in scaling.SIDES:
        for name in (*scaling.OURS, *scaling.PEERS):
            yield f"{name}, side {side}", partial(scaling.measure_mixer, name, side, device)


def _images(device: str) -> Iterator[Measurement]:
    for size in scaling.IMAGE_SIZES:
        for mode in ("infer", "train"):
            for name in LARGE_IMAGES:
                kwargs = {"img_size": size} if name.startswith(SIZED) else {}
                yield f"{name} {mode} {size} px", partial(scaling.measure_image, name, mode, size, device, **kwargs)


def _ops(device: str) -> Iterator[Measurement]:
    for case in ops.model_cases():
        for backend in case.backends if device == "cuda" else case.backends[-1:]:  # kernels need a GPU
            label = f"{case.op} {backend}: {case.case}, {case.tokens} tokens"
            yield label, partial(ops.measure, case, backend, device)


def _mixers(device: str) -> Iterator[Measurement]:
    for mixer in list_mixers():
        name = f"columnar_small_{mixer}"
        yield f"{name} infer 224", partial(models.measure, partial(models.TimedModel, name, device=device))


def _softmax(device: str) -> Iterator[Measurement]:
    """SimA's figure 1: by resolution, then by width; the largest images on a GPU only."""
    for size in (224, 384, 512, 768, 1024, *((1536,) if device == "cuda" else ())):
        yield f"softmax self-attention {size} px, width 384", partial(softmax.measure_softmax, size, 384, device)
    for width in (384, 1024, 2048, 4096, 8192):
        measure = partial(softmax.measure_softmax, 224, width, device, attention="cross-covariance")
        yield f"softmax cross-covariance 224 px, width {width}", measure


SUITES: dict[str, Callable[[str], Iterator[Measurement]]] = {
    "ops": _ops,
    "scaling": _scaling,
    "models": partial(_timed, "models"),
    "mixers": _mixers,
    "softmax": _softmax,
    "images": _images,
    "targets": partial(_timed, "targets"),
}

# suite -> function that draws the rows of its CSV file into an image file
PLOTS: dict[str, Callable[[Path, Path], None]] = {"softmax": softmax.draw_softmax}


def environment(device: str) -> str:
    """Date, processor and versions of a measurement, one per line."""
    processor = torch.cuda.get_device_name() if device == "cuda" else platform.processor() or "CPU"
    if device == "cuda" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        processor += ", " + subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    versions = " ".join(f"{name} {version(name)}" for name in ("torch", "triton", "timm") if find_spec(name))
    return f"{time.strftime('%d %B %Y')}\n{processor}\n{versions}\n"


def run(
    suite: str,
    output: Path,
    device: str,
    only: str = "",
    log: Callable[[str], None] = print,
    resume: bool = False,
    deadline: float = math.inf,
) -> Path:
    """Run a suite and write `output`/<suite>.csv row by row; failed measurements are logged and left out.

    Raises an error if no label matches `only` or all measurements fail; then no file is written.

    Args:
        suite: a key of SUITES.
        output: folder for the CSV file.
        device: "cuda" or "cpu".
        only: a regular expression that labels must match.
        log: called with one line per measurement.
        resume: keep the rows of the file and measure only what is missing.
        deadline: value of `time.monotonic()` after which no measurement begins.
    """
    path = output / f"{suite}.csv"
    rows = RowFile(path, keep=resume)
    labels, failed, missing, measured = [], 0, 0, 0
    for label, measure in SUITES[suite](device):
        labels.append(label)
        if not re.search(only, label) or label in rows.labels:
            continue
        if time.monotonic() > deadline:
            missing += 1
            continue
        start = time.perf_counter()
        try:
            row = measure().as_dict()
        except Exception as error:  # the other measurements must still run
            log(f"{label}: FAILED, {type(error).__name__}: {str(error)[:300]}")
            failed += 1
            continue
        rows.append(label, row, device)
        measured += 1
        numbers = ", ".join(f"{k} {v:.4g}" for k, v in row.items() if isinstance(v, float))
        log(f"{label}: {numbers} ({time.perf_counter() - start:.0f} s)")
    if missing:
        log(f"stopped at the deadline: {missing} measurements of suite {suite!r} are missing; run it again to resume")
    if not any(re.search(only, label) for label in labels):
        raise ValueError(
            f"--only {only!r} matches none of the {len(labels)} measurements of suite {suite!r}; labels look like"
            f" {labels[0]!r}"
        )
    if failed and not measured:
        raise RuntimeError(f"all {failed} measurements of suite {suite!r} failed; {path} is not written")
    return path
