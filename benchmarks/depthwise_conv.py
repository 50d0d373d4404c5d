"""Kernels of the depthwise convolution on a GPU: errors, then times against cuDNN.

    python benchmarks/depthwise_conv.py [tune]

With `tune`, all plans are timed for the shapes in the models.
"""

import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import torch
import torch.nn.functional as F
from torch import Tensor
from triton.testing import do_bench_cudagraph

from tokamix.bench.timing import relative_rmse
from tokamix.ops import depthwise_conv
from tokamix.ops.depthwise_conv import kernels
from tokamix.ops.depthwise_conv.kernels import Plan

BANDWIDTH = 4.3e9  # bytes per millisecond
CASES = {  # B, H, W, C, GELU
    "stvit_small ffn 1": (128, 56, 56, 256, True),
    "stvit_small ffn 2": (128, 28, 28, 512, True),
    "stvit_small ffn 3": (128, 14, 14, 1280, True),
    "stvit_small ffn 4": (128, 7, 7, 2048, True),
    "stvit_small cpe 1": (128, 56, 56, 64, False),
    "stvit_small cpe 3": (128, 14, 14, 320, False),
    "xcit_small lpi": (128, 14, 14, 384, False),
    "1024 px ffn 1": (8, 256, 256, 256, True),
}
TUNED = list(CASES)[:5]
PLANS = {
    "forward": [
        Plan(rows, block_c, columns, warps)
        for rows in (4, 7)
        for block_c, warps in ((64, 1), (128, 1), (256, 2))
        for columns in (28, 56)
    ],
    "backward": [
        Plan(rows, block_c, 28, programs=132 * programs)
        for rows, block_c in ((2, 64), (2, 128), (4, 64), (4, 128), (7, 64))
        for programs in (8, 12, 16, 24)
    ],
}


def inputs(case: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    *shape, _ = CASES[case]
    torch.manual_seed(0)
    x, grad = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(2))
    return x, grad, torch.randn(shape[-1], 1, 3, 3, device="cuda") / 9, torch.randn(shape[-1], device="cuda")


def runner(direction: str, case: str, plan: Plan | None) -> Callable[[], object]:
    (x, grad, weight, bias), gelu = inputs(case), CASES[case][-1]
    if direction == "forward":
        return lambda: kernels.forward(x, weight, bias, True, gelu, plan)
    return lambda: kernels.backward(grad, x, weight, True, gelu, plan)


def compile_plans(direction: str, case: str, part: int) -> None:
    seen = set()
    for plan in PLANS[direction]:
        key = (*plan[:2], plan.warps)
        if key not in seen and len(seen) % 3 == part:
            runner(direction, case, plan)()
        seen.add(key)


def tune() -> None:
    start = time.time()
    jobs = [(d, c, part) for d in PLANS for c in ("stvit_small ffn 4", "stvit_small cpe 1") for part in range(3)]
    with ProcessPoolExecutor(14, mp_context=get_context("spawn")) as pool:  # fills Triton's cache
        list(pool.map(compile_plans, *zip(*jobs, strict=True)))
    print(f"compiled in {time.time() - start:.0f} s")
    for direction in PLANS:
        for case in TUNED:
            rows = []
            for plan in PLANS[direction]:
                try:
                    rows.append((do_bench_cudagraph(runner(direction, case, plan), rep=5), plan))
                except Exception as error:
                    print(f"  {direction} {case} {tuple(plan)}: {type(error).__name__} {str(error)[:80]}")
            rows.sort()
            best = ", ".join(f"{tuple(plan)} {ms * 1e3:.0f}" for ms, plan in rows[:6])
            print(f"{direction:8s} {case:18s} limit {limit(direction, case) * 1e3:.0f} us: {best}", flush=True)


def limit(direction: str, case: str) -> float:
    batch, height, width, channels, _ = CASES[case]
    return (2 if direction == "forward" else 3) * batch * height * width * channels * 2 / BANDWIDTH


def errors() -> None:
    """Relative error of output and gradients against float64, and that of plain PyTorch in the same precision."""
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for gelu in (False, True):
            leaves = [
                t.to("cuda", dtype) for t in (torch.randn(2, 9, 11, 72), torch.randn(72, 1, 3, 3), torch.randn(72))
            ]
            results = []
            for cast, backend in ((torch.float64, "eager"), (dtype, "eager"), (dtype, "triton")):
                own = [t.to(cast).requires_grad_() for t in leaves]
                out = depthwise_conv(*own, residual=True, gelu=gelu, backend=backend)
                seed = torch.linspace(-1, 1, out.numel(), device="cuda").view(out.shape).to(cast)
                results.append((out, *torch.autograd.grad(out, own, seed)))
            line = " ".join(
                f"{relative_rmse(k, e):.1e} ({relative_rmse(p, e):.1e})" for e, p, k in zip(*results, strict=True)
            )
            print(f"error {str(dtype)[6:]:9s} gelu {gelu!s:5s}: {line}")


def table() -> None:
    for case in CASES:
        try:
            print(row(case), flush=True)
        except Exception as error:
            print(f"{case}: {type(error).__name__} {str(error)[:200]}")


def row(case: str) -> str:
    (x, grad, weight, bias), gelu = inputs(case), CASES[case][-1]
    forward, backward = (do_bench_cudagraph(runner(d, case, None), rep=20) for d in PLANS)
    planes, weight, bias = x.permute(0, 3, 1, 2), weight.bfloat16(), bias.bfloat16()
    channels = x.shape[-1]

    def cudnn() -> None:
        z = F.gelu(planes) if gelu else planes
        z + F.conv2d(z, weight, bias, padding=1, groups=channels)

    def cudnn_backward() -> None:
        torch.ops.aten.convolution_backward(
            grad.permute(0, 3, 1, 2), planes, weight, [channels], [1, 1], [1, 1], [1, 1], False, [0, 0], channels,
            [True, True, True],
        )  # fmt: skip

    times = [do_bench_cudagraph(f, rep=20) for f in (cudnn, cudnn_backward)]
    return (
        f"{case:18s} forward {forward:.3f} (limit {limit('forward', case):.3f}, cuDNN and pointwise {times[0]:.3f})"
        f" backward {backward:.3f} (limit {limit('backward', case):.3f}, cuDNN alone {times[1]:.3f}) ms"
    )


def main() -> None:
    print(torch.cuda.get_device_name(), torch.__version__)
    errors()
    if "tune" in sys.argv:
        tune()
    table()


if __name__ == "__main__":
    main()
