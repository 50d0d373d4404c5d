"""Timing with CUDA events or a clock: the median of many runs after a warm-up; memory; profiles; errors."""

import statistics
import time
from collections.abc import Callable, Sequence
from operator import attrgetter

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from tokamix.compile import capture_graph

WARM_UP, MIN_ROUNDS, MAX_ROUNDS = 3, 7, 200


def median_ms(run: Callable[[], object], device: str, seconds: float = 1.0, graph: bool = False) -> float:
    """Median milliseconds of `run()` over about `seconds`, after a warm-up; `graph` replays a CUDA graph of it."""
    for _ in range(3):
        run()
    if device != "cuda":
        return _median_on_cpu(run, seconds)
    torch.cuda.synchronize()
    if graph:
        cuda_graph = torch.cuda.CUDAGraph()
        with capture_graph(cuda_graph):
            run()
        run = cuda_graph.replay
    estimate = _events_ms(run, 3) / 3
    repeats = max(5, min(200, int(seconds * 1e3 / max(estimate, 1e-3))))
    # short calls are timed in groups, which makes the cost of the events negligible
    group = max(1, int(0.2 / max(estimate, 1e-4)))
    return statistics.median(_events_ms(run, group) / group for _ in range(repeats))


def in_turn_ms(runs: Sequence[Callable[[], object]], device: str, seconds: float = 1.0) -> list[list[float]]:
    """Times in ms of calls that run in turn, so that other load on the machine hits all alike.

    Args:
        runs: the calls; each is warmed up first.
        device: "cpu" or "cuda".
        seconds: time of all together; each runs at least seven times.
    """
    for _ in range(WARM_UP):
        for run in runs:
            run()
    # short calls are timed in groups, which makes the cost of the clock negligible
    groups = [max(1, int(0.2 / max(_time_ms(run, 1, device), 1e-4))) for run in runs]
    times: list[list[float]] = [[] for _ in runs]
    start = time.perf_counter()
    while len(times[-1]) < MIN_ROUNDS or (time.perf_counter() - start < seconds and len(times[-1]) < MAX_ROUNDS):
        for run, group, values in zip(runs, groups, times, strict=True):
            values.append(_time_ms(run, group, device) / group)
    return times


def median_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """The median, and half the range between the quartiles."""
    low, median, high = statistics.quantiles(values, n=4)
    return median, (high - low) / 2


def _time_ms(run: Callable[[], object], times: int, device: str) -> float:
    if device == "cuda":
        return _events_ms(run, times)
    start = time.perf_counter()
    for _ in range(times):
        run()
    return 1e3 * (time.perf_counter() - start)


def _events_ms(run: Callable[[], object], times: int) -> float:
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        run()
    stop.record()
    stop.synchronize()
    return start.elapsed_time(stop)


def _median_on_cpu(run: Callable[[], object], seconds: float) -> float:
    times: list[float] = []
    while len(times) < 5 or (sum(times) < seconds and len(times) < 200):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return statistics.median(times) * 1e3


def list_costs(run: Callable[[], object], device: str, calls: int = 1) -> list[tuple[str, int, float]]:
    """The kernels of `run()` (on a CPU: operators), the slowest first: name, number and milliseconds of a call."""
    cuda = device == "cuda"
    activity = ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU
    with profile(activities=[activity]) as record:
        for _ in range(calls):
            run()
        if cuda:
            torch.cuda.synchronize()
    own = attrgetter("self_device_time_total" if cuda else "self_cpu_time_total")
    events = sorted(record.key_averages(), key=own, reverse=True)
    return [(event.key, event.count // calls, own(event) / calls / 1e3) for event in events]


def print_costs(run: Callable[[], object], device: str, calls: int = 1, rows: int = 20) -> None:
    """Print the total time of `run()` and its slowest kernels (on a CPU: operators)."""
    costs = list_costs(run, device, calls)
    total, count = sum(ms for _, _, ms in costs), sum(times for _, times, _ in costs)
    print(f"{total:.2f} ms, {count} {'kernels' if device == 'cuda' else 'operators'}")
    for name, times, ms in costs[:rows]:
        print(f"{ms / total:6.1%} {ms:8.3f} ms {times:5d}x  {name[:110]}")


def peak_gb(run: Callable[[], object]) -> float:
    """Peak GPU memory of one `run()` in GB (10^9 bytes), weights and inputs included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 1e9


def relative_rmse(actual: Tensor, expected: Tensor) -> float:
    """||actual - expected|| / ||expected||, in float64."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm()).item()
