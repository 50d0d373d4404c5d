"""SimA's kernels on a GPU: errors, then times.

    python benchmarks/sima.py [tune]

With `tune`, all plans are timed for the shapes in the models; otherwise only the plans that the library chooses.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench, do_bench_cudagraph

from tokamix.bench.timing import relative_rmse
from tokamix.ops import sima_attention, sima_self_attention
from tokamix.ops.sima import kernels
from tokamix.ops.sima.kernels import Plan

BANDWIDTH = 4.3e9  # bytes per millisecond
CASES = {  # batch, heads, tokens, head dim
    "deit_small 224": (128, 6, 197, 64),
    "xcit_small p16 224": (128, 8, 196, 48),
    "xcit_small p8 224": (32, 8, 784, 48),
    "1k tokens": (8, 6, 1024, 64),
    "4k tokens": (8, 6, 4096, 64),
    "16k tokens": (8, 6, 16384, 64),
    "64k tokens": (1, 6, 65536, 64),
}
BLOCKS = {  # tokens per step, warps, stages, registers
    "forward": [
        *((256, 4, 1, None), (128, 4, 1, None), (128, 4, 1, 168), (128, 4, 2, None), (64, 4, 1, None), (64, 4, 1, 128)),
        *((64, 4, 2, None), (64, 4, 2, 128), (64, 4, 3, None), (64, 4, 3, 128)),
    ],
    "backward": [
        *((64, 4, 1, None), (64, 4, 1, 168), (64, 4, 2, None), (64, 4, 2, 168), (64, 4, 3, None), (64, 8, 2, None)),
        *((64, 8, 2, 104), (32, 4, 2, 168), (32, 4, 3, None), (128, 8, 2, None)),
    ],
}


def inputs(case: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    batch, heads, tokens, dim = CASES[case]
    torch.manual_seed(0)
    qkv = torch.randn(batch, tokens, 3, heads, dim, device="cuda", dtype=dtype)
    return qkv, torch.randn(batch, tokens, heads, dim, device="cuda", dtype=dtype)


def runner(direction: str, qkv: Tensor, do: Tensor, plan: Plan | None) -> Callable[[], object]:
    q, k, v = qkv.unbind(2)
    if direction == "forward":
        return lambda: kernels.forward(q, k, v, "l1", 1e-12, plan)
    grads = (torch.empty_like(qkv),)
    return lambda: kernels.backward(do, q, k, v, grads, "l1", 1e-12, plan)


def plans(direction: str, case: str) -> list[Plan]:
    batch, heads, tokens, _ = CASES[case]
    blocks = [b for b in BLOCKS[direction] if b[0] < 256 or tokens <= 256]
    single = [Plan(*b[:3], registers=b[3]) for b in blocks] if tokens <= 1024 else []
    if tokens <= 512 or batch * heads >= 264:
        return single
    programs = (264, 528, 1056)
    return single + [Plan(*b[:3], -(-n // (batch * heads)), b[3]) for b in blocks if b[0] < 256 for n in programs]


def compile_plans(direction: str, case: str) -> None:
    for plan in plans(direction, case):
        try:
            runner(direction, *inputs(case), plan)()
            torch.cuda.synchronize()
        except Exception:
            pass  # reported when it is timed


def limit(direction: str, case: str) -> float:
    batch, heads, tokens, dim = CASES[case]
    return (4 if direction == "forward" else 7) * batch * heads * tokens * dim * 2 / BANDWIDTH


def tune() -> None:
    jobs = [(direction, case) for direction in BLOCKS for case in CASES]
    start = time.time()
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:  # fills Triton's cache
        list(pool.map(compile_plans, *zip(*jobs, strict=True)))
    print(f"compiled in {time.time() - start:.0f} s")
    for direction, case in jobs:
        rows = []
        for plan in plans(direction, case):
            try:
                rows.append((do_bench_cudagraph(runner(direction, *inputs(case), plan), rep=10), plan))
            except Exception as error:
                print(f"  {direction} {case} {tuple(plan)}: {type(error).__name__} {str(error)[:80]}")
        rows.sort()
        best = ", ".join(f"{tuple(plan)} {ms * 1e3:.1f}" for ms, plan in rows[:6])
        print(
            f"{direction:8s} {case:18s} limit {limit(direction, case) * 1e3:.1f} us: {best} ... {rows[-1][0] * 1e3:.1f}"
        )


def errors() -> None:
    """Relative error of outputs and gradients against float64, and that of plain PyTorch in the same precision."""
    for batch, heads, tokens, dim in (
        (2, 3, 197, 64),
        (2, 2, 1, 16),
        (1, 2, 1500, 48),
        (1, 1, 3000, 128),
        (2, 2, 77, 33),
    ):
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            if dtype == torch.float32 and dim > 64:
                continue
            qkv = torch.randn(batch, tokens, 3, heads, dim, device="cuda", dtype=dtype)
            seed = torch.randn(batch, tokens, heads * dim, device="cuda", dtype=dtype)
            results = []
            for x, backend in ((qkv.double(), "eager"), (qkv, "eager"), (qkv, "triton")):
                x = x.detach().requires_grad_()
                out = sima_self_attention(x, order="linear", backend=backend)
                results.append((out, *torch.autograd.grad(out, x, seed.to(x.dtype))))
            exact, plain, kernel = results
            line = " ".join(
                f"{relative_rmse(k, e):.1e} ({relative_rmse(p, e):.1e})"
                for e, p, k in zip(exact, plain, kernel, strict=True)
            )
            print(f"error {str(dtype)[6:]:9s} N {tokens:5d} D {dim:3d}: {line}")


def table() -> None:
    """The public operator with the library's plans: in a CUDA graph, and called from Python."""
    for case in CASES:
        try:
            print(row(case))
        except Exception as error:
            print(f"{case}: {type(error).__name__} {str(error)[:200]}")


def row(case: str) -> str:
    qkv, do = inputs(case)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    dense = [x.contiguous() for x in (q, k, v)]
    leaf, seed = qkv.detach().requires_grad_(), do.flatten(2)
    forward, backward = (do_bench_cudagraph(runner(d, qkv, do, None), rep=20) for d in BLOCKS)
    called = do_bench(lambda: sima_attention(q, k, v))
    called_both = do_bench(lambda: torch.autograd.grad(sima_self_attention(leaf), leaf, seed))
    flash = do_bench_cudagraph(lambda: F.scaled_dot_product_attention(*dense), rep=20)
    return (
        f"{case:18s} graph: forward {forward:.4f} (limit {limit('forward', case):.4f}) backward {backward:.4f}"
        f" (limit {limit('backward', case):.4f}) both {forward + backward:.4f}; called: forward {called:.4f}"
        f" both {called_both:.4f}; FlashAttention forward {flash:.4f} ms"
    )


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    errors()
    if "tune" in sys.argv:
        tune()
    table()


if __name__ == "__main__":
    main()
