"""Properties shared by the kernels of all operators, under Triton's interpreter or on a GPU."""

import logging
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.ops.kernels import DEVICE
from tokamix import ops
from tokamix.ops import dispatch
from tokamix.ops.branch_fusion.op import branch_summary, fuse_branches

on_gpu = pytest.mark.gpu  # the interpreter has one thread and no graphs


def super_tokens(x: Tensor) -> Tensor:
    tokens, association = ops.super_token_sample(x, (2, 3))
    return ops.super_token_scatter(tokens, association, (2, 3))


def fuse(*branches: Tensor) -> Tensor:
    return fuse_branches(branches, branch_summary(branches).sin().repeat_interleave(3, dim=1))


# function, and shapes of its inputs: tuples without the batch axis, lists for parameters, which have no batch axis
OPERATORS: dict[str, tuple[Callable[..., Tensor], tuple]] = {
    "sima_attention": (ops.sima_attention, ((2, 7, 16), (2, 5, 16), (2, 5, 16))),
    "sima_self_attention": (ops.sima_self_attention, ((7, 3, 2, 16),)),
    "active_gather": (lambda x, offset: torch.cat(ops.active_gather_axes(x, offset)), ((5, 4, 6), (5, 4, 4))),
    "super_token": (super_tokens, ((5, 6, 12),)),
    "bank_mixing": (lambda v, p, b: ops.bank_mixing(v, p, b, (2, 3)), ((6, 2, 4), (6, 3, 2), [3, 15])),
    "broadcast_context": (ops.broadcast_context, ((6, 8), [8])),
    "branch_fusion": (fuse, ((5, 8), (5, 8), (5, 8))),
    "layer_norm": (ops.layer_norm, ((5, 8), [8], [8])),
    "depthwise_conv": (lambda *x: ops.depthwise_conv(*x, True, True), ((4, 5, 8), [8, 1, 3, 3], [8])),
}


def make(name: str, batch: int = 2) -> list[Tensor]:
    shapes = [s if isinstance(s, list) else (batch, *s) for s in OPERATORS[name][1]]
    return [torch.randn(shape, device=DEVICE).requires_grad_() for shape in shapes]


def run(name: str, inputs: list[Tensor], backend: str | None = "triton") -> list[Tensor]:
    """The output and the gradients of all inputs."""
    with dispatch.use_backend(backend):
        out = OPERATORS[name][0](*inputs)
        seed = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape)
        return [out.detach(), *torch.autograd.grad(out, inputs, seed)]


@pytest.mark.parametrize("name", OPERATORS)
def test_empty_batch(name: str) -> None:
    inputs = make(name, batch=0)
    torch.testing.assert_close(run(name, inputs), run(name, inputs, "eager"))


@pytest.mark.parametrize("name", OPERATORS)
def test_any_strides(name: str, poison_empty: None) -> None:
    """Maps and parameters that are every second number of a wider tensor."""
    inputs = make(name)
    apart = [x.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_() for x in inputs]
    assert not any(x.is_contiguous() for x in apart)
    torch.testing.assert_close(run(name, apart), run(name, inputs))


@pytest.mark.parametrize("name", OPERATORS)
def test_torch_func(name: str) -> None:
    inputs = [x.detach() for x in make(name)]
    op = OPERATORS[name][0]
    got = torch.func.grad(lambda *x: op(*x).sin().sum(), argnums=tuple(range(len(inputs))))(*inputs)
    leaves = [x.requires_grad_() for x in inputs]
    torch.testing.assert_close(got, torch.autograd.grad(op(*leaves).sin().sum(), leaves))


def test_gradients_of_gradients(poison_empty: None) -> None:
    """Double backward is right or raises; it never drops a term silently."""
    x = torch.randn(2, 6, 8, device=DEVICE, requires_grad=True)
    results = []
    for backend in ("eager", "triton"):
        y = ops.broadcast_context(x.sin(), backend=backend)
        (slope,) = torch.autograd.grad((y**2).sum(), x, create_graph=True)
        results.append(torch.autograd.grad((slope**2).sum(), x)[0])
    torch.testing.assert_close(*results)
    qkv = torch.randn(2, 7, 3, 2, 16, device=DEVICE, requires_grad=True)
    out = ops.sima_self_attention(qkv.sin(), backend="triton")
    (slope,) = torch.autograd.grad((out**2).sum(), qkv, create_graph=True)
    with pytest.raises(RuntimeError, match=r"no autograd formula was registered|does not require grad"):
        torch.autograd.grad((slope**2).sum(), qkv)


def test_traced() -> None:
    x = torch.randn(2, 6, 8, device=DEVICE)
    traced = torch.jit.trace(lambda x: ops.broadcast_context(x, backend="triton"), x, check_trace=False)
    other = torch.randn(2, 6, 8, device=DEVICE)
    torch.testing.assert_close(traced(other), ops.broadcast_context(other, backend="eager"))


@pytest.mark.parametrize("name", OPERATORS)
def test_log_says_why_it_runs_eagerly(name: str, caplog: pytest.LogCaptureFixture) -> None:
    inputs = [x.detach().double() for x in make(name)]
    with caplog.at_level(logging.DEBUG, logger="tokamix"):
        OPERATORS[name][0](*inputs)
    assert "runs eagerly: torch.float64 is not among float16, bfloat16 and float32" in caplog.text
    with (
        dispatch.use_backend("triton"),
        pytest.raises(RuntimeError, match=r"float64 is not among.*use backend='eager'"),
    ):
        OPERATORS[name][0](*inputs)


def test_forced_where_plain_pytorch_is_better() -> None:
    """Compiled context broadcasting fuses with its neighbours, unless the kernel is forced."""
    x = torch.randn(2, 6, 8, device=DEVICE)
    for backend, calls in (("triton", 1), (None, 0)):
        torch.compiler.reset()
        graphs: list[torch.fx.GraphModule] = []
        with dispatch.use_backend(backend):
            compiled = torch.compile(ops.broadcast_context, fullgraph=True, backend=partial(keep, graphs))
            out = compiled(x)
        assert str(graphs[0].graph).count("tokamix.broadcast_context") == calls
        torch.testing.assert_close(out, ops.broadcast_context(x, backend="eager"))


def keep(graphs: list[torch.fx.GraphModule], graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
    graphs.append(graph)
    return graph


@pytest.mark.parametrize("kind", ["gate", "policy", "plan"])
def test_forced_where_there_is_no_kernel(kind: str) -> None:
    x = torch.randn(1, 4, 4, 8, device=DEVICE)
    calls = {
        "gate": lambda **k: ops.broadcast_context(x.flatten(1, 2), kind="gate", **k),
        "policy": lambda **k: ops.bank_mixing(
            x.flatten(1, 2).unflatten(2, (2, 4)), None, x.new_ones(2, 49), (4, 4), **k
        ),
        "plan": lambda **k: ops.active_gather_axes(x, eager_plan(x), **k),
    }
    calls[kind](backend="eager")
    with pytest.raises(RuntimeError, match="cannot run on the triton backend"):
        calls[kind](backend="triton")
    with pytest.raises(ValueError, match="unknown backend 'bogus'"):
        calls[kind](backend="bogus")


def eager_plan(x: Tensor) -> object:
    from tokamix.ops.active_token.op import plan_gather_axes

    return plan_gather_axes(x, torch.zeros_like(x), backend="eager")


def registered() -> dict[str, tuple]:
    """Arguments for every registered operator, backward ones too."""
    q, k, v = (x.transpose(1, 2) for x in make("sima_attention"))
    (qkv,), (x, offset) = make("sima_self_attention"), make("active_gather")
    (tokens,), (mixed, policy, bank) = make("super_token"), make("bank_mixing")
    (broadcast, scale), conv, norm = make("broadcast_context"), make("depthwise_conv"), make("layer_norm")
    cell, bank_options = [2, 3], ([2, 3], [2, 3], [0, 0], True, "softmax")
    sampled, association, weight = torch.ops.tokamix.super_token_sample(tokens.detach(), cell, 1, True)
    out, statistics = torch.ops.tokamix.bank_mixing(mixed.detach(), policy.detach(), bank.detach(), *bank_options)
    groups = {"q": (q, k, v), "x": (x, offset), "b": (mixed, policy, bank), "c": conv, "n": norm}
    fixed = {key: [t.detach() for t in group] for key, group in groups.items()}
    return {
        "sima_attention": (q, k, v, "l1", 1e-12),
        "sima_attention_backward": (fixed["q"][0], *fixed["q"], "l1", 1e-12),
        "sima_self_attention": (qkv, "l1", 1e-12),
        "sima_self_attention_backward": (qkv.detach()[:, :, 0], qkv.detach(), "l1", 1e-12),
        "active_gather": (x, offset, [2, 1]),
        "active_gather_backward": ([fixed["x"][0]] * 2, *fixed["x"], [2, 1]),
        "super_token_sample": (tokens, cell, 1, True),
        "super_token_sample_backward": (sampled, association, weight, cell, True),
        "super_token_scatter": (sampled.clone().requires_grad_(), association, cell, True),
        "super_token_scatter_backward": (tokens.detach(), association, cell, True),
        "bank_mixing": (mixed, policy, bank, *bank_options),
        "bank_mixing_backward": (out, *fixed["b"], out, statistics, *bank_options),
        "broadcast_context": (broadcast, scale),
        "layer_norm": (*norm, 1e-5, torch.bfloat16),
        "layer_norm_backward": (fixed["n"][0].bfloat16(), *fixed["n"][:2], 1e-5),
        "depthwise_conv": (*conv, True, True),
        "depthwise_conv_backward": (fixed["c"][0], *fixed["c"][:2], True, True),
    }


def test_opcheck() -> None:
    for name, arguments in registered().items():
        torch.library.opcheck(getattr(torch.ops.tokamix, name), arguments)


def differentiate(op: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output, and the gradients of all inputs for the gradient of a sum, whose strides are 0, beside another."""
    with dispatch.use_backend("triton"):
        out = op(*inputs)
        seed = torch.linspace(-1, 1, out[0].numel(), device=DEVICE).view(out[0].shape)
        return [x.detach() for x in out] + [*torch.autograd.grad(out, inputs, [seed, torch.ones((), device=DEVICE)])]


@on_gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_compiled_code_launches_the_kernels(name: str) -> None:
    """In place of our operators, on tensors of the strides of eager calls."""
    from torch._inductor.utils import run_and_get_code

    op = OPERATORS[name][0]
    inputs = [x.detach().repeat_interleave(2, -1)[..., ::2].requires_grad_() for x in make(name)]

    def twice(*inputs: Tensor) -> tuple[Tensor, Tensor]:
        return op(*inputs), op(*(x.movedim(0, -1).clone().movedim(-1, 0) for x in inputs)).sum()

    with torch._inductor.config.patch(force_disable_caches=True):
        results, code = run_and_get_code(differentiate, torch.compile(twice, fullgraph=True), inputs)
    assert "_kernel_0.run(" in code[0]
    assert not any("torch.ops.tokamix" in lines for lines in code)
    torch.testing.assert_close(results, differentiate(twice, inputs))


@on_gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_deterministic(name: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        inputs = make(name, batch=64)
        first = run(name, inputs)
        for _ in range(3):
            for a, b in zip(run(name, inputs), first, strict=True):
                assert torch.equal(a, b)
    finally:
        torch.use_deterministic_algorithms(False)


@on_gpu
@pytest.mark.parametrize("name", OPERATORS)
def test_replays_as_a_cuda_graph(name: str) -> None:
    inputs, others = make(name), make(name)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(name, inputs)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = run(name, inputs)
    with torch.no_grad():
        for x, other in zip(inputs, others, strict=True):
            x.copy_(other)
    graph.replay()
    torch.testing.assert_close(recorded, run(name, others))
