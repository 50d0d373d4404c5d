"""The SimA kernels against the reference, forward and every gradient, under Triton's interpreter or on a GPU."""

from typing import ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.ops.kernels import DEVICE, assert_kernel_close, relative_rmse
from tokamix.ops import dispatch, sima_attention, sima_self_attention
from tokamix.ops.sima import reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(2, 2, 7, 7, 5), (1, 2, 63, 63, 48), (2, 1, 65, 65, 16), (1, 1, 20, 70, 33), (1, 1, 70, 9, 128)]


def qkv(batch: int, heads: int, nq: int, nk: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (torch.randn(batch, heads, n, dim) for n in (nq, nk, nk))
    return q, k, v


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_against_reference(shape: tuple[int, ...], dtype: torch.dtype, poison_empty: None) -> None:
    *sizes, dim = shape
    dim = min(dim, 64) if dtype == torch.float32 else dim
    assert_kernel_close(sima_attention, qkv(*sizes, dim), dtype, order="linear")


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_token(dtype: torch.dtype, poison_empty: None) -> None:
    """A single normalised token is its signs, which are constant, so q and k have no gradient."""
    q, k, v = (x.to(DEVICE, dtype).requires_grad_() for x in qkv(2, 1, 1, 1, 3))
    out = sima_attention(q, k, v, backend="triton")
    torch.testing.assert_close(out, (q.sign() * k.sign()).sum(-1, keepdim=True) * v)
    dq, dk, dv = torch.autograd.grad(out.sum(), (q, k, v))
    torch.testing.assert_close(dv, (q.sign() * k.sign()).sum(-1, keepdim=True).expand_as(v))
    # two equal rounded terms cancel
    scale = torch.finfo(dtype).eps * 8 * v.abs().max()
    assert dq.abs().max() < scale / q.abs().min()
    assert dk.abs().max() < scale / k.abs().min()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm", ["l2", None])
def test_other_norms(norm: str | None, dtype: torch.dtype, poison_empty: None) -> None:
    assert_kernel_close(sima_attention, qkv(1, 2, 33, 20, 8), dtype, norm=norm, order="linear")


@pytest.mark.parametrize("dtype", DTYPES)
def test_packed(dtype: torch.dtype, poison_empty: None) -> None:
    assert_kernel_close(sima_self_attention, (torch.randn(2, 70, 3, 2, 24),), dtype, order="linear")


@pytest.mark.parametrize(
    ("nq", "nk", "norm"), [(72, 72, "l1"), (20, 72, "l1"), (72, 20, "l1"), (9, 9, "l1"), (40, 40, "l2"), (40, 40, None)]
)
def test_every_plan(nq: int, nk: int, norm: str | None, poison_empty: None) -> None:
    """One launch or three, one block or many give the same results."""
    from tokamix.ops.sima import kernels

    q, k, v = (torch.randn(1, n, 2, 20, device=DEVICE) for n in (nq, nk, nk))
    q[:, :, 1, 3] = 0
    k[:, :, 0, 2] = 0
    do = torch.randn_like(q)
    heads_first = [x.transpose(1, 2).double() for x in (q, k, v)]
    expected = reference.sima_attention(*heads_first, norm, "linear", 1e-12).transpose(1, 2)
    wanted = reference.sima_attention_backward(do.transpose(1, 2).double(), *heads_first, norm, 1e-12)
    plans = (kernels.Plan(128, 4, 1), kernels.Plan(32, 4, 1), kernels.Plan(16, 4, 2, chunks=2))
    for plan in plans:
        out = kernels.forward(q, k, v, norm, 1e-12, plan)
        assert relative_rmse(out, expected) < 1e-5, plan
        grads = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        kernels.backward(do, q, k, v, grads, norm, 1e-12, plan)
        for name, grad, want in zip("qkv", grads, wanted, strict=True):
            assert relative_rmse(grad, want.transpose(1, 2)) < 1e-5, (plan, name)
        if nq == nk:
            joint = torch.empty(1, nq, 3, 2, 20, device=DEVICE)
            kernels.backward(do, q, k, v, (joint,), norm, 1e-12, plan)
            assert torch.equal(joint, torch.stack(grads, dim=2))


def test_strides(poison_empty: None) -> None:
    q = torch.randn(2, 6, 9, 3, device=DEVICE).permute(0, 3, 2, 1)  # (2, 3, 9, 6), channels far apart
    k = torch.randn(2, 9, 3, 12, device=DEVICE).transpose(1, 2)[..., ::2]
    v = torch.randn(1, 3, 9, 6, device=DEVICE).expand(2, -1, -1, -1)
    expected = sima_attention(q, k, v, backend="eager")
    out = sima_attention(q, k, v, backend="triton")
    torch.testing.assert_close(out, expected)
    assert out.transpose(1, 2).is_contiguous()
    packed = torch.randn(2, 5, 3, 2, 8, device=DEVICE, requires_grad=True)
    sima_self_attention(packed, backend="triton").sum().backward()  # the gradient of a sum has strides of zero
    (expected,) = torch.autograd.grad(sima_self_attention(packed, backend="eager").sum(), packed)
    torch.testing.assert_close(packed.grad, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_channels(dtype: torch.dtype, poison_empty: None) -> None:
    q, k, v = (x.to(DEVICE, dtype) for x in qkv(1, 2, 40, 40, 12))
    q[..., 1] = 0
    k[..., 2] = 0
    q[0, 0] = 0
    got, expected = (sima_attention(q, k, v, backend=backend) for backend in ("triton", "eager"))
    torch.testing.assert_close(got, expected, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    assert got[0, 0].eq(0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1e3, 1e4])
def test_scales(dtype: torch.dtype, scale: float, poison_empty: None) -> None:
    q, k, v = qkv(1, 1, 130, 130, 16)
    per_channel = torch.logspace(-1, 0, 16)  # channels of one head differ too
    inputs = (scale * q * per_channel, scale * k * per_channel, scale * v.clamp(-4, 4))
    assert_kernel_close(sima_attention, inputs, dtype, order="linear")


def test_many_equal_tokens_in_float16(poison_empty: None) -> None:
    tokens = 16_384
    x = torch.full((1, 1, tokens, 16), 8.0, dtype=torch.float16, device=DEVICE)
    out = sima_attention(x, x, x, backend="triton")
    torch.testing.assert_close(out, torch.full_like(x, 8 * 16 / tokens))


def test_runs_are_equal() -> None:
    x = torch.randn(1, 300, 3, 1, 32, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)
    runs = []
    for _ in range(2):
        out = sima_self_attention(x, backend="triton")
        runs.append((out, *torch.autograd.grad(out, x, torch.ones_like(out))))
    for first, second in zip(*runs, strict=True):
        assert first.equal(second)


def test_compiles_without_graph_break() -> None:
    packed = torch.randn(2, 5, 3, 2, 8, device=DEVICE, requires_grad=True)
    compiled = torch.compile(sima_self_attention, fullgraph=True, backend="aot_eager")
    with dispatch.use_backend("triton"):
        torch.testing.assert_close(compiled(packed), sima_self_attention(packed))


def test_dispatch_modes_see_the_operator() -> None:
    """A plain call bypasses the dispatcher; under a dispatch mode the registered operator runs."""

    class Seen(TorchDispatchMode):
        names: ClassVar[list[str]] = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.append(func.name())
            return func(*args, **(kwargs or {}))

    packed = torch.randn(1, 5, 3, 1, 8, device=DEVICE, requires_grad=True)
    plain = sima_self_attention(packed, backend="triton")
    with Seen():
        seen = sima_self_attention(packed, backend="triton")
        grad = torch.autograd.grad(seen.square().sum(), packed)
    assert "tokamix::sima_self_attention" in Seen.names
    assert "tokamix::sima_self_attention_backward" in Seen.names
    assert seen.equal(plain)
    torch.testing.assert_close(torch.autograd.grad(plain.square().sum(), packed), grad)


def test_limits() -> None:
    wide = torch.randn(1, 4, 3, 1, 130, device=DEVICE)
    with pytest.raises(RuntimeError, match=r"head dim 130 is over 64 in torch.float32"):
        sima_self_attention(wide, backend="triton")
    with pytest.raises(RuntimeError, match=r"head dim 130 is over 128 in torch.bfloat16"):
        sima_self_attention(wide.bfloat16(), backend="triton")
    assert sima_self_attention(wide).isfinite().all()
    with pytest.raises(RuntimeError, match="linear order"):
        sima_self_attention(wide[..., :8], order="quadratic", backend="triton")
    assert sima_self_attention(wide[:, :0, ..., :8], backend="triton").shape == (1, 0, 8)
