"""Cached launches choose the kernel that Triton chooses; compiled for a GPU that need not be present, and not run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ops.test_generated_code import stop_at_ttgir
from tokamix.ops import dispatch

pytestmark = pytest.mark.skipif(not dispatch.HAS_TRITON or dispatch.INTERPRET, reason="needs Triton's compiler")
Launched = list[tuple[Any, ...]]

if dispatch.HAS_TRITON:
    import triton
    import triton.language as tl

    @triton.jit
    def _scale_kernel(p_x, p_out, n, stride, factor, BLOCK: tl.constexpr, MASKED: tl.constexpr):
        o_n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        b_x = tl.load(p_x + o_n * stride, mask=o_n < n if MASKED else None)
        tl.store(p_out + o_n, b_x * factor, mask=o_n < n if MASKED else None)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Launched:
    """The arguments of every launch: grid, stream, kernel, tensors as addresses, numbers and constants."""
    from triton import knobs
    from triton.backends.compiler import GPUTarget
    from triton.compiler.compiler import CompiledKernel
    from triton.runtime import driver

    launches: Launched = []

    def init_handles(self: Any) -> None:
        self.module = self.function = self.hash

        def run(grid_x, grid_y, grid_z, stream, function, metadata, launch_metadata, enter, leave, *arguments):
            assert metadata == self.packed_metadata
            values = [x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments]
            launches.append((grid_x, grid_y, grid_z, stream, function, *values))

        self._run = run

    h200 = SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: -1,  # as `Tensor.get_device` of a CPU tensor
        get_current_stream=lambda device: 7,
    )
    monkeypatch.setattr(knobs.runtime, "add_stages_inspection_hook", stop_at_ttgir)
    monkeypatch.setattr(CompiledKernel, "_init_handles", init_handles)
    monkeypatch.setattr(driver, "_active", h200)
    return launches


@pytest.fixture
def slow_launches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for every launch through Triton's JITFunction."""
    from triton.runtime.jit import JITFunction

    calls: list[int] = []
    run: Callable[..., Any] = JITFunction.run

    def count(self: Any, *args: Any, **options: Any) -> Any:
        calls.append(1)
        return run(self, *args, **options)

    monkeypatch.setattr(JITFunction, "run", count)
    return calls


def test_same_kernel_and_arguments(launched: Launched, slow_launches: list[int]) -> None:
    """For other dtypes, addresses that are no multiple of 16, and numbers that are 1, 16 or neither."""
    from tokamix.ops.launch import Launch

    memory = torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16)
    kernels = set()
    for n, stride in ((16, 1), (17, 1), (17, 2)):
        launch = Launch(_scale_kernel, (n, 2), n, stride, 0.5, BLOCK=16, MASKED=True, num_warps=1)
        for x in (memory[0], memory[0][1:], memory[1], memory[1][1:]):
            out = torch.empty(32, dtype=x.dtype)
            launched.clear()
            launch(x, out)
            before = len(slow_launches)
            launch(x, out)
            assert len(slow_launches) == before
            _scale_kernel[n, 2](x, out, n, stride, 0.5, BLOCK=16, MASKED=True, num_warps=1)
            assert launched[0] == launched[1] == launched[2]
            kernels.add(launched[0][4])
    assert len(kernels) == 12


def test_tensors_of_another_gpu(launched: Launched, slow_launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their GPU is current during the launch; CPU tensors (-1) stand for it, and 0 is the current one before."""
    from triton.runtime import driver

    from tokamix.ops import launch as module

    current = [0]

    @contextmanager
    def device_of(tensors: tuple[torch.Tensor, ...]) -> Iterator[None]:
        current.append(tensors[0].get_device())
        yield
        current.pop()

    monkeypatch.setattr(module, "_device_of", device_of)
    monkeypatch.setattr(driver.active, "get_current_device", lambda: current[-1])
    monkeypatch.setattr(driver.active, "get_current_stream", lambda device: f"stream of {device}")
    x, out = torch.zeros(16), torch.empty(16)
    launch = module.Launch(_scale_kernel, (1,), 16, 1, 0.5, BLOCK=16, MASKED=False)
    for _ in range(3):
        launch(x, out)
        assert launched[-1][3] == "stream of -1"
    assert len(slow_launches) == 3  # nothing is cached
    assert current == [0]
    with dispatch.use_light(False):
        launch(x, out)
    assert launched[-1][3] == "stream of -1"
    assert len(launched) == 4


def test_tensors_of_several_devices() -> None:
    from tokamix.ops.launch import Launch

    launch = Launch(_scale_kernel, (1,), 16, 1, 0.5, BLOCK=16, MASKED=False)
    with dispatch.use_light(False), pytest.raises(ValueError, match=r"on one device, got cpu and meta; .*\.to\(\)"):
        launch(torch.zeros(16), torch.empty(16, device="meta"))


def test_falls_back_to_triton(launched: Launched, slow_launches: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the light path, with a profiler's hook, and if compiled kernels have another interface."""
    from triton import knobs
    from triton.compiler.compiler import CompiledKernel

    from tokamix.ops import launch as module

    x, out = torch.zeros(16), torch.empty(16)
    launch = module.Launch(_scale_kernel, (1,), 16, 1, 0.5, BLOCK=16, MASKED=False)
    launch(x, out)
    launch(x, out)
    assert len(slow_launches) == 1
    with dispatch.use_light(False):
        launch(x, out)
    assert len(slow_launches) == 2
    hook = SimpleNamespace(calls=[lambda metadata: None])
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", hook)
    monkeypatch.setattr(CompiledKernel, "launch_metadata", lambda *args: None)
    launch(x, out)
    assert len(slow_launches) == 3
    hook.calls.clear()
    monkeypatch.setattr(module, "_is_launchable", lambda compiled: False)
    launch = module.Launch(_scale_kernel, (1,), 16, 1, 0.5, BLOCK=16, MASKED=False)
    launch(x, out)
    launch(x, out)
    assert len(slow_launches) == 5
    assert len(launched) == 6
    assert len(set(launched)) == 1
