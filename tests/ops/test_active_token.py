"""The active token gather: the authors' numbers, deformable convolution, an independent formula, and edge cases."""

import math

import pytest
import torch
from torch import Tensor
from torchvision.ops import deform_conv2d

from tests.conftest import assert_golden, golden_cases, load_golden
from tokamix.ops import active_gather, active_gather_axes, active_gather_joint
from tokamix.ops.active_token import reference
from tokamix.ops.active_token.op import plan_gather_axes

AXES = {"h": 1, "w": 2}
SHAPES = [(1, 1, 1, 4), (2, 7, 5, 12), (1, 63, 1, 8), (1, 3, 65, 4)]


def inputs(shape: tuple[int, ...], share: int, axes: int = 1, spread: float = 2.0, **kwargs) -> tuple[Tensor, Tensor]:
    """A map and offsets, most of them small and some far outside the map."""
    options = {"dtype": torch.float64, **kwargs}
    offset = torch.randn(*shape[:3], axes * shape[3] // share, **options) * spread
    return torch.randn(shape, **options), torch.where(torch.rand(offset.shape) < 0.1, offset * 1e3, offset)


def slow_gather(x: Tensor, offset: Tensor, dim: int) -> Tensor:
    """Equation 2 with a hat function around the fractional position: a sum over all tokens of a line."""
    share = x.shape[-1] // offset.shape[-1]
    line = x.movedim(dim, -1)  # (B, other, C, n)
    far = offset.movedim(dim, -1).repeat_interleave(share, dim=-2)
    own = torch.arange(x.shape[dim], dtype=x.dtype)
    hat = (1 - (far.unsqueeze(-1) + own.unsqueeze(-1) - own).abs()).clamp(min=0)  # (B, other, C, n, n)
    return (hat @ line.unsqueeze(-1)).squeeze(-1).movedim(-1, dim)


def deformable(x: Tensor, offset: Tensor, dims: tuple[int, ...]) -> Tensor:
    """The same through torchvision: a deformable convolution with a 1x1 identity kernel and one group per channel."""
    channels = x.shape[-1]
    parts = dict(zip(dims, offset.chunk(len(dims), -1), strict=True))
    share = channels * len(dims) // offset.shape[-1]
    zero = torch.zeros_like(x)
    y, x_ = (parts[d].repeat_interleave(share, -1) if d in parts else zero for d in (1, 2))
    both = torch.stack([y, x_], -1).flatten(-2).permute(0, 3, 1, 2)
    identity = torch.eye(channels, dtype=x.dtype)[..., None, None]
    return deform_conv2d(x.permute(0, 3, 1, 2), both, identity).permute(0, 2, 3, 1)


@pytest.mark.parametrize("case", golden_cases("atm_op_"))
def test_golden(case: str) -> None:
    golden = load_golden(case)
    leaves = {n: t.requires_grad_() for n, t in (golden.inputs | golden.weights).items()}
    x, offset = (leaves[n].permute(0, 2, 3, 1) for n in ("input", "offset"))
    seen = active_gather(x, offset, AXES[golden.meta["ctor"]["dimension"]])
    out = torch.nn.functional.linear(seen, leaves["weight"].flatten(1), leaves["bias"]).permute(0, 3, 1, 2)
    assert_golden(out, golden.outputs["out"])
    (out * golden.loss_weights["out"]).sum().backward()
    for name, expected in (golden.grad_inputs | golden.grad_weights).items():
        assert_golden(leaves[name].grad, expected, name)


@pytest.mark.parametrize("dim", [1, 2])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("share", [1, 4])
def test_against_slow_formula_and_deformable_convolution(shape: tuple[int, ...], dim: int, share: int) -> None:
    x, offset = inputs(shape, share)
    out = active_gather(x, offset, dim)
    torch.testing.assert_close(out, slow_gather(x, offset, dim), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(out, deformable(x, offset, (dim,)), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", SHAPES)
def test_both_axes(shape: tuple[int, ...]) -> None:
    x, offset = inputs(shape, share=2, axes=2)
    along_width, along_height = offset.chunk(2, -1)
    expected = slow_gather(x, along_width, 2), slow_gather(x, along_height, 1)
    torch.testing.assert_close(active_gather_axes(x, offset), expected, rtol=1e-12, atol=1e-13)
    joint = active_gather_joint(x, offset)
    torch.testing.assert_close(joint, deformable(x, offset, (2, 1)), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("op", [lambda x, o: active_gather(x, o, 1), active_gather_axes, active_gather_joint])
def test_gradcheck(op) -> None:
    """Positions keep away from integers, where the function has a kink."""
    x = torch.randn(2, 4, 3, 4, dtype=torch.float64, requires_grad=True)
    offset = torch.randint(-4, 4, (2, 4, 3, 4)) + torch.rand(2, 4, 3, 4, dtype=torch.float64) * 0.8 + 0.1
    assert torch.autograd.gradcheck(op, (x, offset.requires_grad_()))


def test_right_derivative_at_integers() -> None:
    x = torch.tensor([1.0, 5.0, 2.0]).view(1, 1, 3, 1)
    offset = torch.zeros_like(x).requires_grad_()
    out = active_gather(x, offset, 2)
    out.sum().backward()
    assert torch.equal(out, x)
    assert torch.equal(offset.grad.flatten(), torch.tensor([4.0, -3.0, -2.0]))


def test_fades_out_at_the_border() -> None:
    x = torch.full((1, 1, 1, 1), 3.0)
    for offset, expected in ((-1.5, 0.0), (-1.0, 0.0), (-0.75, 0.75), (0.0, 3.0), (0.25, 2.25), (1.0, 0.0), (9.0, 0.0)):
        for dim in (1, 2):
            assert active_gather(x, torch.full_like(x, offset), dim).item() == expected


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38, -3e38])
@pytest.mark.parametrize("op", [active_gather_axes, active_gather_joint])
def test_wild_offsets_stay_in_range(bad: float, op) -> None:
    x = torch.randn(1, 3, 4, 2, requires_grad=True)
    offset = torch.zeros(1, 3, 4, 4)
    offset[0, 1, 2] = bad
    outs = op(x, offset)
    outs = outs if isinstance(outs, tuple) else (outs,)
    sum(o.nan_to_num().sum() for o in outs).backward()
    for out in outs:
        assert (out[0, 1, 2].isnan() if math.isnan(bad) else out[0, 1, 2] == 0).all()
        out = out.clone()
        out[0, 1, 2] = x[0, 1, 2].detach()
        torch.testing.assert_close(out, x)


def test_non_contiguous_and_empty() -> None:
    x, offset = inputs((2, 5, 4, 6), share=3, axes=2)
    expected = active_gather_axes(x, offset)
    strided = x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0), torch.cat([offset, offset], -1)[..., :4]
    torch.testing.assert_close(active_gather_axes(*strided), expected)
    assert active_gather(x[:0], offset[:0, ..., :2], 1).shape == (0, 5, 4, 6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("share", [1, 2, 4, 8])
def test_inference_mode_gives_the_same(dtype: torch.dtype, share: int) -> None:
    """In inference mode rows of 8 and 16 bytes are read as one integer."""
    x, offset = (t.to(dtype) for t in inputs((2, 5, 4, 16), share, axes=2))
    expected = *active_gather_axes(x, offset), active_gather_joint(x, offset)
    with torch.inference_mode():
        got = *active_gather_axes(x, offset), active_gather_joint(x, offset)
    assert all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


def test_one_plan_for_several_maps() -> None:
    x, offset = (t.requires_grad_() for t in inputs((2, 7, 5, 12), share=3, axes=2))
    plan = plan_gather_axes(x, offset)
    shared = [seen for scale in (1, 2) for seen in active_gather_axes(scale * x, plan)]
    expected = [seen for scale in (1, 2) for seen in active_gather_axes(scale * x, offset)]
    torch.testing.assert_close(shared, expected)
    grads = (torch.autograd.grad(outs, (x, offset), outs) for outs in (shared, expected))
    torch.testing.assert_close(*grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Positions are as exact as the offsets: a long line, and values near the largest."""
    x = torch.randn(1, 1, 1000, 4, dtype=dtype)
    shifted = active_gather(x, torch.full((1, 1, 1000, 1), -3.0, dtype=dtype), 2)
    assert torch.equal(shifted[:, :, 3:], x[:, :, :-3])
    huge = torch.full((1, 2, 4, 2), torch.finfo(dtype).max / 2, dtype=dtype)
    huge[:, :, ::2] *= -1
    assert active_gather(huge, torch.full((1, 2, 4, 1), 0.5, dtype=dtype), 2).isfinite().all()
    assert not active_gather(torch.zeros_like(huge), torch.randn(1, 2, 4, 1).to(dtype), 1).any()


def test_compiles_once_for_all_sizes() -> None:
    graphs = []

    def loss(x: Tensor, offset: Tensor) -> Tensor:
        along_width, along_height = active_gather_axes(x, offset)
        return along_width.square().sum() + (along_height * x).sum()

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    for shape in ((3, 4, 5, 4), (2, 6, 3, 4), (5, 7, 8, 4)):
        leaves = [t.requires_grad_() for t in inputs(shape, share=2, axes=2)]
        for leaf in leaves:
            for dim in (0, 1, 2):
                torch._dynamo.mark_dynamic(leaf, dim)
        expected, got = loss(*leaves), compiled(*leaves)
        torch.testing.assert_close(got, expected)
        torch.testing.assert_close(torch.autograd.grad(got, leaves), torch.autograd.grad(expected, leaves))
    assert len(graphs) == 1


@pytest.mark.parametrize("dims", [[1], [2], [2, 1]])
def test_opcheck(dims: list[int]) -> None:
    x, offset = (t.requires_grad_() for t in inputs((2, 3, 4, 4), share=2, axes=len(dims)))
    torch.library.opcheck(torch.ops.tokamix.active_gather, (x, offset, dims))
    fixed = [x.detach()] * len(dims), x.detach(), offset.detach(), dims
    torch.library.opcheck(torch.ops.tokamix.active_gather_backward, fixed)
    outs = torch.ops.tokamix.active_gather(x, offset, dims)
    parts = offset.chunk(len(dims), -1)
    expected = [reference.active_gather(x, part, dim) for part, dim in zip(parts, dims, strict=True)]
    torch.testing.assert_close(outs, expected)
    grads = torch.autograd.grad(outs, (x, offset), outs)
    torch.testing.assert_close(grads, torch.autograd.grad(expected, (x, offset), expected))


def test_cost_is_linear_in_tokens() -> None:
    """Counts tensor elements, not time: nothing larger than a few maps is created."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Count(TorchDispatchMode):
        total = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not func.is_view:
                self.total += out.numel()
            return out

    made = []
    for side in (8, 16, 32):
        with Count() as count:
            active_gather_axes(*inputs((1, side, side, 8), share=4, axes=2))
        made.append(count.total / side**2)
    assert made[2] <= made[1] <= made[0]


def test_bad_input() -> None:
    x = torch.zeros(1, 2, 3, 6)
    with pytest.raises(ValueError, match=r"dim 1 \(height\) or 2 \(width\), got 3"):
        active_gather(x, x, 3)
    with pytest.raises(ValueError, match="0 channels cannot share 1 offsets over 1 axis"):
        active_gather(torch.zeros(1, 2, 3, 0), torch.zeros(1, 2, 3, 1), 1)
    with pytest.raises(ValueError, match="6 channels cannot share 4 offsets over 1 axis"):
        active_gather(x, torch.zeros(1, 2, 3, 4), 1)
    with pytest.raises(ValueError, match="6 channels cannot share 3 offsets over 2 axes"):
        active_gather_axes(x, torch.zeros(1, 2, 3, 3))
    with pytest.raises(ValueError, match=r"got \(1, 2, 3, 6\) and \(1, 3, 2, 6\)"):
        active_gather_joint(x, torch.zeros(1, 3, 2, 6))
    with pytest.raises(RuntimeError, match="cannot run on the triton backend"):
        active_gather(x.double(), x.double(), 1, backend="triton")


class Gather(torch.nn.Module):
    def forward(self, x: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
        return active_gather_axes(x, offset)


@pytest.mark.parametrize("side", [40, 33])
def test_exported_in_bfloat16(side: int) -> None:
    """Positions are computed in float32, as in eager mode: bfloat16 has quarters of a token from 32 on."""
    x, offset = inputs((1, 40, side, 8), 4, axes=2, dtype=torch.bfloat16)
    program = torch.export.export(Gather(), (x, offset))
    for exported, eager in zip(program.module()(x, offset), active_gather_axes(x, offset), strict=True):
        assert exported.dtype == torch.bfloat16
        torch.testing.assert_close(exported, eager, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("width", [4, 6])
def test_exported_on_another_device(width: int) -> None:
    """A graph traced for a GPU holds no constants on the CPU; here the device is "meta"."""
    x, offset = (tensor.to("meta") for tensor in inputs((1, 4, width, 8), 4, axes=2))
    program = torch.export.export(Gather(), (x, offset))
    assert all(constant.is_meta for constant in program.constants.values())
