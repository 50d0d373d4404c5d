"""The kernels at real sizes, compiled for a GPU that need not be there.

Triton, 3.6 and 3.9, can leave a product of tensor cores running while the next step of a loop fetches over the numbers
it still reads: results are wrong, now and then, on a GPU alone. What it generates tells.
"""

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.kernels import around_cells, both_axes
from tokamix import ops
from tokamix.ops import dispatch

pytestmark = pytest.mark.skipif(not dispatch.HAS_TRITON or dispatch.INTERPRET, reason="needs Triton's compiler")
Generated = list[tuple[str, str]]


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> Generated:
    """Names and code of the kernels that are launched: compiled for an H200, and not run."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found: Generated = []
    run = JITFunction.run

    def compile_alone(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        found.append((self.__name__, kernel.asm["ttgir"]))
        return kernel

    h200 = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: -1,  # apart from a GPU that is there
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(JITFunction, "run", compile_alone)
    monkeypatch.setattr(dispatch, "why_not", lambda *tensors: None)
    monkeypatch.setattr("tokamix.ops.sima.kernels._processors", lambda device: 132)
    monkeypatch.setattr(driver, "_active", h200)
    return found


def unguarded(code: str) -> list[str]:
    """Fetches into shared memory while a product may still read it, and loops that end so."""
    problems, running = [], False
    for line in code.splitlines():
        if "warp_group_dot_wait" in line:
            running = int(re.search(r"pendings = (\d+)", line)[1]) > 0
        elif "warp_group_dot " in line:
            running = "isAsync = true" in line
        elif running and re.search(r"async_(tma_)?copy_global_to_local|local_store|scf\.yield", line):
            problems.append(line.strip())
    return problems


def test_the_search_finds_what_it_seeks() -> None:
    product = "%a = ttng.warp_group_dot %x, %y, %z {isAsync = true}"
    wait = "%b = ttng.warp_group_dot_wait %a {pendings = 0 : i32}"
    fetch = "%c = ttg.async_copy_global_to_local %p, %x"
    assert unguarded(f"{product}\n{wait}\n{fetch}") == []
    assert unguarded(f"{product}\n{fetch}\n{wait}") == [fetch]
    assert unguarded(f"{product}\n{wait.replace('0', '1')}\n{fetch}") == [fetch]


def check(op: Callable[..., Tensor], inputs: tuple[Tensor, ...], generated: Generated, **options) -> None:
    leaves = [x.bfloat16().requires_grad_() for x in inputs]
    out = op(*leaves, backend="triton", **options)
    torch.autograd.grad(out, leaves, torch.empty_like(out))
    assert len(generated) > 1
    for name, code in generated:
        assert not unguarded(code), name


def asynchronous(generated: Generated) -> bool:
    """Whether there are products to wait for: where a compiler calls them by other names, the search is blind."""
    return any("isAsync = true" in code for _, code in generated)


@pytest.mark.parametrize("window", [(7, 7), (14, 14)])
@pytest.mark.parametrize("dim", [16, 32, 64])
def test_weight_mixing(dim: int, window: tuple[int, int], generated: Generated) -> None:
    entries, heads, tokens = 36, 3, math.prod(window)
    displacements = math.prod(2 * side - 1 for side in window)
    inputs = (
        torch.zeros(2, tokens, heads, dim),
        torch.zeros(2, tokens, entries, heads),
        torch.zeros(entries, displacements),
    )
    check(ops.bank_mixing, inputs, generated, grid=window, window=window)
    assert asynchronous(generated)


@pytest.mark.parametrize("options", [{"shift": (3, 3)}, {"activation": "sigmoid"}], ids=["shift", "sigmoid"])
def test_masks_and_other_activations(options: dict[str, Any], generated: Generated) -> None:
    inputs = torch.zeros(2, 196, 3, 64), torch.zeros(2, 196, 36, 3), torch.zeros(36, 27 * 27)
    check(ops.bank_mixing, inputs, generated, grid=(14, 14), **options)
    assert asynchronous(generated)


@pytest.mark.parametrize("tokens", [49, 197, 5000])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_sima(dim: int, tokens: int, generated: Generated) -> None:
    check(ops.sima_attention, tuple(torch.zeros(3, 2, 3, tokens, dim)), generated)
    if dim == 64:
        assert asynchronous(generated)


# the others have few products or none; that they are compiled at all is what is tested


@pytest.mark.parametrize(("channels", "cell"), [(64, (8, 8)), (384, (2, 2))])
def test_super_token(channels: int, cell: tuple[int, int], generated: Generated) -> None:
    check(around_cells, (torch.zeros(2, 16, 16, channels),), generated, cell=cell)


@pytest.mark.parametrize("side", [56, 100])
def test_active_token(side: int, generated: Generated) -> None:
    check(both_axes, (torch.zeros(2, side, side, 64), torch.zeros(2, side, side, 64)), generated)


def test_depthwise_conv(generated: Generated) -> None:
    inputs = torch.zeros(2, 14, 14, 320), torch.zeros(320, 1, 3, 3), torch.zeros(320)
    check(ops.depthwise_conv, inputs, generated, residual=True, gelu=True)


@pytest.mark.parametrize("tokens", [197, 5000])
def test_context_broadcast(tokens: int, generated: Generated) -> None:
    check(ops.broadcast_context, (torch.zeros(2, tokens, 384), torch.zeros(384)), generated)
