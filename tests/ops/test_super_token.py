"""Super token sampling and scattering: the paper's equations, the authors' borders, half precision, registration."""

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from tokamix.ops import dispatch, super_token_sample, super_token_scatter

SHAPES = [  # B, H, W, C, cell
    (1, 1, 1, 3, (1, 1)),
    (2, 7, 5, 3, (2, 2)),
    (1, 4, 12, 5, (4, 3)),
    (2, 5, 6, 4, (8, 8)),
    (1, 9, 13, 7, (4, 8)),
]


def maps(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def slow_sample(x: Tensor, cell: tuple[int, int], n_iter: int) -> tuple[Tensor, Tensor]:
    """Equations 1 and 2 with a dense association between all tokens and all super tokens, one image at a time."""
    batch, height, width, channels = x.shape
    p, q = (height + cell[0] - 1) // cell[0], (width + cell[1] - 1) // cell[1]
    tokens_of_batch, association = [], torch.zeros(batch, height, width, 9, dtype=x.dtype)
    for b in range(batch):
        pixels = {
            (i, j): x[b, i, j] if i < height and j < width else x.new_zeros(channels)
            for i in range(p * cell[0])
            for j in range(q * cell[1])
        }
        members: dict[tuple[int, int], list[Tensor]] = {}
        for (i, j), pixel in pixels.items():
            members.setdefault((i // cell[0], j // cell[1]), []).append(pixel)
        tokens = {s: torch.stack(group).mean(0).detach() for s, group in members.items()}
        for _ in range(n_iter):
            given, weight = {s: x.new_zeros(channels) for s in tokens}, {s: x.new_zeros(()) for s in tokens}
            for (i, j), pixel in pixels.items():
                y, z = i // cell[0], j // cell[1]
                nine = [(y + dy, z + dz) for dy in (-1, 0, 1) for dz in (-1, 0, 1)]
                nobody = x.new_zeros(channels)
                logits = torch.stack([pixel @ tokens.get(s, nobody) for s in nine]) / channels**0.5
                weights = logits.softmax(0).detach()
                if i < height and j < width:
                    association[b, i, j] = weights
                for s, w in zip(nine, weights, strict=True):
                    if s in tokens:
                        given[s], weight[s] = given[s] + w * pixel, weight[s] + w
            last = {s: given[s] / weight[s] for s in tokens}
            tokens = {s: t.detach() for s, t in last.items()}
        tokens_of_batch.append(torch.stack([last[i, j] for i in range(p) for j in range(q)]).view(p, q, channels))
    return torch.stack(tokens_of_batch), association


@pytest.mark.parametrize("n_iter", [1, 3])
@pytest.mark.parametrize(("b", "h", "w", "c", "cell"), SHAPES)
def test_against_the_equations(b: int, h: int, w: int, c: int, cell: tuple[int, int], n_iter: int) -> None:
    x = maps(b, h, w, c).requires_grad_()
    tokens, association = super_token_sample(x, cell, n_iter)
    slow_tokens, slow_association = slow_sample(x, cell, n_iter)
    torch.testing.assert_close(tokens, slow_tokens)
    torch.testing.assert_close(association, slow_association)
    assert not association.requires_grad
    loss = maps(*tokens.shape)
    torch.testing.assert_close(torch.autograd.grad(tokens, x, loss), torch.autograd.grad(slow_tokens, x, loss))
    out = super_token_scatter(tokens.detach(), association, cell)
    for i in range(h):
        for j in range(w):
            y, z = i // cell[0], j // cell[1]
            padded = torch.nn.functional.pad(tokens.detach(), (0, 0, 1, 1, 1, 1))
            around = padded[:, y : y + 3, z : z + 3].reshape(b, 9, c)
            torch.testing.assert_close(out[:, i, j], (association[:, i, j, :, None] * around).sum(1))


@pytest.mark.parametrize(("b", "h", "w", "c", "cell"), SHAPES)
def test_gradients(b: int, h: int, w: int, c: int, cell: tuple[int, int]) -> None:
    """Both operators are linear once the association is fixed, and each one's gradient is the other's product."""
    tokens, association = super_token_sample(maps(b, h, w, c), cell)
    torch.autograd.gradcheck(lambda t: super_token_scatter(t, association, cell), (tokens.requires_grad_(),))


def test_non_contiguous() -> None:
    x = maps(2, 3, 7, 5).permute(0, 3, 2, 1)
    for ours, expected in zip(super_token_sample(x, (2, 4)), super_token_sample(x.contiguous(), (2, 4)), strict=True):
        torch.testing.assert_close(ours, expected)


def test_padding_takes_part() -> None:
    """A map that the cells do not divide equals the same map padded with zeros."""
    x = maps(1, 5, 7, 3)
    filled = torch.nn.functional.pad(x, (0, 0, 0, 1, 0, 3))
    tokens, association = super_token_sample(x, (4, 4))
    filled_tokens, filled_association = super_token_sample(filled, (4, 4))
    torch.testing.assert_close(tokens, filled_tokens)
    torch.testing.assert_close(association, filled_association[:, :5, :7])


def test_border_loses_weight() -> None:
    """With a flat association a corner keeps 4/9 of its input, an edge 6/9, the inside all of it."""
    x = torch.full((1, 6, 6, 2), 1e-9, dtype=torch.float64)
    out = super_token_scatter(*super_token_sample(x, (2, 2)), (2, 2)) / x
    expected = torch.tensor([4.0, 6, 4, 6, 9, 6, 4, 6, 4], dtype=torch.float64).view(3, 3) / 9
    torch.testing.assert_close(out[0, ::2, ::2, 0], expected)


def test_macs_are_linear_in_tokens() -> None:
    def macs(height: int) -> float:
        x = torch.empty(1, height, 16, 8, device="meta")
        with FlopCounterMode(display=False) as counter:
            super_token_scatter(*super_token_sample(x, (4, 4)), (4, 4))
        return counter.get_total_flops() / 2

    assert macs(16) == 3 * 16 * 16 * 9 * 8  # logits, sums, mapping back: nine products per token and channel
    assert macs(64) == 4 * macs(16)


@pytest.mark.parametrize("value", [0.0, 1e-3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_extremes(dtype: torch.dtype, value: float) -> None:
    x = (maps(1, 17, 16, 8) * value).to(dtype).clamp(-6e4, 6e4).requires_grad_()
    tokens, association = super_token_sample(x, (8, 8))
    exact_tokens, exact_association = super_token_sample(x.double(), (8, 8))
    torch.testing.assert_close(tokens.double(), exact_tokens, rtol=1e-2, atol=1e-2 * value)
    torch.testing.assert_close(association.double(), exact_association, rtol=1e-2, atol=1e-2)
    out = super_token_scatter(tokens, association, (8, 8))
    assert out.dtype == dtype
    assert out.isfinite().all()
    assert torch.autograd.grad(out.float().sum(), x)[0].isfinite().all()


def test_autocast_keeps_sampling_exact() -> None:
    x = maps(1, 8, 8, 4, dtype=torch.float32)
    expected = super_token_sample(x, (4, 4))
    with torch.autocast("cpu", torch.bfloat16):
        for ours, plain in zip(super_token_sample(x, (4, 4)), expected, strict=True):
            assert torch.equal(ours, plain)


def test_custom_ops() -> None:
    cell, ops = (2, 3), torch.ops.tokamix
    x = maps(2, 5, 6, 4).requires_grad_()
    tokens, association = super_token_sample(x, cell)
    own_tokens, own_association, weight = ops.super_token_sample(x, cell, 1, False)
    torch.testing.assert_close(own_tokens, tokens)
    torch.testing.assert_close(own_association, association)
    loss = maps(*tokens.shape)
    ours, expected = (torch.autograd.grad(t, x, loss) for t in (own_tokens, tokens))
    torch.testing.assert_close(ours, expected)

    leaf = tokens.detach().requires_grad_()
    plain, own = super_token_scatter(leaf, association, cell), ops.super_token_scatter(leaf, association, cell, False)
    torch.testing.assert_close(own, plain)
    loss = maps(*plain.shape)
    torch.testing.assert_close(torch.autograd.grad(own, leaf, loss), torch.autograd.grad(plain, leaf, loss))

    fixed = association.detach()
    torch.library.opcheck(ops.super_token_sample, (x, cell, 2, False))
    torch.library.opcheck(ops.super_token_scatter, (leaf, fixed, cell, False))
    torch.library.opcheck(ops.super_token_sample_backward, (leaf.detach(), fixed, weight.detach(), cell, False))
    torch.library.opcheck(ops.super_token_scatter_backward, (loss, fixed, cell, False))


def roundtrip(x: Tensor) -> Tensor:
    return super_token_scatter(*super_token_sample(x, (4, 2)), (4, 2))


def test_compiles_without_graph_break_for_many_sizes() -> None:
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled = torch.compile(roundtrip, fullgraph=True, backend="aot_eager", dynamic=True)
    for size in ((9, 7), (8, 8), (13, 6)):
        x = maps(2, *size, 3)
        torch.testing.assert_close(compiled(x), roundtrip(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_exports_with_dynamic_size() -> None:
    class Roundtrip(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return roundtrip(x)

    auto = torch.export.Dim.AUTO
    program = torch.export.export(Roundtrip(), (maps(2, 9, 7, 3),), dynamic_shapes=({0: auto, 1: auto, 2: auto},))
    for shape in ((3, 8, 8, 3), (4, 17, 6, 3)):
        torch.testing.assert_close(program.module()(maps(*shape)), roundtrip(maps(*shape)))


def test_bad_input() -> None:
    x = maps(1, 8, 8, 4)
    with pytest.raises(ValueError, match=r"map of shape \(B, H, W, C\), got \(8, 8, 4\)"):
        super_token_sample(x[0], (2, 2))
    with pytest.raises(ValueError, match=r"map of shape \(B, H, W, C\), got \(1, 8, 8, 0\)"):
        super_token_sample(maps(1, 8, 8, 0), (2, 2))
    with pytest.raises(ValueError, match="at least 1x1"):
        super_token_sample(x, (0, 2))
    with pytest.raises(ValueError, match="at least one iteration, got n_iter=0"):
        super_token_sample(x, (2, 2), n_iter=0)
    tokens, association = super_token_sample(x, (2, 2))
    with pytest.raises(ValueError, match=r"needs super tokens \(1, 2, 2, C\), got \(1, 4, 4, 4\)"):
        super_token_scatter(tokens, association, (4, 4))
    with pytest.raises(RuntimeError, match="cannot run on the triton backend"):
        super_token_sample(x, (2, 2), backend="triton")


@pytest.mark.parametrize("n_iter", [1, 2])
def test_exported_for_openvino(n_iter: int) -> None:
    class Sample(torch.nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            return super_token_sample(x, (4, 3), n_iter)

    x = maps(2, 9, 7, 5)
    with dispatch.export_target("openvino"):
        program = torch.export.export(Sample(), (x,))
    softmaxes = [node for node in program.graph.nodes if "softmax" in str(node.target)]
    assert [node.args[1] for node in softmaxes] == [-2] * n_iter
    for exported, eager in zip(program.module()(x), Sample()(x), strict=True):
        torch.testing.assert_close(exported, eager)
