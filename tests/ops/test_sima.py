"""SimA attention: the paper's equation, its properties, and half precision at the extremes."""

import math

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tokamix.ops import sima_attention, sima_class_attention, sima_self_attention


def qkv(nq: int, nk: int, dim: int, batch: int = 2, heads: int = 3, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    return [torch.randn(batch, heads, n, dim, dtype=dtype) for n in (nq, nk, nk)]


def by_definition(q: Tensor, k: Tensor, v: Tensor, power: float | None = 1) -> Tensor:
    """Equation 2 of the paper, head by head and channel by channel."""
    out = torch.empty_like(q)
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            attention = torch.zeros(q.shape[2], k.shape[2], dtype=q.dtype)
            for c in range(q.shape[3]):
                query, key = q[b, h, :, c], k[b, h, :, c]
                if power is not None:
                    query = query / query.abs().pow(power).sum().pow(1 / power)
                    key = key / key.abs().pow(power).sum().pow(1 / power)
                attention += torch.outer(query, key)
            out[b, h] = attention @ v[b, h]
    return out


@pytest.mark.parametrize("order", ["linear", "quadratic", None])
@pytest.mark.parametrize(("nq", "nk", "dim"), [(1, 1, 1), (7, 7, 5), (63, 63, 8), (65, 65, 8), (5, 9, 16), (20, 3, 4)])
def test_definition(nq: int, nk: int, dim: int, order: str | None) -> None:
    q, k, v = qkv(nq, nk, dim)
    for norm, power in (("l1", 1), ("l2", 2), (None, None)):
        expected = by_definition(q, k, v, power)
        torch.testing.assert_close(sima_attention(q, k, v, norm, order), expected, rtol=1e-9, atol=1e-11)


def test_packed_equals_separate() -> None:
    packed = torch.randn(2, 9, 3, 4, 6, dtype=torch.float64)
    q, k, v = (packed[:, :, i].transpose(1, 2) for i in range(3))
    separate = sima_attention(q, k, v)
    torch.testing.assert_close(sima_self_attention(packed), separate.transpose(1, 2).reshape(2, 9, 24))
    torch.testing.assert_close(sima_class_attention(q, k, v, eps=1e-12), separate[:, :, :1])


@pytest.mark.parametrize("norm", ["l1", "l2", None])
@pytest.mark.parametrize("order", ["linear", "quadratic"])
def test_gradients(norm: str | None, order: str) -> None:
    q, k, v = (x.requires_grad_() for x in qkv(4, 3, 2, batch=1, heads=2))
    torch.autograd.gradcheck(lambda *x: sima_attention(*x, norm=norm, order=order), (q, k, v))
    packed = torch.randn(1, 4, 3, 2, 3, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: sima_self_attention(x, norm=norm, order=order), (packed,))
    torch.autograd.gradcheck(lambda x: sima_class_attention(*x.transpose(1, 3).unbind(2), norm=norm), (packed,))


def test_permuting_tokens_permutes_the_output() -> None:
    """Permutation equivariance, which a mixing matrix as in MLP-Mixer does not have."""
    q, k, v = qkv(12, 12, 4)
    order = torch.randperm(12)
    permuted = sima_attention(q[:, :, order], k[:, :, order], v[:, :, order])
    torch.testing.assert_close(permuted, sima_attention(q, k, v)[:, :, order])
    mixing = torch.randn(12, 12, dtype=v.dtype)
    assert not torch.allclose(mixing @ v[:, :, order], (mixing @ v)[:, :, order])


def test_attention_is_bounded_by_the_head_dim() -> None:
    dim = 6
    identity = torch.eye(dim, dtype=torch.float64).expand(2, 3, dim, dim)
    q, k, _ = qkv(dim, dim, dim)
    assert sima_attention(q, k, identity).abs().max() < dim
    one = torch.zeros(1, 1, dim, dim, dtype=torch.float64)
    one[:, :, 2] = torch.randn(dim)  # a single token is not zero: the bound is reached
    attention = sima_attention(one, one.sign(), identity[:1, :1])
    assert attention[0, 0, 2, 2] == dim


def test_cost_is_linear_in_tokens() -> None:
    def macs(tokens: int, order: str | None) -> int:
        with FlopCounterMode(display=False) as counter:
            sima_attention(*qkv(tokens, tokens, 8, batch=1, heads=2), order=order)
        return counter.get_total_flops() // 2

    assert macs(64, "linear") == 2 * macs(32, "linear") == 2 * (2 * 64 // 2 * 8 * 8 * 2)
    assert macs(64, "quadratic") == 4 * macs(32, "quadratic")
    for tokens in (3, 7, 8, 9, 64):
        assert macs(tokens, None) == min(macs(tokens, "linear"), macs(tokens, "quadratic"))


@pytest.mark.parametrize("order", ["linear", "quadratic"])
def test_zero_channel(order: str) -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        q, k, v = qkv(7, 7, 4, dtype=dtype)
        q[..., 1] = 0
        k[..., 2] = 0
        kept = [0, 3]
        out = sima_attention(q, k, v, order=order)
        # each channel is divided by its own norm, so removing the others changes nothing
        expected = by_definition(q[..., kept].double(), k[..., kept].double(), v[..., kept].double())
        tolerance = 4 * torch.finfo(dtype).eps
        torch.testing.assert_close(out[..., kept].double(), expected, rtol=tolerance * 4, atol=tolerance)
        assert sima_attention(torch.zeros_like(q), torch.zeros_like(k), v, order=order).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("order", ["linear", "quadratic"])
def test_many_tokens_in_half_precision(dtype: torch.dtype, order: str) -> None:
    """All tokens equal to 8: q^ and k^ are 1/N, so the output is 8 D / N."""
    tokens = 16_384 if order == "linear" else 2048
    x = torch.full((1, 1, tokens, 4), 8.0, dtype=dtype)
    torch.testing.assert_close(sima_attention(x, x, x, order=order), torch.full_like(x, 8 * 4 / tokens))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
@pytest.mark.parametrize("order", ["linear", "quadratic"])
def test_half_precision_at_any_scale(dtype: torch.dtype, scale: float, order: str) -> None:
    inputs = [(scale * x).to(dtype).requires_grad_() for x in qkv(300, 200, 16)]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    out, expected = sima_attention(*inputs, order=order), sima_attention(*exact, order=order)
    assert out.dtype == dtype
    seed = torch.randn(expected.shape).to(dtype)
    got = out, *torch.autograd.grad(out, inputs, seed)
    want = expected, *torch.autograd.grad(expected, exact, seed.double())
    for actual, wanted in zip(got, want, strict=True):
        # a few roundings more than storing the exact result (which is coarse for float16's subnormals)
        allowed = 2 * torch.finfo(dtype).eps + 2 * relative_error(wanted.to(dtype), wanted)
        assert relative_error(actual, wanted) < allowed


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual.double() - expected).norm() / expected.norm()).item()


def test_autocast_does_not_narrow() -> None:
    q, k, v = (1e3 * x for x in qkv(50, 50, 8, dtype=torch.float16))
    with torch.autocast("cpu", torch.float16):
        out = sima_attention(q, k, v)
    torch.testing.assert_close(out, sima_attention(q, k, v), rtol=0, atol=0)


@pytest.mark.parametrize("norm", ["l1", "l2", None])
def test_custom_ops(norm: str | None) -> None:
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in qkv(6, 4, 5))
    torch.library.opcheck(torch.ops.tokamix.sima_attention, (q, k, v, norm, 1e-12))
    packed = torch.randn(2, 5, 3, 2, 4, requires_grad=True)
    torch.library.opcheck(torch.ops.tokamix.sima_self_attention, (packed, norm, 1e-12))

    out = torch.ops.tokamix.sima_attention(q, k, v, norm, 1e-12)
    expected = sima_attention(*(x.transpose(1, 2) for x in (q, k, v)), norm).transpose(1, 2)
    torch.testing.assert_close(out, expected)
    seed = torch.randn_like(out)
    for got, want in zip(
        torch.autograd.grad(out, (q, k, v), seed), torch.autograd.grad(expected, (q, k, v), seed), strict=True
    ):
        torch.testing.assert_close(got, want)
    out = torch.ops.tokamix.sima_self_attention(packed, norm, 1e-12).flatten(2)
    torch.testing.assert_close(out, sima_self_attention(packed, norm))
    seed = torch.randn_like(out)
    torch.testing.assert_close(
        torch.autograd.grad(out, packed, seed), torch.autograd.grad(sima_self_attention(packed, norm), packed, seed)
    )


def test_compiles_without_graph_break() -> None:
    packed = torch.randn(2, 5, 3, 2, 4, requires_grad=True)
    compiled = torch.compile(sima_self_attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(packed), sima_self_attention(packed))
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(packed), sima_self_attention(packed))
    q, k, v = qkv(6, 4, 5)
    torch.testing.assert_close(
        torch.compile(sima_attention, fullgraph=True, backend="aot_eager")(q, k, v), sima_attention(q, k, v)
    )


def test_exports_over_a_range_that_crosses_the_head_dim() -> None:
    class Attention(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return sima_self_attention(x)

    example = torch.randn(2, 9, 3, 2, 8)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    exported = torch.export.export(Attention(), (example,), dynamic_shapes={"x": {1: tokens}}).module()
    for n in (3, 8, 50):
        x = torch.randn(2, n, 3, 2, 8)
        torch.testing.assert_close(exported(x), sima_self_attention(x))


def test_bad_input() -> None:
    q, k, v = qkv(4, 4, 2)
    with pytest.raises(ValueError, match=r"unknown norm 'l3'.*'l1', 'l2', None"):
        sima_attention(q, k, v, norm="l3")
    with pytest.raises(ValueError, match=r"unknown order 'cubic'.*'linear', 'quadratic', None"):
        sima_attention(q, k, v, order="cubic")
    with pytest.raises(ValueError, match="eps must be positive, got 0"):
        sima_attention(q, k, v, eps=0)
    with pytest.raises(ValueError, match=r"\(2, 3, 4, 2\), \(2, 3, 4, 2\), \(2, 3, 3, 2\)"):
        sima_attention(q, k, v[:, :, :3])
    with pytest.raises(ValueError, match=r"\(2, 3, 4, 1\), \(2, 3, 4, 2\), \(2, 3, 4, 2\)"):
        sima_attention(q[..., :1], k, v)
    with pytest.raises(ValueError, match=r"one dtype, got torch.float64, torch.float32"):
        sima_attention(q, k.float(), v)
    with pytest.raises(ValueError, match=r"\(B, N, 3, H, D\), got \(2, 5, 2, 4\)"):
        sima_self_attention(torch.zeros(2, 5, 2, 4))
    with pytest.raises(RuntimeError, match="cannot run on the triton backend"):
        sima_attention(q, k, v, backend="triton")


def test_nan_stays_in_its_image() -> None:
    q, k, v = qkv(5, 5, 3)
    clean = sima_attention(q, k, v)
    q[0, 0, 0, 0] = math.nan
    out = sima_attention(q, k, v)
    assert out[0, 0].isnan().all()
    torch.testing.assert_close(out[1], clean[1])
