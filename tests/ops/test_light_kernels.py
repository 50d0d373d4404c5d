"""The light path of plain eager calls against the registered operators, under Triton's interpreter or on a GPU."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.kernels import DEVICE
from tests.ops.test_contract_kernels import OPERATORS, make
from tokamix.ops import depthwise_conv, dispatch, operator


class Operators(TorchDispatchMode):
    """The names of tokamix's registered operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "tokamix":
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the operators that are called through the dispatcher."""
    names: list[str] = []
    call = operator.Operator.__call__

    def spy(self: Any, *inputs: Any) -> Any:
        original = self.registered

        def count(*inputs: Any) -> Any:
            names.append(self.name)
            return original(*inputs)

        self.registered = count
        try:
            return call(self, *inputs)
        finally:
            self.registered = original

    monkeypatch.setattr(operator.Operator, "__call__", spy)
    return names


def run(name: str, inputs: list[Tensor], light: bool) -> list[Tensor]:
    """The output, with and without gradients, and the gradients of all inputs."""
    op = OPERATORS[name][0]
    with dispatch.use_backend("triton"), dispatch.use_light(light):
        out = op(*inputs)
        seed = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape).to(out.dtype)
        grads = torch.autograd.grad(out, inputs, seed)
        with torch.no_grad():
            return [out.detach(), op(*inputs), *grads]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPERATORS)
def test_bits_of_both_paths(name: str, dtype: torch.dtype, registered: list[str], poison_empty: None) -> None:
    inputs = [x.detach().to(dtype).requires_grad_() for x in make(name)]
    for _ in range(2 if DEVICE == "cuda" else 1):  # the second call finds cached launches; the interpreter has none
        light = run(name, inputs, light=True)
        assert not registered
        for a, b in zip(light, run(name, inputs, light=False), strict=True):
            assert torch.equal(a, b)
        assert len(registered) >= 3  # twice forward and once backward
        registered.clear()


@pytest.mark.parametrize("name", OPERATORS)
def test_dispatch_modes_see_the_operators(name: str) -> None:
    inputs = make(name)
    with Operators() as seen:
        run(name, inputs, light=True)
    assert any(name.endswith("backward.default") for name in seen.names) or "broadcast_context.default" in seen.names
    assert len(seen.names) >= 3


@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_of_gradients_as_without_the_light_path(name: str) -> None:
    inputs = make(name)
    results = []
    for light in (True, False):
        with dispatch.use_backend("triton"), dispatch.use_light(light):
            out = OPERATORS[name][0](*(x.sin() for x in inputs))
            slopes = torch.autograd.grad((out**2).sum(), inputs, create_graph=True)
            try:
                results.append(torch.autograd.grad(sum((slope**2).sum() for slope in slopes), inputs))
            except RuntimeError as error:
                results.append(str(error))
    if isinstance(results[1], str):
        assert results[0] == results[1]
        assert "no autograd formula was registered" in results[0]
    else:
        torch.testing.assert_close(*results)


def test_tensor_subclasses_reach_the_dispatcher(registered: list[str]) -> None:
    class Tagged(Tensor):
        pass

    x, weight = torch.randn(1, 4, 5, 8, device=DEVICE), torch.randn(8, 1, 3, 3, device=DEVICE)
    out = depthwise_conv(x.as_subclass(Tagged), weight, backend="triton")
    assert registered == ["depthwise_conv"]
    torch.testing.assert_close(out.as_subclass(Tensor), depthwise_conv(x, weight, backend="eager"))


@pytest.mark.parametrize("name", ["active_gather", "super_token", "depthwise_conv"])
def test_gradient_checkpoints(name: str) -> None:
    inputs = make(name)
    op = OPERATORS[name][0]
    with dispatch.use_backend("triton"):
        out = torch.utils.checkpoint.checkpoint(lambda *x: op(*x).sin(), *inputs, use_reentrant=False)
        got = torch.autograd.grad(out.sum(), inputs)
        torch.testing.assert_close(got, torch.autograd.grad(op(*inputs).sin().sum(), inputs), rtol=0, atol=0)


@pytest.mark.gpu
def test_launches_follow_addresses_and_sizes() -> None:
    """Cached launches give the bits of Triton's own for other shapes, dtypes, strides and unaligned addresses."""
    for dtype in (torch.bfloat16, torch.float32):
        for channels in (1, 16, 17, 64):
            for height in (1, 5, 16):
                memory = torch.randn(2 * height * 6 * channels + 1, device=DEVICE).to(dtype)
                for start in (0, 1, 0):
                    x = memory[start : start + 2 * height * 6 * channels].view(2, height, 6, channels)
                    weight = torch.randn(channels, 1, 3, 3, device=DEVICE).to(dtype)
                    results = []
                    for light in (True, True, False):
                        with dispatch.use_light(light):
                            leaves = x.detach().requires_grad_(), weight.requires_grad_()
                            out = depthwise_conv(*leaves, backend="triton")
                            results.append([out, *torch.autograd.grad(out.sin().sum(), leaves)])
                    for first, second, expected in zip(*results, strict=True):
                        assert torch.equal(first, expected)
                        assert torch.equal(second, expected)


@pytest.mark.gpu
def test_tensors_of_another_device_raise() -> None:
    x, weight = torch.randn(1, 4, 5, 8, device=DEVICE), torch.randn(8, 1, 3, 3, device=DEVICE)
    for _ in range(2):
        with pytest.raises(ValueError, match="cannot be accessed from Triton"):
            depthwise_conv(x, weight, torch.randn(8), backend="triton")
    torch.cuda.synchronize()
