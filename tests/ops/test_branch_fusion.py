"""Branch fusion: formulas, gradients of the registered operators, and the choice of backend."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tokamix.ops import dispatch
from tokamix.ops.branch_fusion.op import _fuse, _summary, branch_summary, fuse_branches


def make(branches: int = 3) -> tuple[list[Tensor], Tensor]:
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randn(2, 5, 4, generator=generator, dtype=torch.float64) for _ in range(branches)]
    return maps, torch.randn(2, 4 * branches, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("count", [2, 3])
def test_formulas(count: int) -> None:
    branches, logits = make(count)
    torch.testing.assert_close(branch_summary(branches), sum(branches).mean(1))
    fused = fuse_branches(branches, logits)
    for b in range(2):
        for c in range(4):
            weights = logits[b, c * count : (c + 1) * count].softmax(0)
            expected = sum(weight * branch[b, :, c] for weight, branch in zip(weights, branches, strict=True))
            torch.testing.assert_close(fused[b, :, c], expected)


def test_registered_operators() -> None:
    branches, logits = make()
    leaves = [x.requires_grad_() for x in (*branches, logits)]
    torch.library.opcheck(torch.ops.tokamix.branch_summary, tuple(leaves[:3]))
    torch.library.opcheck(torch.ops.tokamix.fuse_branches, tuple(leaves))
    torch.library.opcheck(
        torch.ops.tokamix.fuse_branches_backward, (branches[0].detach(), *(x.detach() for x in leaves))
    )
    for light in (True, False):
        with dispatch.use_light(light):
            torch.autograd.gradcheck(_summary, tuple(leaves[:3]))
            torch.autograd.gradcheck(_fuse, tuple(leaves))


def test_two_branches_have_no_kernel() -> None:
    branches, logits = make(2)
    with pytest.raises(RuntimeError, match=r"cannot run on the triton backend"):
        fuse_branches(branches, logits, backend="triton")


def test_compiled_summary_of_any_number_of_tokens() -> None:
    """One graph for few tokens, and one for many."""
    counter = CompileCounterWithBackend("eager")
    torch._dynamo.reset()
    compiled = torch.compile(lambda *branches: branch_summary(branches), backend=counter, fullgraph=True, dynamic=True)
    for tokens in (5000, 5001, 5003, 100, 101):
        branches = torch.randn(3, 2, tokens, 4).unbind()
        torch.testing.assert_close(compiled(*branches), branch_summary(branches))
    assert counter.frame_count == 2
    torch._dynamo.reset()
