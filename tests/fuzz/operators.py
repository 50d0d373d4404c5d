"""Random shapes, dtypes, strides and values for all operators, against a float64 reference.

`python -m tests.fuzz.operators --count 10000 --seed 0`; `--only 123` repeats one case. On a GPU every case runs the
kernels. On a CPU every 100th case does, in Triton's interpreter, because that is slow; the others run plain PyTorch.

A result passes if it differs from float64 by no more than a change of the inputs' last bits can explain. Impossible
inputs pass if they give an error of ours, with a sentence, or the same result as in float64.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # before tokamix.ops is imported

import tokamix
from tests.ops.kernels import DEVICE, both_axes, relative_rmse, sample_and_scatter
from tokamix import ops

PACKAGE = str(Path(tokamix.__file__).parent)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
CHUNK = 100  # cases of one process
INTERPRETED = 100  # every 100th case, on a CPU
SIDES = (1, 2, 3, 5, 7, 8, 9, 14, 16, 17)
WIDTHS = (1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 32, 48)


class Wrong(AssertionError):
    """A result that is not correct, or an error that is not ours."""


@dataclass
class Case:
    """One call of an operator.

    Attributes:
        operator: its name.
        function: called with the tensors, `options`, and a backend where the operator has one.
        tensors: differentiable inputs.
        options: of the function.
        exact: indices of tensors on which the result depends with jumps; they are not perturbed.
        backends: whether the function takes a backend.
        differentiable: whether gradients are checked too.
    """

    operator: str
    function: Callable[..., Tensor]
    tensors: list[Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    exact: tuple[int, ...] = ()
    backends: bool = True
    differentiable: bool = True

    def __str__(self) -> str:
        shapes = ", ".join(f"{tuple(t.shape)} strides {t.stride()} {t.dtype}" for t in self.tensors)
        return f"{self.operator}({shapes}, {self.options})"


class Draw:
    """Random choices of one case, a function of (seed, number)."""

    def __init__(self, seed: int, number: int) -> None:
        self.rng = np.random.default_rng((seed, number))
        self.generator = torch.Generator().manual_seed(int(self.rng.integers(2**62)))

    def pick(self, values: Any) -> Any:
        return values[int(self.rng.integers(len(values)))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def values(self, *shape: int) -> Tensor:
        """Numbers of many kinds, float64."""
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64)
        kind = self.pick(("normal", "normal", "tiny", "large", "constant", "zeros", "sparse", "whole", "positive"))
        if kind == "tiny":
            return x * 1e-3
        if kind == "large":
            return x * 30
        if kind == "constant":
            return torch.full_like(x, float(self.pick((0.5, -1.0, 3.0))))
        if kind == "zeros":
            return torch.zeros_like(x)
        if kind == "sparse":
            return x * (torch.rand(shape, generator=self.generator) < 0.1)
        if kind == "whole":
            return x.mul(3).round()
        return x.abs() if kind == "positive" else x

    def offsets(self, *shape: int) -> Tensor:
        """Multiples of 1/8, which are sums of positions without rounding: the gradient jumps at whole numbers."""
        x = torch.randn(shape, generator=self.generator, dtype=torch.float64) * self.pick((0.5, 2, 10))
        far = torch.rand(shape, generator=self.generator) < 0.02
        return torch.where(far, x.sign() * 1024, (x * 8).round() / 8)

    def strides(self, x: Tensor) -> Tensor:
        """The same values in another memory layout."""
        kind = self.pick(("contiguous", "permuted", "sliced", "shifted", "expanded"))
        if kind == "permuted":
            order = self.rng.permutation(x.ndim).tolist()
            return x.permute(order).contiguous().permute(np.argsort(order).tolist())
        if kind == "sliced" and x.ndim:
            dim = int(self.rng.integers(x.ndim))
            wide = torch.full((*x.shape[:dim], 2 * x.shape[dim], *x.shape[dim + 1 :]), float("nan"), dtype=x.dtype)
            view = wide.narrow(dim, 0, wide.shape[dim]).unflatten(dim, (-1, 2)).select(dim + 1, 1)
            return view.copy_(x)
        if kind == "shifted":
            flat = torch.full((x.numel() + 3,), float("nan"), dtype=x.dtype)
            return flat[3:].view(x.shape).copy_(x)
        if kind == "expanded" and x.ndim:
            dim = int(self.rng.integers(x.ndim))
            return x.narrow(dim, 0, min(1, x.shape[dim])).expand(x.shape)
        return x


def sima(draw: Draw) -> Case:
    norm, eps = draw.pick(("l1", "l1", "l2", None)), draw.pick((1e-12, 1e-6))
    options = {"norm": norm, "eps": eps}
    batch, heads, dim = draw.pick((1, 2, 3)), draw.pick((1, 2, 3)), draw.pick(WIDTHS)
    queries, keys = draw.pick((1, 2, 7, 16, 33, 70)), draw.pick((1, 2, 7, 16, 33, 70))
    many = min(queries, keys) > 1  # a single token becomes its sign: all terms of its gradient cancel
    if draw.chance(0.4):
        tensors = [draw.values(batch, keys, 3, heads, dim)]
        return Case("sima_self_attention", ops.sima_self_attention, tensors, options, differentiable=many)
    if draw.chance(0.2):
        tensors = [draw.values(batch, heads, keys, dim) for _ in range(3)]
        return Case("sima_class_attention", ops.sima_class_attention, tensors, options, (), False, many)
    tensors = [draw.values(batch, heads, n, dim) for n in (queries, keys, keys)]
    return Case("sima_attention", ops.sima_attention, tensors, options, differentiable=many)


def active(draw: Draw) -> Case:
    share, groups = draw.pick((1, 1, 2, 4)), draw.pick((1, 2, 3, 8))
    shape = (draw.pick((1, 2)), draw.pick(SIDES), draw.pick(SIDES))
    x = draw.values(*shape, share * groups)
    kind = draw.pick(("one", "axes", "joint"))
    if kind == "one":
        options = {"dim": draw.pick((1, 2))}
        return Case("active_gather", ops.active_gather, [x, draw.offsets(*shape, groups)], options, (1,))
    if kind == "axes":
        return Case("active_gather_axes", both_axes, [x, draw.offsets(*shape, 2 * groups)], {}, (1,))
    tensors = [x, draw.offsets(*shape, 2 * groups)]
    return Case("active_gather_joint", ops.active_gather_joint, tensors, {}, (1,), backends=False)


def super_token(draw: Draw) -> Case:
    shape = (draw.pick((1, 2)), draw.pick(SIDES), draw.pick(SIDES), draw.pick(WIDTHS))
    options = {"cell": (draw.pick((1, 2, 3, 4, 8)), draw.pick((1, 2, 3, 4, 8)))}
    return Case("super_token", sample_and_scatter, [draw.values(*shape)], options)


def weight_mixing(draw: Draw) -> Case:
    window = draw.pick((1, 2, 3, 5, 7)), draw.pick((1, 2, 3, 5, 7))
    grid = draw.pick((1, 2, 3)) * window[0], draw.pick((1, 2)) * window[1]
    batch, heads, entries, dim = draw.pick((1, 2)), draw.pick((1, 2, 3)), draw.pick((1, 4, 5, 9)), draw.pick(WIDTHS)
    options: dict[str, Any] = {"grid": grid, "window": window, "shift_mask": draw.chance(0.5)}
    options["activation"] = draw.pick(("softmax", "identity", "sigmoid", "l2", "layernorm"))
    options["shift"] = (int(draw.rng.integers(window[0])), int(draw.rng.integers(window[1])))
    pairs, table = window[0] * window[1], (2 * window[0] - 1) * (2 * window[1] - 1)
    bank = draw.values(entries, table) if draw.chance(0.6) else draw.values(entries, pairs, pairs)
    tokens = grid[0] * grid[1]
    tensors = [draw.values(batch, tokens, heads, dim), draw.values(batch, tokens, entries, heads), bank]
    # one or two normalised weights are signs: all terms of their gradients cancel
    many = pairs > 2 or options["activation"] not in ("l2", "layernorm")
    return Case("bank_mixing", ops.bank_mixing, tensors, options, differentiable=many)


def context(draw: Draw) -> Case:
    x = draw.values(draw.pick((1, 2, 3)), draw.pick((1, 2, 17, 65, 130)), draw.pick(WIDTHS))
    kind = draw.pick(("cb", "cb", "gate", "hybrid"))
    tensors = [x, draw.values(x.shape[-1])] if kind == "cb" and draw.chance(0.5) else [x]
    return Case("broadcast_context", ops.broadcast_context, tensors, {"kind": kind})


def depthwise(draw: Draw) -> Case:
    x = draw.values(draw.pick((1, 2)), draw.pick(SIDES), draw.pick(SIDES), draw.pick(WIDTHS))
    side, channels = draw.pick((3, 3, 1, 5)), x.shape[-1]
    tensors = [x, draw.values(channels, 1, side, side)] + ([draw.values(channels)] if draw.chance(0.5) else [])
    options = {"residual": draw.chance(0.5), "gelu": draw.chance(0.5)}
    return Case("depthwise_conv", ops.depthwise_conv, tensors, options)


def roi_align(draw: Draw) -> Case:
    """Boxes are multiples of 1/8: the number of samples jumps with their size."""
    levels, batch, channels, count = draw.pick((1, 2, 4)), draw.pick((1, 2)), draw.pick(WIDTHS), draw.pick((0, 1, 2, 9))
    maps = [draw.values(batch, channels, draw.pick(SIDES), draw.pick(SIDES)) for _ in range(levels)]
    corners = torch.from_numpy(draw.rng.integers(-80, 400, (count, 2))) / 8
    boxes = torch.cat([corners, corners + torch.from_numpy(draw.rng.integers(0, 400, (count, 2))) / 8], 1).float()
    options = {
        "boxes": boxes.to(DEVICE),
        "image_index": torch.from_numpy(draw.rng.integers(0, batch, count)).to(DEVICE),
        "level": torch.from_numpy(draw.rng.integers(0, levels, count)).to(DEVICE),
        "output_size": draw.pick((1, 2, 7)),
        "strides": [4 * 2**i for i in range(levels)],
    }

    def pool(*features: Tensor, **options: Any) -> Tensor:
        return ops.multiscale_roi_align(features, **options)

    return Case("multiscale_roi_align", pool, maps, options, differentiable=False)


CASES = (sima, active, super_token, weight_mixing, context, depthwise, roi_align)


def check_nms(draw: Draw, kernels: bool) -> str:
    """Compare `batched_nms` with a loop in float64; IoUs that rounding could move over the threshold do not count."""
    lists, count, threshold = draw.pick((1, 2, 3)), draw.pick((0, 1, 2, 17, 70)), draw.rng.uniform(0.1, 0.9)
    corners = draw.rng.integers(0, 200, (lists, count, 2)) / 8
    boxes = np.concatenate([corners, corners + draw.rng.integers(0, 80, (lists, count, 2)) / 8], -1)
    valid = draw.rng.random((lists, count)) < 0.9
    options: dict[str, Any] = {"backend": "triton" if kernels else "eager"}
    tensor = draw.strides(torch.from_numpy(boxes).float()).to(DEVICE)
    boxes = tensor.double().cpu().numpy()
    kept = ops.batched_nms(tensor, torch.from_numpy(valid).to(DEVICE), threshold, **options).cpu().numpy()
    for own, mask, found in zip(boxes, valid, kept, strict=True):
        area = (own[:, 2:] - own[:, :2]).prod(-1)
        size = np.minimum(own[:, None, 2:], own[:, 2:]) - np.maximum(own[:, None, :2], own[:, :2])
        shared = size.clip(0).prod(-1)
        union = area[:, None] + area - shared
        iou = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
        if (abs(iou - threshold) < 1e-5).any():
            continue
        expected = np.zeros(len(own), bool)
        for i in np.flatnonzero(mask):
            expected[i] = not (iou[i] > threshold)[expected].any()
        if (expected != found).any():
            raise Wrong(
                f"batched_nms of {own.tolist()}, valid {mask.tolist()}, threshold {threshold}: {found.tolist()}"
            )
    return "batched_nms"


def check_paste(draw: Draw, kernels: bool) -> str:
    """Compare `paste_masks` with bilinear interpolation in float64; probabilities of nearly 0.5 do not count."""
    count, side, height, width = draw.pick((0, 1, 3)), draw.pick((1, 2, 7, 28)), draw.pick(SIDES), draw.pick((1, 9, 40))
    masks = draw.strides(torch.rand(count, side, side, generator=draw.generator)).to(DEVICE)
    corners = torch.from_numpy(draw.rng.uniform(-10, 30, (count, 2)))
    boxes = torch.cat([corners, corners + torch.from_numpy(draw.rng.uniform(0.1, 40, (count, 2)))], 1).float()
    pasted = ops.paste_masks(masks, boxes.to(DEVICE), (height, width), backend="triton" if kernels else "eager").cpu()

    def weights(low: Tensor, high: Tensor, pixels: int) -> Tensor:
        position = (torch.arange(pixels) + 0.5 - low[:, None]) / (high - low)[:, None] * side - 0.5
        return (1 - (position[..., None] - torch.arange(side)).abs()).clamp(min=0)

    exact = boxes.double()
    rows, columns = weights(exact[:, 1], exact[:, 3], height), weights(exact[:, 0], exact[:, 2], width)
    probability = rows @ masks.cpu().double() @ columns.mT
    clear = (probability - 0.5).abs() > 1e-4
    if pasted.shape != probability.shape or (pasted != (probability >= 0.5))[clear].any():
        raise Wrong(f"paste_masks {tuple(masks.shape)} into {height}x{width}, boxes {boxes.tolist()}")
    return "paste_masks"


def check_values(case: Case, draw: Draw, dtype: torch.dtype, kernels: bool) -> None:
    """Compare output and every gradient with float64."""
    tensors = [draw.strides(t.to(dtype)).to(DEVICE) for t in case.tensors]
    case.tensors = tensors
    runs = _supports(case) if kernels and case.backends else False
    options = {**case.options, "backend": "triton" if runs else "eager"} if case.backends else case.options
    inference = draw.chance(0.1)
    actual = _run(case, tensors, options, inference)
    eager = {**case.options, "backend": "eager"} if case.backends else case.options
    exact = [t.double() for t in tensors]
    expected = _run(case, exact, eager, inference)
    eps = torch.finfo(dtype).eps
    changed = []
    for sign in (1, -1):
        noise = [torch.randn(t.shape, generator=draw.generator, dtype=torch.float64).to(DEVICE).sign() for t in exact]
        moved = [
            t if i in case.exact else t * (1 + sign * eps * n)
            for i, (t, n) in enumerate(zip(exact, noise, strict=True))
        ]
        changed.append(_run(case, moved, eager, inference))
    terms = _run(case, [t if i in case.exact else t.abs() for i, t in enumerate(exact)], eager, True)[0]
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        what = f"{'output' if i == 0 else f'gradient of input {i - 1}'}, {'kernel' if runs else 'plain'}"
        if a.shape != e.shape or a.dtype != dtype:
            raise Wrong(f"{what} is {tuple(a.shape)} {a.dtype}, not {tuple(e.shape)} {dtype}")
        if e.abs().amax() > torch.finfo(dtype).max / 4 if e.numel() else True:
            continue
        scale = e.square().mean().sqrt()
        moved_by = max((c[i] - e).square().mean().sqrt() for c in changed)
        # several steps, each with a rounding: the sum of a few last bits
        bound = 16 * moved_by + 8 * eps * scale + torch.finfo(dtype).tiny
        if not i:  # terms of a sum may cancel
            bound += 8 * eps * terms.square().mean().sqrt()
        else:  # terms of a gradient too, as where the output does not depend on the length of an input
            bound += 16 * eps * expected[0].norm() * expected[0].numel() ** 0.5 / exact[i - 1].norm().clamp_min(1e-30)
        error = (a.double() - e).square().mean().sqrt()
        if not error <= bound:
            raise Wrong(f"{what}: differs by {error:.2e} of {scale:.2e}, allowed {bound:.2e}")


def _supports(case: Case) -> bool:
    """Whether the kernels take this call; their limits are sentences in RuntimeErrors."""
    with torch.no_grad():
        try:
            case.function(*case.tensors, **case.options, backend="triton")
        except RuntimeError as error:
            if "cannot run on the triton backend" not in str(error):
                raise
            return False
    return True


def _run(case: Case, tensors: list[Tensor], options: dict[str, Any], inference: bool) -> list[Tensor]:
    """Output and gradients; only the output in inference mode."""
    if inference:
        with torch.inference_mode():
            return [case.function(*tensors, **options)]
    leaves = [t.detach().requires_grad_(case.differentiable) for t in tensors]
    out = case.function(*leaves, **options)
    if not case.differentiable:
        return [out]
    seed = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.device, out.dtype)
    grads = torch.autograd.grad(out, leaves, seed, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(t) if g is None else g for t, g in zip(leaves, grads, strict=True))]


def damage(case: Case, draw: Draw, dtype: torch.dtype) -> None:
    """Make the inputs impossible, or nearly."""
    case.tensors = [t.to(dtype) for t in case.tensors]
    i = int(draw.rng.integers(len(case.tensors)))
    x = case.tensors[i]
    kind = draw.pick(("fewer axes", "more axes", "longer", "shorter", "empty", "whole numbers", "dtype", "not finite"))
    dim = int(draw.rng.integers(x.ndim))
    if kind == "fewer axes":
        x = x.select(dim, 0)
    elif kind == "more axes":
        x = x.unsqueeze(dim)
    elif kind == "longer":
        x = torch.cat([x, x.narrow(dim, 0, 1)], dim)
    elif kind == "shorter":
        x = x.narrow(dim, 0, x.shape[dim] - 1)
    elif kind == "empty":
        x = x.narrow(dim, 0, 0)
    elif kind == "whole numbers":
        x = x.long()
    elif kind == "dtype":
        x = x.to(draw.pick([d for d in DTYPES if d != dtype]))
    else:
        x = torch.where(torch.rand(x.shape, generator=draw.generator) < 0.2, float(draw.pick(("nan", "inf"))), x)
    case.tensors[i] = x
    case.options = {**case.options, "damage": kind}


def check_damaged(case: Case) -> str:
    """An error of ours, or the result of float64."""
    kind = case.options.pop("damage")
    tensors = [t.to(DEVICE) for t in case.tensors]
    eager = {**case.options, "backend": "eager"} if case.backends else case.options
    try:
        with torch.no_grad():
            out = case.function(*tensors, **eager)
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        ours = frame.filename.startswith(PACKAGE) and isinstance(error, ValueError | TypeError)
        if not ours:
            raise Wrong(f"{kind} in {case}: {type(error).__name__}: {error}") from error
        return "error of ours"
    if kind == "not finite":
        return "result"
    exact = [t.double() for t in tensors]
    with torch.no_grad():
        expected = case.function(*exact, **eager)
    if out.is_floating_point() and out.numel() and expected.abs().max() > torch.finfo(out.dtype).max / 4:
        return "result"
    if out.shape != expected.shape or (out.numel() and relative_rmse(out, expected) > 0.05 and expected.norm() > 1e-3):
        raise Wrong(f"{kind} in {case}: a result that float64 does not have")
    return "result"


def run_case(seed: int, number: int) -> str:
    """Run one case; returns what was checked."""
    draw = Draw(seed, number)
    kernels = DEVICE == "cuda" or number % INTERPRETED == 0
    make = draw.pick((*CASES, check_nms, check_paste))
    if make in (check_nms, check_paste):
        return make(draw, kernels)
    case = make(draw)
    dtype = draw.pick(DTYPES)
    if draw.chance(0.15):
        damage(case, draw, dtype)
        return f"impossible input, {check_damaged(case)}"
    try:
        check_values(case, draw, dtype, kernels)
    except Wrong as error:
        raise Wrong(f"{case}: {error}") from error
    return f"{case.operator}, {str(dtype).removeprefix('torch.')}"


def run_forked(seed: int, numbers: Sequence[int]) -> Iterator[tuple[int, str]]:
    """Run cases in a process of its own, so that a crash of one is found; yields results that begin with "ok "."""
    while numbers:
        with tempfile.TemporaryFile("w+") as report:
            child = os.fork() if DEVICE == "cpu" else 0  # CUDA does not survive a fork
            if child == 0:
                for number in numbers:
                    try:
                        text = "ok " + run_case(seed, number)
                    except Exception as error:  # all of them are reported
                        text = str(error) if isinstance(error, Wrong) else traceback.format_exc()
                    report.write(json.dumps(text) + "\n")
                    report.flush()
                if DEVICE == "cpu":
                    os._exit(0)
            status = os.waitpid(child, 0)[1] if child else 0
            report.seek(0)
            results = [json.loads(line) for line in report]
        if status:
            results.append(f"the process was ended by signal {os.WTERMSIG(status)}")
        yield from zip(numbers, results, strict=False)
        numbers = numbers[len(results) :]


def main() -> int:
    """Run the cases; returns the number of wrong ones."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--start", type=int, default=0, help="the number of the first case")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="the number of one case")
    options = parser.parse_args()
    torch.set_num_threads(1)
    numbers = range(options.start, options.start + options.count) if options.only is None else [options.only]
    tally: Counter[str] = Counter()
    wrong, begun = 0, time.monotonic()
    print(f"seed {options.seed}, {len(numbers):,} cases on {DEVICE}", flush=True)
    for start in range(0, len(numbers), CHUNK):
        if start and start % 1000 == 0:
            print(f"{start:,} cases, {time.monotonic() - begun:.0f} s", flush=True)
        for number, result in run_forked(options.seed, numbers[start : start + CHUNK]):
            if result.startswith("ok "):
                tally[result.removeprefix("ok ")] += 1
            else:
                wrong += 1
                print(f"WRONG case {number} (--seed {options.seed} --only {number}): {result}", flush=True)
    print("\n| operators | cases |\n|---|---|")
    for name, count in sorted(tally.items()):
        print(f"| {name} | {count} |")
    print(f"\n{wrong} of {len(numbers):,} cases wrong, in {(time.monotonic() - begun) / 60:.1f} minutes")
    return wrong


if __name__ == "__main__":
    sys.exit(min(1, main()))
