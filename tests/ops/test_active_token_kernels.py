"""The active token kernels against the reference, under Triton's interpreter or on a GPU."""

import math

import pytest
import torch
from torch import Tensor

from tests.ops.kernels import DEVICE, assert_kernel_close, both_axes
from tokamix.ops import active_gather, active_gather_axes
from tokamix.ops.active_token import kernels
from tokamix.ops.dispatch import use_backend

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (shape, share): one token, lines that fill a block or not, several lines per block, no power of two anywhere, channels
# in several blocks, a line of one token more than PART
CASES = [
    ((1, 1, 1, 4), 2),
    ((2, 7, 5, 12), 3),
    ((1, 16, 14, 8), 1),
    ((1, 63, 2, 4), 4),
    ((1, 1, 65, 20), 4),
    ((1, 3, 5, 160), 2),
]
LONG_CASES = [((2, 3, 38, 6), 2), ((1, 33, 2, 160), 4)]  # lines in three parts of 16 tokens


def inputs(shape: tuple[int, ...], share: int, axes: int, spread: float = 2.0) -> tuple[Tensor, Tensor]:
    """A map and offsets, some far outside; none so near an integer that rounding could cross it."""
    size = (*shape[:3], axes * shape[3] // share)
    offset = (torch.randn(size) * spread).floor() + torch.randint(1, 8, size) / 8
    return torch.randn(shape), torch.where(torch.rand(size) < 0.1, offset.sign() * 100.5, offset)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "share"), CASES)
def test_both_axes_against_reference(shape, share: int, dtype: torch.dtype, poison_empty: None) -> None:
    assert_kernel_close(both_axes, inputs(shape, share, axes=2), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "share"), LONG_CASES)
def test_lines_in_parts(
    shape, share: int, dtype: torch.dtype, poison_empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "PART", 16)
    assert_kernel_close(both_axes, inputs(shape, share, axes=2), dtype)


@pytest.mark.parametrize("dim", [1, 2])
def test_one_axis_against_reference(dim: int, poison_empty: None) -> None:
    assert_kernel_close(active_gather, inputs((2, 5, 7, 12), 4, axes=1), torch.float32, dim=dim)
    assert_kernel_close(active_gather, inputs((2, 5, 7, 12), 4, axes=1), torch.bfloat16, dim=dim)


@pytest.mark.parametrize("shape", [(1, 9, 12, 8), (1, 2, 36, 8)])
@pytest.mark.parametrize("spread", [0.1, 12.0])
def test_near_and_far(
    spread: float, shape: tuple[int, ...], poison_empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "PART", 16)
    assert_kernel_close(both_axes, inputs(shape, 2, axes=2, spread=spread), torch.float32)


def test_borders_and_integers(poison_empty: None) -> None:
    """The right-sided derivative at integers, fading out at the borders, as in the reference."""
    x = torch.randn(1, 1, 6, 2, device=DEVICE, requires_grad=True)
    steps = torch.tensor([-1.0, -0.75, 0.0, 0.25, 5.0, 5.25, 6.0, -1.5, 7.0, 3.0, -2.0, 2.0], device=DEVICE)
    offset = (steps.view(1, 1, 6, 2) - torch.arange(6, device=DEVICE).view(1, 1, 6, 1)).requires_grad_()
    results = []
    for backend in ("eager", "triton"):
        out = active_gather(x, offset, 2, backend=backend)
        results.append((out, *torch.autograd.grad(out, (x, offset), torch.ones_like(out))))
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 3e38])
def test_wild_offsets_stay_in_range(bad: float, poison_empty: None) -> None:
    x = torch.randn(1, 3, 4, 2, device=DEVICE, requires_grad=True)
    offset = torch.zeros(1, 3, 4, 4, device=DEVICE)
    offset[0, 1, 2] = bad
    outs = active_gather_axes(x, offset.requires_grad_(), backend="triton")
    (outs[0] + outs[1]).sum().backward()
    for out in outs:
        seen = out[0, 1, 2]
        assert (seen.isnan() | (seen == 0)).all() if math.isnan(bad) else (seen == 0).all()
        out = out.detach().clone()
        out[0, 1, 2] = x[0, 1, 2].detach()
        torch.testing.assert_close(out, x)
    x.grad[0, 1, 2] = 2.0
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0))


def test_any_strides(poison_empty: None) -> None:
    x, offset = (t.to(DEVICE) for t in inputs((2, 5, 4, 6), 3, axes=2))
    strided = x.permute(3, 0, 2, 1).contiguous().permute(1, 3, 2, 0), torch.cat([offset, offset], -1)[..., :4]
    results = []
    for backend, args in (("eager", (x, offset)), ("triton", strided)):
        leaves = [a.detach().requires_grad_() for a in args]
        outs = active_gather_axes(*leaves, backend=backend)
        # a sum's gradient has strides of zero
        results.append((outs, torch.autograd.grad(outs[0].sum() + outs[1].square().sum(), leaves)))
    torch.testing.assert_close(results[1], results[0])


def test_extremes(poison_empty: None) -> None:
    x = torch.full((1, 4, 4, 4), 6e4, dtype=torch.float16, device=DEVICE)
    x[..., 0] = 0
    x[:, ::2] *= -1
    half = torch.full((1, 4, 4, 4), 0.5, dtype=torch.float16, device=DEVICE)
    for out in active_gather_axes(x, half, backend="triton"):
        assert out.isfinite().all()
        assert not out[..., 0].any()
    empty = torch.empty(0, 4, 4, 4, device=DEVICE)
    assert active_gather(empty, empty, 1, backend="triton").shape == empty.shape


def test_limits() -> None:
    with pytest.raises(RuntimeError, match="a side of 1025 tokens is over 1024"):
        active_gather(*torch.zeros(2, 1, 1025, 1, 1, device=DEVICE), 1, backend="triton")
    x = torch.zeros(1, 1, 1, 65, device=DEVICE)
    with pytest.raises(RuntimeError, match="65 channels to an offset are over 64"):
        active_gather(x, x[..., :1], 1, backend="triton")


def test_compiles_without_graph_break() -> None:
    def loss(x: Tensor, offset: Tensor) -> Tensor:
        along_width, along_height = active_gather_axes(x, offset)
        return (along_width * along_height).sum()

    leaves = [t.to(DEVICE).requires_grad_() for t in inputs((1, 3, 4, 4), 2, axes=2)]
    with use_backend("triton"):
        compiled = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(*leaves), leaves)
    with use_backend("eager"):
        torch.testing.assert_close(compiled, torch.autograd.grad(loss(*leaves), leaves))
