"""The light path of plain eager calls on the CPU, where the operators' implementations are the references."""

import pytest
import torch
from torch import Tensor

from tokamix.ops import dispatch
from tokamix.ops.active_token.op import _active_gather
from tokamix.ops.branch_fusion.op import _fuse, _summary
from tokamix.ops.context_broadcast.op import _broadcast_context
from tokamix.ops.depthwise_conv.op import _depthwise_conv
from tokamix.ops.layer_norm.op import _layer_norm
from tokamix.ops.operator import Operator
from tokamix.ops.sima.op import _attention, _self_attention
from tokamix.ops.super_token.op import _sample, _scatter
from tokamix.ops.weight_mixing.op import _bank_mixing

# operator, shapes of its tensors, other arguments
CASES: dict[str, tuple[Operator, list[tuple[int, ...]], tuple]] = {
    "active_gather": (_active_gather, [(2, 3, 4, 6), (2, 3, 4, 4)], ([2, 1],)),
    "depthwise_conv": (_depthwise_conv, [(2, 3, 4, 6), (6, 1, 3, 3), (6,)], (True, True)),
    "super_token_sample": (_sample, [(2, 4, 6, 5)], ((2, 3), 1, False)),
    "super_token_scatter": (_scatter, [(2, 2, 2, 5), (2, 4, 6, 9)], ((2, 3), False)),
    "sima_attention": (_attention, [(2, 5, 2, 4)] * 3, ("l1", 1e-12)),
    "sima_self_attention": (_self_attention, [(2, 5, 3, 2, 4)], ("l1", 1e-12)),
    "bank_mixing": (_bank_mixing, [(2, 6, 2, 4), (2, 6, 3, 2), (3, 15)], ((2, 3), (2, 3), (0, 0), True, "softmax")),
    "branch_summary": (_summary, [(2, 5, 4)] * 3, ()),
    "fuse_branches": (_fuse, [(2, 5, 4)] * 3 + [(2, 12)], ()),
    "layer_norm": (_layer_norm, [(2, 5, 4), (4,), (4,)], (1e-5, torch.float64)),
    "broadcast_context": (_broadcast_context, [(2, 5, 4), (4,)], ()),
}


def run(name: str, tensors: list[Tensor], light: bool) -> list[Tensor | None]:
    """The first output and the gradients of all tensors."""
    op, _, options = CASES[name]
    with dispatch.use_light(light):
        out = op(*tensors, *options)
        out = out if isinstance(out, Tensor) else out[0]
        return [out.detach(), *torch.autograd.grad(out.sin().sum(), tensors, allow_unused=True)]


@pytest.mark.parametrize("name", CASES)
def test_bits_of_both_paths(name: str) -> None:
    tensors = [torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in CASES[name][1]]
    for a, b in zip(run(name, tensors, light=True), run(name, tensors, light=False), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


def test_light_path_does_not_call_the_dispatcher(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*inputs: object) -> None:
        raise AssertionError("called the dispatcher")

    monkeypatch.setattr(_depthwise_conv, "registered", refuse)
    tensors = [torch.rand(shape, requires_grad=True) for shape in CASES["depthwise_conv"][1]]
    run("depthwise_conv", tensors, light=True)
    with pytest.raises(AssertionError, match="called the dispatcher"):
        run("depthwise_conv", tensors, light=False)


def test_compiled_and_transformed_calls_are_watched() -> None:
    seen = []

    def look(x: Tensor) -> Tensor:
        seen.append(dispatch.is_watched())
        return x.sin()

    assert not dispatch.is_watched()
    torch.func.grad(lambda x: look(x).sum())(torch.ones(2))
    torch.jit.trace(look, torch.ones(2), check_trace=False)
    with torch._subclasses.FakeTensorMode():
        look(torch.ones(2))
    assert seen == [True, True, True]
    compiled = torch.compile(lambda x: x + dispatch.is_watched(), backend="eager", fullgraph=True)
    assert compiled(torch.zeros(1)).item() == 1
