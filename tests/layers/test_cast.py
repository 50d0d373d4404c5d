"""One cast of all weights under autocast: the same numbers with fewer operators."""

import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from timm import create_model
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.utils import parametrizations, prune
from torch.profiler import ProfilerActivity, profile

import tokamix.models  # noqa: F401  registers our models with timm
from tokamix.layers import cast
from tokamix.models._backbone import Pyramid
from tokamix.ops import dispatch

MODELS = {
    "pyramid_nano_active_token": {},
    "pyramid_nano_super_token": {},
    "columnar_tiny_sima": {"dim": 32, "depth": 2, "num_heads": 2},
    "columnar_tiny_weight_mixing": {"dim": 32, "depth": 2, "num_heads": 2},
    "xcit_tiny_12_p16_sima": {},
}


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast, "ENABLED", True)  # as TOKAMIX_CAST_WEIGHTS=1 does


@contextmanager
def cast_by_autocast() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cast, "ENABLED", False)
        yield


def create(name: str = "pyramid_nano_active_token", **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    return create_model(name, num_classes=16, **MODELS[name], **kwargs)


def step(model: nn.Module, run: Callable[[Tensor], Any] | None = None) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Logits and gradients of a training step with bfloat16."""
    torch.manual_seed(1)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = (run or model)(torch.randn(2, 3, 32, 32))
    out.float().square().sum().backward()
    return out.detach(), {name: p.grad for name, p in model.named_parameters()}


def assert_same(model: nn.Module, run: Callable[[Tensor], Any] | None = None) -> None:
    out, grads = step(model, run)
    with cast_by_autocast():
        expected, expected_grads = step(model, run)
    assert torch.equal(out, expected)
    for name, grad in grads.items():
        other = expected_grads[name]
        assert (grad is None) == (other is None), name
        assert grad is None or (grad.dtype is other.dtype and torch.equal(grad, other)), name


def casts(model: nn.Module) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step(model)
    return sum(event.name == "aten::_to_copy" for event in profiler.events())


@pytest.mark.parametrize("name", MODELS)
def test_same_logits_and_gradients(name: str) -> None:
    assert_same(create(name))


def test_each_weight_is_cast_with_all_others() -> None:
    model = create()
    plain = [layer for layer in model.modules() if type(layer) is nn.Linear]
    weights = sum(w.numel() % 8 == 0 for layer in plain for w in layer.parameters())
    with cast_by_autocast():
        before = casts(model)
    assert weights > 50
    assert before - casts(model) >= 2 * weights  # of the weight and of its gradient


def test_the_layers_have_their_own_weights_afterwards() -> None:
    model = create()
    layer, seen = model.stages[0].blocks[0], []
    hook = layer.register_forward_pre_hook(lambda module, args: seen.append(model.head.weight.dtype))
    step(model)
    hook.remove()
    assert seen == [torch.bfloat16]
    assert model.head.weight.dtype is torch.float32
    assert model.head.weight is dict(model.named_parameters())["head.weight"]

    def fail(*_: Any) -> None:
        raise RuntimeError("stop")

    layer.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="stop"):
        step(model)
    assert model.head.weight.dtype is torch.float32


def test_frozen_weights_get_no_gradients() -> None:
    model = create()
    model.stages.requires_grad_(False)
    assert_same(model)
    assert all(p.grad is None for p in model.stages.parameters())


def test_checkpointed_blocks() -> None:
    model = create()
    model.set_grad_checkpointing()
    assert_same(model.train())


def test_features() -> None:
    model = create()
    assert_same(model, lambda x: model.forward_intermediates(x, [0], stop_early=True, intermediates_only=True)[0])


def test_without_gradients() -> None:
    model, images = create().eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = model(images)
        with cast_by_autocast():
            assert torch.equal(out, model(images))


def test_layers_that_change_their_weights_are_left_alone() -> None:
    model = create()
    parametrizations.weight_norm(model.head)
    block = model.stages[0].blocks[0]
    nn.utils.spectral_norm(block.mlp.fc1)
    prune.random_unstructured(block.mlp.fc2, "weight", 0.5)
    assert_same(model.eval())


def test_tied_weights() -> None:
    model = create()
    first, second = model.stages[0].blocks[:2]
    second.mlp.fc1.weight = first.mlp.fc1.weight
    assert_same(model)


class InFloat32(nn.Module):
    """A classifier that computes in float32, also under autocast."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return self.linear(x.float())


class WithFloat32Head(Pyramid):
    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return super().forward_head(x.float(), pre_logits)


@pytest.mark.parametrize("kind", ["module", "method", "model"])
def test_modules_from_elsewhere_have_their_own_weights(kind: str) -> None:
    model = create()
    if kind == "module":
        model.head = InFloat32(model.head)
    elif kind == "method":
        model.head = nn.Sequential(model.head)
        model.head.forward = lambda x: InFloat32(model.head[0])(x)
    else:
        model.__class__ = WithFloat32Head
    assert_same(model)
    assert step(model)[0].dtype is torch.float32


@contextmanager
def beside(model: nn.Module, autocast: bool) -> Iterator[None]:
    """A forward pass without gradients in another thread, which is in the middle of the model meanwhile."""
    inside, go, errors = threading.Event(), threading.Event(), []

    def stop(*_: Any) -> None:
        if threading.current_thread() is thread:
            inside.set()
            go.wait(60)

    def run() -> None:
        try:
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                model(torch.randn(2, 3, 32, 32))
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    hook = model.stages[0].blocks[0].register_forward_pre_hook(stop)
    thread.start()
    try:
        assert inside.wait(60)
        yield
    finally:
        go.set()
        thread.join()
        hook.remove()
    assert not errors


@pytest.mark.parametrize("autocast", [False, True])
def test_threads_read_no_casts_of_others(autocast: bool) -> None:
    model, images = create(), torch.randn(2, 3, 32, 32)
    expected, (out, grads) = model(images).detach(), step(model)
    with beside(model, autocast):
        assert torch.equal(model(images), expected)
        found, found_grads = step(model)
        assert model.head.weight.dtype is torch.float32
    assert torch.equal(found, out)
    assert all(torch.equal(grad, grads[name]) for name, grad in found_grads.items())
    assert not cast._running


def test_another_thread_takes_the_casts_away() -> None:
    """The first thread goes on with its own weights, which autocast casts."""
    model, dtypes = create(), []
    expected, expected_grads = step(model)

    def look(*_: Any) -> None:
        if threading.current_thread() is threading.main_thread():
            dtypes.append(model.head.weight.dtype)
            with beside(model, False):
                dtypes.append(model.head.weight.dtype)

    hook = model.stages[-1].register_forward_pre_hook(look)
    out, grads = step(model)
    hook.remove()
    assert dtypes == [torch.bfloat16, torch.float32]
    assert torch.equal(out, expected)
    assert all(torch.equal(grad, expected_grads[name]) for name, grad in grads.items())
    assert_same(model)
    assert not cast._running


def test_a_forward_pass_without_autocast_within_another_one() -> None:
    model, images, found = create(), torch.randn(2, 3, 32, 32), []

    def enter(*_: Any) -> None:
        hook.remove()
        with torch.autocast("cpu", enabled=False):
            found.append(model(images))

    with torch.no_grad():
        expected = model(images)
        with torch.autocast("cpu", torch.bfloat16):
            out = model(images)
            hook = model.stages[1].register_forward_pre_hook(enter)
            assert torch.equal(model(images), out)
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize("change", ["gradients", "weights", "shared"])
def test_a_forward_pass_within_another_one(change: str) -> None:
    """It needs gradients, which the casts of the outer one do not have, or has other weights."""
    model, images, found = create(), torch.randn(2, 3, 32, 32), []
    inner = copy.copy(model) if change == "shared" else model  # with the same layers
    others = {name: 2 * p for name, p in model.named_parameters()}

    def enter(*_: Any) -> None:
        hook.remove()
        if change == "weights":
            found.append(torch.func.functional_call(model, others, (images,)))
        else:
            with torch.enable_grad():
                found.extend(step(inner)[1].values())

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for enabled in (True, False):
            hook = model.stages[1].register_forward_pre_hook(enter)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(cast, "ENABLED", enabled)
                model(images)
    assert not cast._running
    half = len(found) // 2
    assert all(a is not None and torch.equal(a, b) for a, b in zip(found[:half], found[half:], strict=True))


def change_weights(block: nn.Module, *_: Any) -> None:
    with torch.no_grad():
        for weight in block.parameters():
            weight.clamp_(-0.01, 0.01)


def start_float32(block: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    block.autocast = torch.autocast("cpu", enabled=False)
    block.autocast.__enter__()
    return (args[0].float(), *args[1:])


def end_float32(block: nn.Module, *_: Any) -> None:
    block.autocast.__exit__(None, None, None)


def test_hooks_that_change_the_weights_of_their_module() -> None:
    results = []
    for patched in (nullcontext(), cast_by_autocast()):
        model = create()
        model.stages[0].blocks[1].register_forward_pre_hook(change_weights)
        with patched:
            results.append(step(model)[0])
    assert torch.equal(*results)


def test_hooks_of_all_modules() -> None:
    model, seen = create(), []
    hook = register_module_forward_pre_hook(
        lambda layer, _: seen.append(layer.weight) if type(layer) is nn.Linear else None
    )
    try:
        step(model)
    finally:
        hook.remove()
    assert seen
    assert all(type(weight) is nn.Parameter for weight in seen)


def test_hooks_that_run_their_module_in_float32() -> None:
    model = create("columnar_tiny_sima")
    model.blocks[1].register_forward_pre_hook(start_float32)
    model.blocks[1].register_forward_hook(end_float32)
    assert_same(model)


def test_hooks_that_run_their_module_with_gradients() -> None:
    model, images = create("columnar_tiny_sima"), torch.randn(2, 3, 32, 32)
    block = model.blocks[1]

    def run_again(block: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
        with torch.enable_grad():
            block.forward(*args).sum().backward()

    block.register_forward_hook(run_again)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(images)
    assert all(weight.grad is not None for weight in block.parameters())


@pytest.mark.parametrize("grad", [False, True])
def test_copies_made_during_a_forward_pass(grad: bool) -> None:
    """They have their own weights, and the pass goes on with the model's."""
    model, images, copies = create(), torch.randn(2, 3, 32, 32), []
    hook = model.stages[1].register_forward_pre_hook(lambda *_: copies.append(copy.deepcopy(model)))
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16):
        out = model(images)
        hook.remove()
        assert torch.equal(model(images), out)
        for network in (model, copies[0]):
            network.head.weight.data.mul_(2)
        assert torch.equal(model(images), copies[0](images))
    assert not any({"weight", "bias"} & vars(layer).keys() for layer in copies[0].modules())


def test_copies_of_compiled_models_are_not_compiled() -> None:
    """As those of other modules: the compiled function belongs to the model."""
    model = create("columnar_tiny_sima")
    model.compile(backend="eager")
    assert model._compiled_call_impl is not None
    assert copy.deepcopy(model)._compiled_call_impl is None


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_weights_that_are_not_used(register: str) -> None:
    model, calls = create("columnar_tiny_sima"), []
    for weight in (model.head.weight, model.blocks[0].mlp.fc1.weight):
        getattr(weight, register)(calls.append)
    step(model, lambda x: model.forward_intermediates(x, [0], stop_early=True, intermediates_only=True)[0])
    assert [call.shape for call in calls] == [model.blocks[0].mlp.fc1.weight.shape]


@pytest.mark.parametrize("vectorised", ["is_grads_batched", "vmap"])
def test_many_gradients_at_once(vectorised: str) -> None:
    model, seeds = create("columnar_tiny_sima"), torch.eye(16)
    model.stem.requires_grad_(False)  # vmap cannot differentiate its convolution under autocast

    def jacobian() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            out = model(torch.ones(1, 3, 32, 32)).float().sum(0)
        weight = model.head.weight
        if vectorised == "vmap":
            return torch.vmap(lambda seed: torch.autograd.grad(out, weight, seed)[0])(seeds)
        return torch.autograd.grad(out, weight, seeds, is_grads_batched=True)[0]

    with dispatch.use_backend("eager"):
        found = jacobian()
        with cast_by_autocast():
            torch.testing.assert_close(found, jacobian())


def test_gradients_of_gradients() -> None:
    model, images = create("columnar_tiny_sima"), torch.randn(1, 3, 32, 32)

    def penalty() -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(images).float().square().sum()
        (grad,) = torch.autograd.grad(loss, model.head.weight, create_graph=True)
        return torch.autograd.grad(grad.square().sum(), model.head.bias)[0]

    with dispatch.use_backend("eager"):
        found = penalty()
        with cast_by_autocast():
            torch.testing.assert_close(found, penalty(), rtol=2e-2, atol=1e-3)


def test_not_without_autocast() -> None:
    model = create()
    dtypes: list[torch.dtype] = []
    model.stages[0].register_forward_pre_hook(lambda module, args: dtypes.append(model.head.weight.dtype))
    model(torch.randn(1, 3, 32, 32))
    with dispatch.use_light(False), torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(1, 3, 32, 32))
    assert dtypes == [torch.float32, torch.float32]


@pytest.fixture
def compiled_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[CompileCounterWithBackend]:
    """A backend of torch.compile that counts graphs; compiled calls cast all weights on the CPU, too."""
    monkeypatch.setattr(cast, "_wanted", lambda x: cast.ENABLED and torch.compiler.is_compiling())
    torch._dynamo.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()


def casts_of(graph: Any) -> int:
    return sum("cast_each" in str(node.target) for node in graph.graph.nodes)


def test_compiled(compiled_as_on_a_gpu: CompileCounterWithBackend) -> None:
    model = create("columnar_tiny_sima")
    model.blocks[1].requires_grad_(False)
    parameters = list(model.parameters())
    run = torch.compile(model.forward, backend=compiled_as_on_a_gpu, fullgraph=True)
    assert_same(model, run)
    step(model, run)
    assert [casts_of(graph) for graph in compiled_as_on_a_gpu.graphs] == [1, 0]  # and not compiled again
    assert all(x is y for x, y in zip(model.parameters(), parameters, strict=True))


def test_compiled_with_weights_that_are_not_used(compiled_as_on_a_gpu: CompileCounterWithBackend) -> None:
    model = create("columnar_tiny_sima")

    def features(x: Tensor) -> Tensor:
        return model.forward_intermediates(x, [0], stop_early=True, intermediates_only=True)[0]

    assert_same(model, torch.compile(features, backend=compiled_as_on_a_gpu, fullgraph=True))
    assert casts_of(compiled_as_on_a_gpu.graphs[0]) == 1
    assert model.head.weight.grad is None


class Breaking(nn.Module):
    """A block in which Dynamo's graph breaks."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.fails = block, False

    def forward(self, *inputs: Any) -> Tensor:
        torch._dynamo.graph_break()
        if self.fails:
            raise RuntimeError("stop")
        return self.block(*inputs)


def test_compiled_with_a_broken_graph(compiled_as_on_a_gpu: CompileCounterWithBackend) -> None:
    """The parts are compiled without casts; an error leaves the model as it was."""
    model = create("columnar_tiny_sima")
    block = model.blocks[1] = Breaking(model.blocks[1])
    parameters = list(model.parameters())
    run = torch.compile(model.forward, backend=compiled_as_on_a_gpu)
    assert_same(model, run)
    assert len(compiled_as_on_a_gpu.graphs) > 1
    block.fails = True
    with pytest.raises(RuntimeError, match="stop"):
        step(model, run)
    assert all(x is y for x, y in zip(model.parameters(), parameters, strict=True))


def test_compiled_with_a_module_from_elsewhere(compiled_as_on_a_gpu: CompileCounterWithBackend) -> None:
    model = create("columnar_tiny_sima")
    model.head = InFloat32(model.head)
    assert_same(model, torch.compile(model.forward, backend=compiled_as_on_a_gpu, fullgraph=True))
    assert casts_of(compiled_as_on_a_gpu.graphs[0]) == 1


def test_compiled_with_checkpoints(compiled_as_on_a_gpu: CompileCounterWithBackend) -> None:
    model = create("columnar_tiny_sima").train()
    model.set_grad_checkpointing()
    assert_same(model, torch.compile(model.forward, backend=compiled_as_on_a_gpu, fullgraph=True))


def test_compiled_blocks_cast_their_own_weights() -> None:
    model = create("columnar_tiny_sima")
    seen: list[torch.dtype] = []

    def look(*_: Any) -> None:
        seen.extend(layer.weight.dtype for layer in (model.blocks[0].mlp.fc1, model.blocks[1].mlp.fc1, model.head))

    torch._dynamo.reset()
    model.stem.register_forward_hook(look)
    model.blocks[1].compile(backend="eager")
    assert_same(model)
    assert seen[:3] == [torch.bfloat16, torch.float32, torch.bfloat16]
    torch._dynamo.reset()


def test_operator_of_compiled_graphs() -> None:
    weights = [torch.randn(3, 4, requires_grad=True), torch.randn(5, requires_grad=True)]
    torch.library.opcheck(torch.ops.tokamix.cast_each, (weights, torch.bfloat16))


def train_on_a_gpu(model: nn.Module, run: Callable[[Tensor], Tensor], images: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits and gradients of the third step with the same weights: the first two are for CUDA graphs to warm up."""
    for _ in range(3):
        model.zero_grad(set_to_none=True)
        with torch.autocast(images.device.type, dtype):
            out = run(images).float()
        out.square().sum().backward()
    return torch.cat([x.flatten() for x in (out.detach(), *(p.grad for p in model.parameters() if p.grad is not None))])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["columnar_tiny_sima", "pyramid_nano_super_token"])
def test_eager_on_a_gpu(name: str, dtype: torch.dtype) -> None:
    model, images = create(name).cuda(), torch.randn(4, 3, 64, 64, device="cuda")
    found = train_on_a_gpu(model, model, images, dtype)
    with cast_by_autocast():
        expected = train_on_a_gpu(model, model, images, dtype)
    assert found.shape == expected.shape
    assert (found - expected).norm() < 1e-2 * expected.norm()


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_compiled_on_a_gpu(graphs: bool) -> None:
    model, images = create("columnar_tiny_sima").cuda(), torch.randn(4, 3, 64, 64, device="cuda")
    results, counts = [], []
    for enabled in (True, False):
        torch._dynamo.reset()
        backend = CompileCounterWithBackend("inductor")
        run = torch.compile(model.forward, backend=backend, fullgraph=True)
        with pytest.MonkeyPatch.context() as patch, torch._inductor.config.patch("triton.cudagraphs", graphs):
            patch.setattr(cast, "ENABLED", enabled)
            results.append(train_on_a_gpu(model, run, images, torch.bfloat16))
        counts.append([casts_of(graph) for graph in backend.graphs])
    torch._dynamo.reset()
    assert counts == [[1], [0]]
    assert (results[0] - results[1]).norm() < 3e-2 * results[1].norm()


@pytest.mark.gpu
def test_threads_with_streams_of_their_own() -> None:
    model, images = create().cuda().eval(), torch.randn(4, 3, 64, 64, device="cuda")

    def run(_: int) -> Tensor:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream), torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            out = torch.stack([model(images) for _ in range(20)])
        stream.synchronize()
        return out

    torch.cuda.synchronize()
    expected = run(0)[0]
    with ThreadPoolExecutor(4) as threads:
        for out in threads.map(run, range(4)):
            torch.testing.assert_close(out, expected.expand_as(out), rtol=2e-2, atol=1e-2)
