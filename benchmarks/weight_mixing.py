"""Adaptive weight mixing on a GPU: errors, then times.

    python benchmarks/weight_mixing.py [tune] [model]

Prints the time of each kernel and the time its bytes take, of the operator, and of the module in the paper's third
stage. With `tune`, block sizes are tried; with `model`, the compiled model in the authors' sizes is timed.
"""

import functools
import itertools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench_cudagraph

import tokamix
from tokamix.bench.timing import median_ms, peak_gb, relative_rmse
from tokamix.mixers import WeightMixing
from tokamix.models.amixer import RELEASED
from tokamix.ops import bank_mixing
from tokamix.ops.weight_mixing import kernels
from tokamix.ops.weight_mixing.op import _empty_sums

BANDWIDTH = 4.3e9  # bytes per millisecond
BATCH = 128
CASES = {  # side, window, shift, heads, head dim, bank
    "supplement 3": (14, 14, 0, 24, 16, 36),
    "released 1": (56, 7, 3, 3, 32, 4),
    "released 2": (28, 7, 3, 6, 32, 9),
    "released 3": (14, 14, 0, 12, 32, 18),
    "released 4": (7, 7, 0, 24, 32, 36),
}
TUNED = ("supplement 3", "released 3", "released 1")
VARIANTS: dict[str, dict[str, tuple[int, ...]]] = {
    "compose": {
        "compose_p": (64, 128),
        "compose_warps": (4, 8),
        "compose_programs": (1024, 4096),
    },
    "mix": {"tiled": (False,), "mix_block": (16, 32, 64), "mix_warps": (1, 2, 4, 8)},
    "mix_backward": {
        "tiled": (False,),
        "mix_backward_rows": (64, 128, 256),
        "mix_backward_block": (32, 64),
        "mix_backward_warps": (4, 8),
    },
    "compose_backward": {
        "compose_backward_p": (32, 64, 128),
        "compose_backward_warps": (4, 8),
        "compose_backward_programs": (256, 1024),
    },
}


def inputs(case: str, batch: int = BATCH, dtype: torch.dtype = torch.bfloat16) -> tuple[tuple[Tensor, ...], tuple]:
    """v, policy and bank, and the operator's options."""
    side, window, shift, heads, dim, size = CASES[case]
    torch.manual_seed(0)
    v = torch.randn(batch, side**2, heads, dim, device="cuda", dtype=dtype)
    policy = torch.randn(batch, side**2, size, heads, device="cuda", dtype=dtype)
    bank = torch.randn(size, (2 * window - 1) ** 2, device="cuda") / size**0.5
    return (v, policy, bank), ((side, side), (window, window), (shift, shift), True, "softmax")


def phases(case: str, **overrides: int) -> dict[str, Callable[[], object]]:
    """The four kernels of a forward and a backward pass, separately."""
    (v, policy, bank), options = inputs(case)
    plan = kernels.Plan(v.shape, v.dtype, bank.shape, *options)
    vars(plan).update(overrides)
    _, _, logits = next(plan.parts(v.device))
    sums, out, grad, grad_v, grad_policy = (
        _empty_sums(v, options[1], "softmax"), *(torch.randn_like(v) for _ in range(2)), torch.empty_like(v),
        torch.empty_like(policy),
    )  # fmt: skip
    plan.compose(policy, bank, logits)
    return {
        "compose": lambda: plan.compose(policy, bank, logits),
        "mix": lambda: plan.mix(logits, v, out, sums),
        "mix_backward": lambda: plan.mix_backward(logits, v, out, sums.zero_(), grad, grad_v),
        "compose_backward": lambda: plan.compose_backward(logits, policy, bank, grad_policy),
    }


def limit(case: str, phase: str) -> float:
    """Milliseconds that the memory traffic of a kernel takes."""
    side, window, _, heads, dim, size = CASES[case]
    tokens = BATCH * side**2 * heads
    logits, values, policy = tokens * window**2, tokens * dim, tokens * size
    elements = {
        "compose": logits + policy,
        "mix": logits + 2 * values,
        "mix_backward": 2 * logits + 4 * values,
        "compose_backward": logits + 2 * policy,
    }
    return elements[phase] * 2 / BANDWIDTH


def variants(phase: str) -> list[dict[str, int]]:
    names = VARIANTS[phase]
    return [dict(zip(names, values, strict=True)) for values in itertools.product(*names.values())]


def compile_variant(case: str, phase: str, overrides: dict[str, int]) -> None:
    try:
        phases(case, **overrides)[phase]()
        torch.cuda.synchronize()
    except Exception:
        pass  # reported where it is timed


def tune() -> None:
    start = time.time()
    jobs = [(c, p, v) for c in TUNED for p in VARIANTS for v in variants(p)]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:  # fills Triton's cache
        list(pool.map(compile_variant, *zip(*jobs, strict=True), chunksize=4))
    print(f"compiled {len(jobs)} in {time.time() - start:.0f} s")
    for case, phase in itertools.product(TUNED, VARIANTS):
        rows, failed = [], []
        for overrides in variants(phase):
            try:
                ms = do_bench_cudagraph(phases(case, **overrides)[phase], rep=4)
                rows.append((ms, tuple(overrides.values())))
            except Exception as error:
                failed.append(f"{tuple(overrides.values())} {type(error).__name__}: {str(error)[:60]}")
        rows.sort()
        listed = ", ".join(f"{values} {ms * 1e3:.0f}" for ms, values in rows)
        print(f"{case:13s} {phase:17s} limit {limit(case, phase) * 1e3:.0f} us: {listed}", flush=True)
        for line in failed[:2]:
            print("    failed", line)


def errors() -> None:
    """Relative error of output and gradients against float64, and that of plain PyTorch in the same precision."""
    jobs = list(itertools.product((torch.bfloat16, torch.float16, torch.float32), CASES))
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:  # Triton compiles in parallel
        for line in pool.map(error, *zip(*jobs, strict=True)):
            print(line, flush=True)


def error(dtype: torch.dtype, case: str) -> str:
    tensors, options = inputs(case, 2, dtype)
    results = []
    for cast, backend in ((torch.float64, "eager"), (dtype, "eager"), (dtype, "triton")):
        leaves = [t.to(dtype).to(cast).requires_grad_() for t in tensors]
        out = bank_mixing(*leaves, *options, backend=backend)
        seed = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(cast)
        results.append((out, *torch.autograd.grad(out, leaves, seed)))
    line = "  ".join(f"{relative_rmse(k, e):.1e} ({relative_rmse(p, e):.1e})" for e, p, k in zip(*results, strict=True))
    return f"error {str(dtype)[6:]:9s} {case:13s}: {line}"


def table() -> None:
    for case in CASES:
        parts = phases(case)
        line = ", ".join(
            f"{phase} {do_bench_cudagraph(run, rep=10) * 1e3:.0f} ({limit(case, phase) * 1e3:.0f})"
            for phase, run in parts.items()
        )
        print(f"{case:13s} us (limit): {line}", flush=True)


def module() -> None:
    """The paper's third stage under autocast: 128 x 196 x 384, 24 heads, 36 bank entries."""
    mixer = WeightMixing(384, (14, 14), num_heads=24, bank_size=36).cuda()
    x = torch.randn(BATCH, 196, 384, device="cuda", requires_grad=True)

    def run(call: Callable[..., Tensor], train: bool) -> None:
        with torch.autocast("cuda", torch.bfloat16), torch.set_grad_enabled(train):
            out = call(x, (14, 14))
        if train:
            out.sum().backward()

    for name, call in (("eager", mixer), ("compiled", torch.compile(mixer))):
        forward, both = (median_ms(functools.partial(run, call, train), "cuda", seconds=0.3) for train in (False, True))
        recorded = median_ms(functools.partial(run, call, False), "cuda", seconds=0.3, graph=True)
        peak = peak_gb(functools.partial(run, call, True))
        print(
            f"module {name:9s} forward {forward:.3f} ms ({recorded:.3f} in a CUDA graph),"
            f" forward+backward {both:.3f} ms, peak {peak:.2f} GB",
            flush=True,
        )


def model() -> None:
    images = torch.randn(BATCH, 3, 224, 224, device="cuda")
    targets = torch.randint(1000, (BATCH,), device="cuda")
    net = tokamix.create_model("amixer_tiny", **RELEASED["amixer_t"]).cuda()
    compiled = torch.compile(net)

    def train() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = F.cross_entropy(compiled(images), targets)
        loss.backward()
        net.zero_grad()

    ms = median_ms(train, "cuda", seconds=1)
    print(f"amixer_tiny training {BATCH / ms * 1e3:.0f} img/s, peak {peak_gb(train):.2f} GB", flush=True)
    net = net.eval().bfloat16()
    compiled = torch.compile(net)
    images = images.bfloat16()
    with torch.inference_mode():
        ms = median_ms(lambda: compiled(images), "cuda", seconds=1)
        graph = median_ms(lambda: compiled(images), "cuda", seconds=1, graph=True)
    print(f"amixer_tiny inference {BATCH / ms * 1e3:.0f} img/s, in a CUDA graph {BATCH / graph * 1e3:.0f}", flush=True)


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    steps = [errors, table, module]
    steps += [step for step in (tune, model) if step.__name__ in sys.argv]
    for step in steps:
        try:
            step()
        except Exception as error:
            print(f"{step.__name__} failed: {type(error).__name__} {str(error)[:400]}", flush=True)


if __name__ == "__main__":
    main()
