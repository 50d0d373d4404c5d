"""Adaptive weight mixing: the paper's formula, windows and shifts, activations, half precision, registration."""

import math

import pytest
import torch
from torch import Tensor

from tokamix.mixers import WeightMixing
from tokamix.ops import bank_mixing, bank_mixing_weights, dispatch, resize_bank
from tokamix.ops.weight_mixing.op import ACTIVATIONS

CASES = {  # grid, window, shift
    "one token": ((1, 1), (1, 1), (0, 0)),
    "whole map": ((3, 5), (3, 5), (0, 0)),
    "windows": ((4, 9), (2, 3), (0, 0)),
    "shifted windows": ((6, 4), (3, 2), (1, 1)),
    "shifted rows": ((6, 2), (3, 2), (2, 0)),
}


def make(
    grid: tuple[int, int],
    window: tuple[int, int],
    batch: int = 2,
    heads: int = 3,
    dim: int = 2,
    size: int = 4,
    absolute: bool = False,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """v, policy and bank."""
    tokens, (h, w) = math.prod(grid), window
    entries = (h * w, h * w) if absolute else ((2 * h - 1) * (2 * w - 1),)
    shapes = (batch, tokens, heads, dim), (batch, tokens, size, heads), (size, *entries)
    return tuple(torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes)


def activate(logits: list[Tensor], activation: str) -> list[Tensor]:
    """Weights of one destination from the logits of its sources, term by term."""
    n = len(logits)
    if activation == "softmax":
        return [x.exp() / sum(y.exp() for y in logits) for x in logits]
    if activation == "sigmoid":
        return [1 / (1 + (-x).exp()) for x in logits]
    if activation == "l2":
        return [x / sum(y * y for y in logits).sqrt() for x in logits]
    if activation == "layernorm":
        mean = sum(logits) / n
        return [(x - mean) / (sum((y - mean) ** 2 for y in logits) / n + 1e-5).sqrt() for x in logits]
    return logits


def slow(v, policy, bank, grid, window, shift, shift_mask, activation) -> Tensor:
    """The definition, one pair of tokens after the other."""
    (height, width), (h, w) = grid, window
    out = torch.zeros_like(v)

    def place(t: int) -> tuple[tuple[int, int], tuple[int, int], tuple[bool, bool]]:
        """Window, position in it, and whether the cyclic shift moved the token across each border."""
        y, x = (t // width - shift[0]) % height, (t % width - shift[1]) % width
        return (y // h, x // w), (y % h, x % w), (y >= height - shift[0], x >= width - shift[1])

    for b in range(v.shape[0]):
        for dst in range(height * width):
            window_d, (yd, xd), side_d = place(dst)
            for head in range(v.shape[2]):
                sources, logits = [], []
                for src in range(height * width):
                    window_s, (ys, xs), side_s = place(src)
                    if window_s != window_d or (shift_mask and side_s != side_d):
                        continue
                    rel = (
                        (ys * w + xs, yd * w + xd)
                        if bank.ndim == 3
                        else ((ys - yd + h - 1) * (2 * w - 1) + xs - xd + w - 1,)
                    )
                    sources.append(src)
                    logits.append(sum(policy[b, src, k, head] * bank[(k, *rel)] for k in range(bank.shape[0])))
                for src, weight in zip(sources, activate(logits, activation), strict=True):
                    out[b, dst, head] += weight * v[b, src, head]
    return out


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("absolute", [False, True])
def test_formula(case: str, absolute: bool) -> None:
    grid, window, shift = CASES[case]
    inputs = make(grid, window, absolute=absolute)
    for mask in {True, shift == (0, 0)}:
        got = bank_mixing(*inputs, grid, window, shift, mask)
        torch.testing.assert_close(got, slow(*inputs, grid, window, shift, mask, "softmax"))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("case", ["whole map", "shifted windows"])
def test_activations(case: str, activation: str) -> None:
    grid, window, shift = CASES[case]
    inputs = make(grid, window, batch=1, heads=2)
    got = bank_mixing(*inputs, grid, window, shift, True, activation)
    torch.testing.assert_close(got, slow(*inputs, grid, window, shift, True, activation))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradients(activation: str) -> None:
    grid, window, shift = (4, 2), (2, 2), (1, 0)
    inputs = [x.requires_grad_() for x in make(grid, window, batch=1, heads=2, dim=1, size=2)]
    torch.autograd.gradcheck(lambda *x: bank_mixing(*x, grid, window, shift, True, activation), inputs)


def test_without_policy() -> None:
    """Static weights equal those of a policy that selects one bank entry for each head."""
    grid, window, shift = CASES["shifted windows"]
    v, _, bank = make(grid, window, size=3)
    pick = torch.eye(3, dtype=v.dtype).expand(2, v.shape[1], 3, 3)
    for mask in (True, False):
        got = bank_mixing(v, None, bank, grid, window, shift, mask)
        torch.testing.assert_close(got, bank_mixing(v, pick, bank, grid, window, shift, mask))


def test_weights_of_a_destination_sum_to_one() -> None:
    grid, window, shift = CASES["shifted windows"]
    _, policy, bank = make(grid, window)
    weights = bank_mixing_weights(policy, bank, grid, window, shift)
    assert weights.shape == (2, 4, 3, 6, 6)
    torch.testing.assert_close(weights.sum(3), torch.ones(2, 4, 3, 6, dtype=torch.float64))


def test_windows_do_not_leak() -> None:
    """A token affects only its own window and, with the mask, not across the map's border."""
    grid, window, shift = (6, 6), (3, 3), (1, 1)
    v, policy, bank = make(grid, window, batch=1)
    moved = v.clone()
    moved[:, 0] += 1  # the top left corner, which the shift brings into the last window
    for mask, reached in ((True, {(0, 0)}), (False, {(y, x) for y in (0, 4, 5) for x in (0, 4, 5)})):
        changed = bank_mixing(moved, policy, bank, grid, window, shift, mask) - bank_mixing(
            v, policy, bank, grid, window, shift, mask
        )
        places = changed.abs().amax((0, 2, 3)).nonzero().flatten().tolist()
        assert {(t // 6, t % 6) for t in places} == reached


def test_relative_bank_is_translation_equivariant() -> None:
    """Without normalisation and with one policy for all, mixing is a convolution."""
    grid = (5, 5)
    v, policy, bank = make(grid, grid, batch=1)
    policy = policy[:, :1].expand_as(policy)
    v = v.view(1, 5, 5, 3, 2)
    v[:, :, 3:] = 0
    right = v.roll(2, 2).flatten(1, 2)
    out = bank_mixing(v.flatten(1, 2), policy, bank, grid, activation="identity").view_as(v)
    moved = bank_mixing(right, policy, bank, grid, activation="identity").view_as(v)
    torch.testing.assert_close(moved[:, :, 2:], out[:, :, :-2])


@pytest.mark.parametrize("shape", [(1, 7), (7, 1), (9, 7)])
def test_odd_sizes_and_strides(shape: tuple[int, int]) -> None:
    v, policy, bank = make(shape, shape, batch=1)
    strided = v.transpose(2, 3).contiguous().transpose(2, 3), policy.transpose(2, 3).contiguous().transpose(2, 3)
    torch.testing.assert_close(bank_mixing(*strided, bank, shape), bank_mixing(v, policy, bank, shape))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_half_precision(dtype: torch.dtype, activation: str) -> None:
    """Finite at the extremes: zeros everywhere, logits beyond float16's range."""
    grid, window, shift = CASES["shifted windows"]
    v, policy, bank = make(grid, window, dtype=dtype)
    for scale in (0, 1e-3, 1, 1e4):
        out = bank_mixing(v, policy * scale, bank, grid, window, shift, activation=activation)
        assert out.dtype == dtype
        if not (activation == "identity" and scale == 1e4 and dtype == torch.float16):  # exactly infinite
            assert out.isfinite().all(), scale


def test_autocast() -> None:
    v, policy, bank = make((3, 3), (3, 3), dtype=torch.float32)
    expected = bank_mixing(v, policy, bank, (3, 3))
    with torch.autocast("cpu", torch.bfloat16):
        out = bank_mixing(v.bfloat16(), policy.bfloat16(), bank, (3, 3))
    torch.testing.assert_close(out.float(), expected, rtol=0.05, atol=0.05)


def test_cost_is_that_of_the_formula() -> None:
    """heads * windows * n^2 * (K + d) multiply-adds, n tokens in a window: linear in the number of windows."""
    from torch.utils.flop_counter import FlopCounterMode

    def macs(grid: tuple[int, int]) -> int:
        with FlopCounterMode(display=False) as counter:
            bank_mixing(*(x.to("meta") for x in make(grid, (7, 7), batch=1)), grid, (7, 7))
        return counter.get_total_flops() // 2

    assert macs((14, 14)) == 4 * 3 * 49 * 49 * (4 + 2)
    assert macs((28, 14)) == 2 * macs((14, 14))


def test_resize_bank() -> None:
    bank = torch.randn(2, 5 * 7, dtype=torch.float64)
    assert torch.equal(resize_bank(bank, (3, 4), (3, 4)), bank)
    larger = resize_bank(bank, (3, 4), (6, 5))
    assert larger.shape == (2, 11 * 9)
    centre = larger.view(2, 11, 9)[:, 5, 4]
    torch.testing.assert_close(centre, bank.view(2, 5, 7)[:, 2, 3])  # zero displacement stays zero displacement


@pytest.mark.parametrize("activation", ["softmax", "layernorm"])
@pytest.mark.parametrize("case", ["whole map", "shifted windows"])
def test_custom_op(case: str, activation: str) -> None:
    grid, window, shift = CASES[case]
    inputs = [x.requires_grad_() for x in make(grid, window)]
    options = (grid, window, shift, True, activation)
    torch.library.opcheck(torch.ops.tokamix.bank_mixing, (*inputs, *options))
    out, _ = torch.ops.tokamix.bank_mixing(*inputs, *options)
    expected = bank_mixing(*inputs, *options)
    torch.testing.assert_close(out, expected)
    seed = torch.randn_like(out)
    torch.testing.assert_close(torch.autograd.grad(out, inputs, seed), torch.autograd.grad(expected, inputs, seed))


def test_compiles_without_graph_break() -> None:
    grid, window, shift = CASES["shifted windows"]
    inputs = make(grid, window)
    compiled = torch.compile(bank_mixing, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(*inputs, grid, window, shift), bank_mixing(*inputs, grid, window, shift), rtol=1e-12, atol=1e-12
    )


def test_bad_input() -> None:
    v, policy, bank = make((4, 4), (2, 2))
    for arguments, message in (
        ((v, policy, bank, (4, 4), (2, 2), (0, 0), True, "relu"), r"unknown activation 'relu': choose one of softmax"),
        ((v[0], policy, bank, (4, 4), (2, 2)), r"v must be \(B, 16, heads, d\) for grid \(4, 4\), got \(16, 3, 2\)"),
        ((v, policy, bank, (4, 5), (2, 2)), r"v must be \(B, 20, heads, d\)"),
        ((v, policy, bank, (4, 4), (3, 2)), r"window \(3, 2\) does not divide grid \(4, 4\)"),
        ((v, policy, bank, (4, 4), (2, 2), (2, 0)), r"shift \(2, 0\) must be .* smaller than the window \(2, 2\)"),
        ((v, policy, bank, (4, 4)), r"a bank for window \(4, 4\) has shape \(K, 49\) or \(K, 16, 16\), got \(4, 9\)"),
        ((v, None, bank, (4, 4), (2, 2)), "one entry for each of 3 heads, got 4"),
        ((v, policy[:, :, :2], bank, (4, 4), (2, 2)), r"policy must be \(2, 16, 4, 3\) .* got \(2, 16, 2, 3\)"),
        ((v, policy.float(), bank, (4, 4), (2, 2)), "share one dtype, got torch.float64 and torch.float32"),
    ):
        with pytest.raises(ValueError, match=message):
            bank_mixing(*arguments)
    with pytest.raises(RuntimeError, match="cannot run on the triton backend"):
        bank_mixing(v, policy, bank, (4, 4), (2, 2), backend="triton")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", ["torch-export", "onnx", "openvino"])
def test_exported_forms(target: str, case: str) -> None:
    """Graphs for runtimes compute the same in another order; OpenVINO's has its softmax written out."""
    grid, window, shift = CASES[case]

    class Mix(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixer = WeightMixing(6, window, 3, partition=True, shift=shift, dtype=torch.float64)
            torch.nn.init.normal_(self.mixer.bank)

        def forward(self, x: Tensor) -> Tensor:
            return self.mixer(x, grid)

    model, x = Mix().eval(), torch.randn(2, math.prod(grid), 6, dtype=torch.float64)
    with dispatch.export_target(target):
        program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))
    operators = {node.target for node in program.graph.nodes}
    assert (torch.ops.aten.exp.default in operators) == (target == "openvino")
    assert (torch.ops.aten.softmax.int in operators) == (target != "openvino")
