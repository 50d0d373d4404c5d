"""Compiled graphs hold the launches of kernels; traced on the CPU for a GPU that need not be present, and not run."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import aot_function
from torch._library.triton import get_triton_kernels_for_op, triton_ops_to_kernels
from torch._subclasses import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from tests.ops.kernels import both_axes, sample_and_scatter
from tests.ops.test_generated_code import stop_at_ttgir
from tokamix import ops
from tokamix.ops import dispatch
from tokamix.ops.branch_fusion.op import branch_summary, fuse_branches

pytestmark = pytest.mark.skipif(not dispatch.HAS_TRITON or dispatch.INTERPRET, reason="needs Triton's compiler")
Launched = list[tuple[str, tuple[int, ...], dict[str, Any]]]  # kernel, grid, arguments


def fuse(*branches: Tensor, backend: str) -> Tensor:
    return fuse_branches(branches, branch_summary(branches, backend).repeat(1, 3), backend)


# function, shapes and options; for each launch, in order, the tensors that it writes
CASES: dict[str, tuple[Callable[..., Tensor], list[tuple[int, ...]], dict[str, Any], list[str]]] = {
    "active_gather": (
        both_axes,
        [(2, 14, 14, 64), (2, 14, 14, 32)],
        {},
        ["p_width p_height", *["p_grad_x p_grad_offset"] * 2],
    ),
    "depthwise_conv": (
        ops.depthwise_conv,
        [(2, 14, 14, 64), (64, 1, 3, 3), (64,)],
        {"residual": True, "gelu": True},
        ["p_y", "p_grad_x p_sums", "p_weight p_bias"],
    ),
    "super_token": (
        sample_and_scatter,
        [(2, 16, 16, 64)],
        {"cell": (8, 8)},
        ["p_mean", "p_association p_parts p_weights", "p_tokens p_weight", "p_out", "p_parts", "p_tokens", "p_out"],
    ),
    "bank_mixing": (
        ops.bank_mixing,
        [(2, 196, 3, 32), (2, 196, 9, 3), (9, 169)],
        {"grid": (14, 14), "window": (7, 7)},
        ["p_logits", "p_out p_lse", "p_logits", "p_logits p_grad_v", "p_grad_policy p_grad_bank", "p_bank"],
    ),
    "sima_self_attention": (ops.sima_self_attention, [(2, 49, 3, 2, 64)], {}, ["p_out", "p_dq"]),
    "sima_attention": (ops.sima_attention, [(2, 2, 49, 64)] * 3, {}, ["p_out", "p_dq p_dk p_dv"]),
    "sima_attention_split": (
        ops.sima_attention,
        [(1, 2, 5000, 64)] * 3,
        {},
        ["p_sums", "p_small", "p_out", "p_sums", "p_small", "p_dq p_dk p_dv"],
    ),
    "layer_norm": (
        ops.layer_norm,
        [(2, 196, 64), (64,), (64,)],
        {},
        ["p_out", "p_grad_x p_sums", "p_grad_weight p_grad_bias"],
    ),
    "broadcast_context": (ops.broadcast_context, [(2, 197, 64), (64,)], {}, ["p_out", "p_out"]),
    "broadcast_context_split": (ops.broadcast_context, [(2, 5000, 64)], {}, ["p_sums", "p_out"] * 2),
    "fuse_branches": (
        fuse,
        [(2, 49, 64)] * 3,
        {},
        ["p_out", "p_out", "p_grad_0 p_grad_1 p_grad_2 p_grad_logits"],
    ),
}


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace as if the tensors were on an H200."""
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    monkeypatch.setattr(dispatch, "why_not", lambda *tensors: None)
    monkeypatch.setattr("tokamix.ops.sima.kernels._processors", lambda device: 132)
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", 90, 32)))


def trace(name: str, dtype: torch.dtype = torch.bfloat16) -> list[torch.fx.GraphModule]:
    """The graphs of the forward and of the backward pass."""
    function, shapes, options, _ = CASES[name]
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with FakeTensorMode():
        leaves = [torch.empty(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        aot_function(lambda *x: function(*x, backend="triton", **options), keep, keep)(*leaves).sum().backward()
    assert len(graphs) == 2
    return graphs


def launches_of(graphs: list[torch.fx.GraphModule]) -> list[torch.fx.Node]:
    launch = torch.ops.higher_order.triton_kernel_wrapper_functional
    return [node for graph in graphs for node in graph.graph.nodes if node.target is launch]


def operators_of(graphs: list[torch.fx.GraphModule]) -> list[str]:
    return [str(n.target) for graph in graphs for n in graph.graph.nodes if str(n.target).startswith("tokamix.")]


def kernel_of(node: torch.fx.Node) -> Any:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    kernel = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    return getattr(kernel, "fn", kernel) if hasattr(kernel, "configs") else kernel


@contextmanager
def untraced() -> Iterator[None]:
    dispatch._traced = False
    try:
        yield
    finally:
        dispatch._traced = True


@pytest.mark.parametrize("name", CASES)
def test_graphs_hold_launches_that_write_what_kernels_write(name: str) -> None:
    """If PyTorch did not know what a kernel writes, it would copy all of its tensors."""
    graphs = trace(name)
    assert not operators_of(graphs)
    assert [set(node.kwargs["tensors_to_clone"]) for node in launches_of(graphs)] == [
        set(names.split()) for names in CASES[name][3]
    ]


@pytest.mark.parametrize("name", CASES)
def test_outputs_are_no_views(name: str) -> None:
    """A kernel that writes a view would have to be followed by a copy into the viewed tensor."""
    for node in launches_of(trace(name)):
        for argument in node.kwargs["tensors_to_clone"]:
            source = node.kwargs["kwargs"][argument]
            assert "empty" in str(source.target) or source.target.__name__ == "getitem", source.target
            assert source.meta["val"].is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", CASES)
def test_kernels_compile_with_the_signature_of_generated_code(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Inductor passes Python's floats in float64, Triton's launcher in float32."""
    import triton
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setattr(triton.knobs.runtime, "add_stages_inspection_hook", stop_at_ttgir)
    for node in launches_of(trace(name, dtype)):
        kernel, given = kernel_of(node), node.kwargs["kwargs"]
        arguments = given | kernel_side_table.get_constant_args(node.kwargs["constant_args_idx"])
        options = {key: arguments.pop(key) for key in ("num_warps", "num_stages") if key in arguments}
        constants = {p.name: arguments[p.name] for p in kernel.params if p.is_constexpr}
        signature = {p.name: "constexpr" if p.is_constexpr else kind(arguments[p.name]) for p in kernel.params}
        triton.compile(ASTSource(kernel, signature, constants), target=GPUTarget("cuda", 90, 32), options=options)


def kind(argument: Any) -> str:
    """Triton's name for the type of an argument, as Inductor chooses it."""
    if isinstance(argument, torch.fx.Node):
        return {torch.bfloat16: "*bf16", torch.float32: "*fp32"}[argument.meta["val"].dtype]
    return {bool: "i1", int: "i32", float: "fp64"}[type(argument)]


@pytest.mark.parametrize("name", CASES)
def test_arguments_are_those_of_eager_calls(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from tokamix.ops.launch import Launch

    eager: Launched = []

    def record(self: Launch, tensors: tuple[Tensor, ...]) -> None:
        arguments = dict(zip(self.kernel.arg_names[len(tensors) :], self.numbers, strict=False)) | self.constants
        eager.append((self.kernel.__name__, self.grid, arguments))

    monkeypatch.setattr(Launch, "_launch", record)
    function, shapes, options, _ = CASES[name]
    leaves = [torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    with dispatch.use_light(False):
        out = function(*leaves, backend="triton", **options)
        torch.autograd.grad(out, leaves, torch.zeros_like(out))
    nodes = launches_of(trace(name))
    assert len(nodes) == len(eager)
    for node, (kernel, grid, arguments) in zip(nodes, eager, strict=True):
        traced = {k: v for k, v in node.kwargs["kwargs"].items() if not isinstance(v, torch.fx.Node)}
        launch_options = {"num_warps", "num_stages", "maxnreg"}
        assert traced == {k: v for k, v in arguments.items() if k not in launch_options}
        assert kernel_of(node).__name__ == kernel
        assert list(node.kwargs["grid"]) == [grid]


def test_options_of_a_launch_are_kept() -> None:
    from torch._higher_order_ops.triton_kernel_wrap import kernel_side_table

    node = launches_of(trace("active_gather"))[0]
    kernel: Any = kernel_side_table.get_kernel(node.kwargs["kernel_idx"])
    (config,) = kernel.configs
    assert config.num_warps == 8


def test_operators_stay_if_kernels_are_not_traced() -> None:
    with untraced():
        graphs = trace("depthwise_conv")
    assert operators_of(graphs) == ["tokamix.depthwise_conv.default", "tokamix.depthwise_conv_backward.default"]
    assert not launches_of(graphs)


def test_operator_stays_if_its_launch_limits_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor of torch 2.11 would drop the limit; nothing of the attempt remains in the graph."""
    monkeypatch.setitem(CASES, "limited", (ops.sima_self_attention, [(2, 196, 3, 2, 64)], {}, []))
    graphs = trace("limited")
    assert operators_of(graphs) == ["tokamix.sima_self_attention.default"]
    assert [set(node.kwargs["tensors_to_clone"]) for node in launches_of(graphs)] == [{"p_dq"}]


def test_operators_stay_if_sizes_are_symbols() -> None:
    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        return ops.depthwise_conv(x, weight, backend="triton")

    inputs = torch.empty(3, 4, 5, 8), torch.empty(8, 1, 3, 3)
    for mode, expected in (("symbolic", ["tokamix.depthwise_conv.default"]), ("fake", [])):
        graph = make_fx(dispatch_functionalize(convolve), tracing_mode=mode)(*inputs)
        assert operators_of([graph]) == expected


OPERATORS = sorted(name for name in triton_ops_to_kernels if name.startswith("tokamix::"))


def test_keys_of_cached_graphs_hold_the_code_of_all_kernels() -> None:
    """PyTorch keeps compiled graphs on disk; if a kernel changes, it must not load the old one."""
    from torch._inductor.codegen.wrapper import user_defined_triton_kernel_transitive_closure_source_code as source_of

    assert len(OPERATORS) == 20
    for name in OPERATORS:
        sources = [source_of(kernel) for kernel in get_triton_kernels_for_op(name)]
        assert any("_kernel(" in source and "tl.store" in source for source in sources), name
    with untraced():
        assert not any(list(get_triton_kernels_for_op(name)) for name in OPERATORS)


def test_equal_launches_are_analysed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise analyses would take half of the time of compiling a model."""
    from torch._higher_order_ops import triton_kernel_wrap

    calls = []
    generate = triton_kernel_wrap.generate_ttir

    def count(kernel: Any, *args: Any) -> Any:
        calls.append(kernel)
        return generate(kernel, *args)

    monkeypatch.setattr(triton_kernel_wrap, "generate_ttir", count)
    trace("depthwise_conv", torch.float16)
    assert len(calls) == 3  # a launch in the forward pass, two in the backward pass
    trace("depthwise_conv", torch.float16)
    assert len(calls) == 3


def test_analyses_of_other_kernels_are_not_remembered() -> None:
    from tokamix.ops.trace import _remember

    calls = []

    def analyse(kernel: Any, arguments: dict[str, Any]) -> None:
        calls.append(kernel)

    look_up = _remember(analyse)
    foreign, ours = SimpleNamespace(fn=logging.getLogger), SimpleNamespace(fn=ops.depthwise_conv)
    for kernel in (foreign, foreign, ours):
        look_up(kernel, {"n": 1})
    assert len(calls) == 3
    look_up(ours, {"n": 1})
    assert len(calls) == 3
    look_up(ours, {"n": True})
    look_up(ours, {"n": 2})
    look_up(ours, {"n": torch.empty(1)})
    look_up(ours, {"n": torch.empty(2)})
    assert len(calls) == 6
