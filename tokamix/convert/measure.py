"""Speed and memory of a classifier at several image sizes, on the machine that converts it."""

import copy
import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import psutil
import torch
from torch import Tensor, nn

from tokamix.bench.timing import median_ms, peak_gb
from tokamix.convert.report import Speed

SECONDS = 0.5  # repetitions of a forward pass that is timed
LIMITS = {"cpu": 20.0, "cuda": 5.0}  # seconds of a forward pass, above which a size is left out; a GPU runs 12 of them
OUT_OF_MEMORY = ("out of memory", "not enough memory", "can't allocate memory")


def measure_speeds(model: nn.Module, sizes: Sequence[int], in_chans: int, device: torch.device) -> list[Speed]:
    """Time forward passes of a classifier; a size that it does not accept or that does not fit has a reason instead.

    In bfloat16 with 8 images on a GPU, fewer above 512 px; in float32 with one image on a CPU. Peak memory includes the
    weights on a GPU; on a CPU it is the growth of the process.
    """
    cuda = device.type == "cuda"
    network = copy.deepcopy(model).to(device, torch.bfloat16 if cuda else torch.float32).eval()
    rows: list[Speed] = []
    for size in sizes:
        last = next((row for row in reversed(rows) if row.milliseconds), None)
        batch = max(1, min(8, 8 * 512**2 // size**2)) if cuda else 1
        # attention is quadratic in the pixels
        expected = last.milliseconds / 1e3 * (size / last.size) ** 4 if last and last.milliseconds else 0.0
        if expected * batch > LIMITS["cuda" if cuda else "cpu"]:
            rows.append(Speed(size, problem=f"left out: up to {expected:.0f} s per image"))
            continue
        try:
            rows.append(_measure(network, size, in_chans, batch, device))
        except (RuntimeError, ValueError, AssertionError, MemoryError) as error:
            full = isinstance(error, MemoryError) or any(text in str(error).lower() for text in OUT_OF_MEMORY)
            text = str(error).strip().splitlines()
            reason = "does not fit into memory" if full else text[0] if text else type(error).__name__
            rows.append(Speed(size, problem=reason))
            if cuda:
                torch.cuda.empty_cache()
    return rows


@torch.inference_mode()
def _measure(model: Any, size: int, in_chans: int, batch: int, device: torch.device) -> Speed:
    if hasattr(model, "set_input_size"):
        model.set_input_size(img_size=size)
    dtype = next(model.parameters()).dtype
    images = torch.randn(batch, in_chans, size, size, generator=torch.Generator().manual_seed(0)).to(device, dtype)

    def run() -> Tensor:
        return model(images)

    milliseconds = median_ms(run, device.type, SECONDS)
    memory = peak_gb(run) if device.type == "cuda" else _process_growth_gb(run)
    return Speed(size, milliseconds / batch, memory)


def _process_growth_gb(run: Callable[[], object]) -> float:
    """Peak growth of the process's memory during a call in GB, sampled every millisecond."""
    # glibc keeps freed memory, in which a call that was timed before would run without any growth
    with suppress(OSError, AttributeError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)
    process, done = psutil.Process(), threading.Event()
    before = peak = process.memory_info().rss

    def watch() -> None:
        nonlocal peak
        while not done.is_set():
            peak = max(peak, process.memory_info().rss)
            time.sleep(0.001)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        run()
    finally:
        done.set()
        thread.join()
    return (peak - before) / 1e9
