"""`graphed`: when it records, replays, records again and refuses. On a CPU a tape of operators stands for the graph."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from timm.utils import reparameterize_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

import tokamix
from tokamix.compile import graphed, graphs


class Tape(TorchDispatchMode):
    """The operators of a run and the memory they used: like a CUDA graph, a replay repeats them on the same memory."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple] = []

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.calls.append((func, *tree_map_only(Tensor, torch.ops.aten.detach, (args, kwargs or {}, out))))
        return out

    def replay(self) -> None:
        for func, args, kwargs, out in self.calls:
            for old, new in zip(tree_leaves(out), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor):
                    old.copy_(new)

    def pool(self) -> None:
        return None


class TapeRecording(graphs.Recording):
    def _capture(self, run: Callable[[], Any], pool: Any) -> tuple[Any, Any]:
        with Tape() as tape:
            outputs = run()
        return tape, outputs


class Small(nn.Module):
    """A network that counts how often its Python code runs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 5)
        self.runs = 0

    def forward(self, x: Tensor, scale: float = 1.0) -> Tensor:
        self.runs += 1
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3))) * scale


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record on the CPU."""
    monkeypatch.setattr(graphs, "Recording", TapeRecording)
    monkeypatch.setattr(graphs, "_can_record", lambda tensors: len({t.device for t in tensors}) == 1)


def small() -> Small:
    return Small().eval()


def images(*shape: int) -> Tensor:
    return torch.randn(*(shape or (2, 3, 8, 8)))


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("warm_up", [0, 3])
def test_records_after_the_warm_up(warm_up: int) -> None:
    """Eager calls, one capture, then replays with the values of each call and without Python."""
    model = small()
    fast = graphed(model, warm_up=warm_up)
    for call in range(warm_up + 4):
        x = images()
        out = fast(x)
        assert model.runs == min(call, warm_up) + 1
        assert fast.recorded == (call >= warm_up)
        assert not out.requires_grad
        torch.testing.assert_close(out, copy.deepcopy(model)(x))
    assert "recorded=1" in repr(fast)


@pytest.mark.usefixtures("tape")
def test_one_graph_per_kind_of_input() -> None:
    """Shape, dtype, memory format and constants; equal values of other types are not confused."""
    model = small()
    fast, double = graphed(model, warm_up=0), graphed(copy.deepcopy(model).double(), warm_up=0)
    for count, (x, options) in enumerate(
        (
            (images(), {}),
            (images(1, 3, 8, 8), {}),
            (images(2, 3, 8, 12), {}),
            (images().to(memory_format=torch.channels_last), {}),
            (images(), {"scale": 2.0}),
            (images(), {"scale": 2}),
        ),
        1,
    ):
        for _ in range(2):
            torch.testing.assert_close(fast(x, **options), model(x, **options))
        assert fast.recorded == count
    x = images().double()
    torch.testing.assert_close(double(x), double.model(x))
    assert fast(images(), 2.0).shape == (2, 5)
    assert fast.recorded == 7  # an argument by position


@pytest.mark.usefixtures("tape")
def test_channels_last_stays() -> None:
    fast = graphed(nn.Conv2d(3, 4, 3).eval(), warm_up=0)
    x = images().to(memory_format=torch.channels_last)
    assert fast(x).stride() == fast.model(x).stride() != fast(x.contiguous()).stride()


@pytest.mark.usefixtures("tape")
def test_the_least_recently_used_graph_is_dropped() -> None:
    model = small()
    fast = graphed(model, max_graphs=2, warm_up=1)
    sizes = [images(n, 3, 8, 8) for n in (1, 2, 3)]
    for x in (sizes[0], sizes[1]) * 2:
        fast(x)
    assert fast.recorded == 2
    fast(sizes[0])  # used last
    for _ in range(2):
        fast(sizes[2])
    assert fast.recorded == 2
    before = model.runs
    fast(sizes[0])
    fast(sizes[2])
    assert model.runs == before
    fast(sizes[1])  # warms up again
    fast(sizes[0])
    fast(sizes[2])
    assert (model.runs, fast.recorded) == (before + 1, 2)


@pytest.mark.usefixtures("tape")
def test_counts_of_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "MAX_COUNTED_KEYS", 3)
    fast = graphed(small(), warm_up=1)
    for n in range(1, 10):
        fast(images(n, 3, 8, 8))
    assert fast.recorded == 0
    assert len(fast._calls) <= 3


def move_data(model: Small) -> None:
    model.conv.weight.data = 2 * model.conv.weight.data


def replace_parameter(model: Small) -> None:
    model.head.weight = nn.Parameter(torch.randn(5, 4))


def remove_bias(model: Small) -> None:
    model.head.bias = None


def replace_module(model: Small) -> None:
    model.head = nn.Linear(4, 5).eval()


def replace_buffer(model: Small) -> None:
    model.norm.running_mean = torch.ones(4)


def load_assigned(model: Small) -> None:
    model.load_state_dict(small().state_dict(), assign=True)


CHANGES = [move_data, replace_parameter, remove_bias, replace_module, replace_buffer, load_assigned]


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("change", CHANGES)
def test_replaced_weights_are_recorded_again(change: Callable[[Small], None]) -> None:
    model = small()
    fast = graphed(model, warm_up=0)
    x = images()
    before = fast(x)
    fast(images(1, 3, 8, 8))
    change(model)
    after = fast(x)
    torch.testing.assert_close(after, copy.deepcopy(model)(x))
    assert not torch.equal(before, after)
    assert fast.recorded == 1
    runs = model.runs
    torch.testing.assert_close(fast(x), after)
    assert model.runs == runs


@pytest.mark.usefixtures("tape")
def test_a_new_shape_notices_replaced_weights_too() -> None:
    model = small()
    fast = graphed(model, warm_up=0)
    fast(images())
    replace_parameter(model)
    x = images(1, 3, 8, 8)
    torch.testing.assert_close(fast(x), copy.deepcopy(model)(x))
    assert fast.recorded == 1


@pytest.mark.usefixtures("tape")
def test_changes_in_place_need_no_new_graph() -> None:
    model = small()
    fast = graphed(model, warm_up=0)
    x = images()
    fast(x)
    with torch.no_grad():
        model.head.weight.mul_(3)
    torch.testing.assert_close(fast(x), copy.deepcopy(model)(x))
    assert model.runs == 1


@pytest.mark.usefixtures("tape")
def test_autocast_states_have_their_own_graphs() -> None:
    model = small()
    fast = graphed(model, warm_up=0)
    x = images()
    for _ in range(2):
        assert fast(x).dtype is torch.float32
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                assert fast(x).dtype is dtype
                torch.testing.assert_close(fast(x), copy.deepcopy(model)(x))
    assert (fast.recorded, model.runs) == (3, 3)
    assert torch.is_autocast_cache_enabled()


class Nested(nn.Module):
    def forward(self, pair: dict[str, list[Tensor]]) -> dict[str, Any]:
        a, b = pair["inputs"]
        return {"sum": a + b, "parts": (a * 2, [b * 3, None]), "name": "nested", "same": a}


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize("clone", [True, False])
def test_nested_inputs_and_outputs(clone: bool) -> None:
    fast = graphed(Nested().eval(), warm_up=0, clone=clone)
    pairs = [{"inputs": [torch.full((2,), v), torch.ones(2)]} for v in (1.0, 5.0)]
    first, second = fast(pairs[0]), fast(pairs[1])
    assert fast.recorded == 1
    for key in ("sum", "parts", "same", "name"):
        torch.testing.assert_close(second["parts"][1][1], None)
        expected = fast.model(pairs[0 if clone else 1])  # without a copy the second call overwrote the first output
        assert str(first[key]) == str(expected[key])
    assert (first["sum"] is second["sum"]) is not clone


@pytest.mark.usefixtures("tape")
def test_inputs_are_not_kept() -> None:
    """The caller may overwrite its tensors, also inside and outside of inference mode."""
    fast = graphed(nn.Identity().eval(), warm_up=0)
    x = torch.ones(3)
    out = fast(x)
    x.zero_()
    with torch.inference_mode():
        again = fast(torch.full((3,), 2.0))
    assert out.tolist() == [1, 1, 1]
    assert again.tolist() == [2, 2, 2]
    assert fast(x).tolist() == [0, 0, 0]


@pytest.mark.usefixtures("tape")
def test_training_and_gradients_are_refused() -> None:
    model = small()
    fast = graphed(model, warm_up=0)
    x = images()
    expected = fast(x)
    with pytest.raises(ValueError, match="computes no gradients, but an input requires them"):
        fast(x.clone().requires_grad_())
    with torch.no_grad():
        torch.testing.assert_close(fast(x.clone().requires_grad_()), expected)
    model.norm.train()
    with pytest.raises(ValueError, match=r"but norm is in training mode; call eval\(\)"):
        fast(x)
    fast.train()
    with pytest.raises(ValueError, match=r"the model is in training mode; call model\.eval\(\)"):
        fast(x)
    torch.testing.assert_close(fast.eval()(x), expected)


@pytest.mark.usefixtures("tape")
@pytest.mark.parametrize(
    ("name", "options"),
    [("stvit_small", {"dims": (16,) * 4, "depths": (1,) * 4, "num_heads": (1,) * 4}), ("mobileone_s0", {})],
)
def test_folded_models_are_recorded(name: str, options: dict[str, Any]) -> None:
    """`reparameterize_model` leaves new layers in training mode, where it makes no difference."""
    model = reparameterize_model(tokamix.create_model(name, **options).eval())
    fast = graphed(model, warm_up=0)
    x = torch.randn(1, 3, 64, 64)
    torch.testing.assert_close(fast(x), model(x))
    assert fast.recorded == 1


@pytest.mark.usefixtures("tape")
def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="max_graphs must be at least 1 and warm_up at least 0, got 0 and 2"):
        graphed(small(), max_graphs=0)
    with pytest.raises(ValueError, match="got 8 and -1"):
        graphed(small(), warm_up=-1)
    with pytest.raises(TypeError, match="tensors and constants that can be hashed, got a set"):
        graphed(small())(images(), {1})


class Returns(nn.Module):
    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value

    def forward(self, x: Tensor) -> Any:
        if isinstance(self.value, Exception):
            raise self.value
        return x, self.value


@pytest.mark.usefixtures("tape")
def test_models_that_cannot_be_recorded() -> None:
    with pytest.raises(TypeError, match="must return tensors in tuples, lists and dicts, but it returns a set"):
        graphed(Returns({1}).eval(), warm_up=0)(images())
    waits = RuntimeError("operation not permitted when stream is capturing\nmore lines")
    with pytest.raises(RuntimeError, match=r"^Returns cannot be recorded as a CUDA graph; .*: operation .* capturing$"):
        graphed(Returns(waits).eval(), warm_up=0)(images())
    with pytest.raises(torch.OutOfMemoryError, match=r"^full$"):
        graphed(Returns(torch.OutOfMemoryError("full")).eval(), warm_up=0)(images())


@pytest.mark.usefixtures("tape")
def test_copies_have_no_graphs() -> None:
    fast = graphed(small(), max_graphs=3, warm_up=0)
    x = images()
    out = fast(x)
    for copied in (copy.deepcopy(fast), pickle.loads(pickle.dumps(fast))):
        assert (copied.recorded, copied.max_graphs, copied.training) == (0, 3, False)
        with torch.no_grad():
            copied.model.head.weight.zero_()
        torch.testing.assert_close(copied(x), copied.model.head.bias.expand(2, 5))
    assert fast.recorded == 1
    torch.testing.assert_close(fast(x), out)
    assert fast.to(torch.float64).recorded == 0  # moved models free their graphs


def test_a_cpu_runs_eagerly() -> None:
    """Tensors on a CPU, on several devices or no tensors: the model is called, without gradients."""
    model = small()
    fast = graphed(model, warm_up=0)
    x = images()
    for runs in (1, 2):
        out = fast(x)
        assert (model.runs, fast.recorded, out.requires_grad) == (runs, 0, False)
    torch.testing.assert_close(out, model(x))
    for tensors in ([x], [x, torch.empty(1, device="meta")], []):
        assert not graphs._can_record(tensors)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pyramid_nano_sima", "pyramid_nano_active_token", "pyramid_nano_super_token"])
def test_on_a_gpu(name: str) -> None:
    """Real graphs, on the last GPU: several shapes share memory, states of autocast, layouts, moved weights."""
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    model = tokamix.create_model(name, num_classes=10).to(device).eval()
    fast = graphed(model, max_graphs=3, warm_up=1)
    small_batch, large_batch = (torch.randn(n, 3, 96, 96, device=device) for n in (1, 4))

    def check(x: Tensor) -> None:
        with torch.no_grad():
            expected = model(x)
        torch.testing.assert_close(fast(x), expected, rtol=1e-4, atol=1e-5)

    for x in (small_batch, large_batch, small_batch.mul(2), large_batch.mul(2), small_batch, large_batch):
        check(x)
    assert fast.recorded == 2
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16), torch.inference_mode():
            torch.testing.assert_close(fast(large_batch), model(large_batch), rtol=2e-2, atol=2e-2)
        check(large_batch.to(memory_format=torch.channels_last))
    assert fast.recorded == 3
    for weight in model.parameters():
        weight.data = weight.data * 1.01
    check(large_batch)
    model.cpu().to(device)
    check(large_batch)
    kept = fast(small_batch)
    copied = kept.clone()
    fast(small_batch + 1)
    assert torch.equal(kept, copied)


@pytest.mark.gpu
def test_static_outputs_and_unfit_models_on_a_gpu() -> None:
    fast = graphed(Nested().eval(), warm_up=0, clone=False)
    pairs = [{"inputs": [torch.full((2,), v, device="cuda"), torch.ones(2, device="cuda")]} for v in (1.0, 5.0)]
    first = fast(pairs[0])
    assert first["sum"].tolist() == [2, 2]
    fast(pairs[1])
    assert first["sum"].tolist() == [6, 6]

    class Waits(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x.sum().item()

    with pytest.raises(RuntimeError, match="Waits cannot be recorded as a CUDA graph"):
        graphed(Waits().eval(), warm_up=0)(torch.ones(2, device="cuda"))
    assert (torch.ones(2, device="cuda") + 1).tolist() == [2, 2]  # the GPU still works
