"""The kernels at real sizes, compiled for a GPU that need not be present.

Triton 3.6 and 3.9 can leave an asynchronous tensor core product running while the next loop iteration overwrites the
shared memory it reads: results are wrong now and then, and only on a GPU. The generated code shows it.
"""

import math
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.kernels import both_axes, sample_and_scatter
from tokamix import ops
from tokamix.ops import dispatch
from tokamix.ops.branch_fusion.op import branch_summary, fuse_branches

pytestmark = pytest.mark.skipif(not dispatch.HAS_TRITON or dispatch.INTERPRET, reason="needs Triton's compiler")
Generated = list[tuple[str, str]]


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> Generated:
    """Names and Triton GPU IR of the launched kernels, compiled for an H200 and not run."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    kernels: Generated = []
    run = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):
        kernel = run(self, *args, grid=grid, warmup=True, **options)
        kernels.append((self.__name__, kernel.asm["ttgir"]))
        return kernel

    h200 = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: -1,  # not the index of a real GPU
        get_current_stream=lambda device: 0,
    )
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", stop_at_ttgir)
    monkeypatch.setattr(JITFunction, "run", compile_only)
    monkeypatch.setattr(dispatch, "why_not", lambda *tensors: None)
    monkeypatch.setattr("tokamix.ops.sima.kernels._processors", lambda device: 132)
    monkeypatch.setattr(driver, "_active", h200)
    return kernels


@pytest.fixture
def compiled(generated: Generated, monkeypatch: pytest.MonkeyPatch) -> Generated:
    """The same, compiled to the end, with LLVM and ptxas."""
    from triton import knobs
    from triton.runtime import driver

    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", None)
    monkeypatch.setattr(driver.active, "get_current_device", lambda: -2)  # apart from kernels that stop early
    return generated


def stop_at_ttgir(*args: Any) -> tuple[str, str] | None:
    """Triton's hook: leave out LLVM and ptxas, which take most of the time; its key separates the cache entries."""
    if not args:
        return "stop at ttgir", "stop at ttgir"
    _, stages, *_ = args
    for stage in ("llir", "ptx"):
        del stages[stage]

    def create_no_binary(module: Any, metadata: dict[str, Any]) -> bytes:
        metadata.update(name="", shared=0)
        return b""

    stages["cubin"] = create_no_binary
    return None


def unguarded(code: str) -> list[str]:
    """Lines that write shared memory, or end a loop iteration, while a product may still read it."""
    problems, running = [], False
    for line in code.splitlines():
        if "warp_group_dot_wait" in line:
            running = int(re.search(r"pendings = (\d+)", line)[1]) > 0
        elif "warp_group_dot " in line:
            running = "isAsync = true" in line
        elif running and re.search(r"async_(tma_)?copy_global_to_local|local_store|scf\.yield", line):
            problems.append(line.strip())
    return problems


def test_search_finds_unguarded_writes() -> None:
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
    """Whether the code has asynchronous products; if a new compiler renames them, the search finds nothing."""
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
def test_masks_and_other_activations(options: dict[str, Any], compiled: Generated) -> None:
    inputs = torch.zeros(2, 196, 3, 64), torch.zeros(2, 196, 36, 3), torch.zeros(36, 27 * 27)
    check(ops.bank_mixing, inputs, compiled, grid=(14, 14), **options)
    assert asynchronous(compiled)


@pytest.mark.parametrize("tokens", [49, 197, 5000])
@pytest.mark.parametrize("dim", [32, 64, 128])
def test_sima(dim: int, tokens: int, generated: Generated) -> None:
    check(ops.sima_attention, tuple(torch.zeros(3, 2, 3, tokens, dim)), generated)
    if dim == 64:
        assert asynchronous(generated)


# these tests check that LLVM and ptxas compile the kernels; most have few products or none


def test_sima_to_the_end(compiled: Generated) -> None:
    check(ops.sima_attention, tuple(torch.zeros(3, 2, 3, 5000, 64)), compiled)


@pytest.mark.parametrize(("channels", "cell"), [(64, (8, 8)), (384, (2, 2))])
def test_super_token(channels: int, cell: tuple[int, int], compiled: Generated) -> None:
    check(sample_and_scatter, (torch.zeros(2, 16, 16, channels),), compiled, cell=cell)


@pytest.mark.parametrize("side", [56, 100])
def test_active_token(side: int, compiled: Generated) -> None:
    check(both_axes, (torch.zeros(2, side, side, 64), torch.zeros(2, side, side, 64)), compiled)


def test_depthwise_conv(compiled: Generated) -> None:
    inputs = torch.zeros(2, 14, 14, 320), torch.zeros(320, 1, 3, 3), torch.zeros(320)
    check(ops.depthwise_conv, inputs, compiled, residual=True, gelu=True)


@pytest.mark.parametrize("tokens", [197, 5000])
def test_context_broadcast(tokens: int, compiled: Generated) -> None:
    check(ops.broadcast_context, (torch.zeros(2, tokens, 384), torch.zeros(384)), compiled)


def test_branch_fusion(compiled: Generated) -> None:
    def fuse(*branches: Tensor, backend: str) -> Tensor:
        return fuse_branches(branches, branch_summary(branches, backend).repeat(1, 3), backend)

    check(fuse, torch.zeros(3, 2, 196, 320).unbind(), compiled)


@pytest.mark.parametrize("channels", [64, 320, 1280])
def test_layer_norm(channels: int, compiled: Generated) -> None:
    inputs = torch.zeros(2, 196, channels), torch.zeros(channels), torch.zeros(channels)
    check(ops.layer_norm, inputs, compiled)
