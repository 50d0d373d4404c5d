"""Context broadcasting: the supplement's formulas, its identities, and its behaviour in half precision."""

import pytest
import torch

from tokamix.ops import broadcast_context


def tokens(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("n", [1, 7, 65])
def test_formulas(n: int) -> None:
    x = tokens(2, n, 5)
    scale = tokens(5)
    for b in range(2):
        mean = sum(x[b, i] for i in range(n)) / n
        for i in range(n):
            cb = (x[b, i] + mean) / 2
            torch.testing.assert_close(broadcast_context(x)[b, i], cb)
            torch.testing.assert_close(broadcast_context(x, scale)[b, i], (x[b, i] + scale * mean) / 2)
            torch.testing.assert_close(broadcast_context(x, kind="gate")[b, i], x[b, i] * (x[b, 0] + 1))
            torch.testing.assert_close(broadcast_context(x, kind="hybrid")[b, i], x[b, i] * x[b, 0] + cb)


def test_end_equals_mid() -> None:
    """A linear layer after CB equals CB after the layer, including its bias: the weights of CB sum to one."""
    x, layer = tokens(2, 9, 6), torch.nn.Linear(6, 4).double()
    torch.testing.assert_close(layer(broadcast_context(x)), broadcast_context(layer(x)))


def test_class_token_is_in_the_mean() -> None:
    x = tokens(1, 5, 3)
    moved = x.clone()
    moved[:, 0] += 5
    assert not torch.allclose(broadcast_context(x)[:, 1:], broadcast_context(moved)[:, 1:])


@pytest.mark.parametrize("kind", ["cb", "gate", "hybrid"])
def test_gradients(kind: str) -> None:
    x, scale = tokens(2, 4, 3).requires_grad_(), tokens(3).requires_grad_()
    torch.autograd.gradcheck(lambda x: broadcast_context(x, kind=kind), (x,))
    torch.autograd.gradcheck(lambda x, s: broadcast_context(x, s, kind=kind if kind != "gate" else "cb"), (x, scale))


def test_float16_mean_does_not_overflow() -> None:
    x = torch.full((1, 16_384, 2), 8.0, dtype=torch.float16)
    torch.testing.assert_close(broadcast_context(x), x)


@pytest.mark.parametrize("scaled", [False, True])
def test_custom_op(scaled: bool) -> None:
    x, scale = tokens(2, 6, 4).requires_grad_(), tokens(4).requires_grad_() if scaled else None
    torch.library.opcheck(torch.ops.tokamix.broadcast_context, (x, scale))
    torch.testing.assert_close(torch.ops.tokamix.broadcast_context(x, scale), broadcast_context(x, scale))


def test_compiles_without_graph_break() -> None:
    x = tokens(2, 6, 4)
    compiled = torch.compile(broadcast_context, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), broadcast_context(x))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match=r"unknown kind 'cbb'.*cb, gate, hybrid"):
        broadcast_context(tokens(1, 2, 3), kind="cbb")
    with pytest.raises(ValueError, match=r"\(B, N, C\), got \(2, 3\)"):
        broadcast_context(tokens(2, 3))
    with pytest.raises(ValueError, match=r"one value per channel, \(3,\), got \(4,\)"):
        broadcast_context(tokens(1, 2, 3), tokens(4))
    with pytest.raises(ValueError, match="class_token is False"):
        broadcast_context(tokens(1, 2, 3), kind="gate", class_token=False)
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        broadcast_context(tokens(1, 2, 3), backend="cuda")
    with pytest.raises(RuntimeError, match="cannot run on the triton backend"):
        broadcast_context(tokens(1, 2, 3), backend="triton")
