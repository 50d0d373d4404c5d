"""The weight mixing kernels against the reference, under Triton's interpreter or on a GPU."""

import pytest
import torch
from torch import Tensor

from tests.ops.kernels import DEVICE, assert_kernel_close, relative_rmse
from tests.ops.test_weight_mixing import CASES, make
from tokamix.ops import bank_mixing

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def mix(v: Tensor, policy: Tensor, bank: Tensor, **kwargs: object) -> Tensor:
    return bank_mixing(v, policy, bank, **kwargs)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [case for case in CASES if case != "one token"])
def test_against_reference(case: str, dtype: torch.dtype, poison_empty: None) -> None:
    grid, window, shift = CASES[case]
    assert_kernel_close(mix, make(grid, window, heads=2), dtype, grid=grid, window=window, shift=shift)


def test_one_token(poison_empty: None) -> None:
    """One token keeps its value for every policy, so the policy's gradient is zero up to rounding."""
    v, policy, bank = (x.to(DEVICE).requires_grad_() for x in make((1, 1), (1, 1), dtype=torch.float32))
    out = bank_mixing(v, policy, bank, (1, 1), backend="triton")
    torch.testing.assert_close(out, v)
    grads = torch.autograd.grad(out.square().sum(), (v, policy, bank))
    torch.testing.assert_close(grads[0], 2 * v)
    assert all(g.abs().max() < 1e-5 for g in grads[1:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("grid", "window", "shift"), [((5, 7), (5, 7), (0, 0)), ((8, 8), (4, 8), (0, 0)), ((6, 12), (6, 6), (2, 1))]
)
def test_tiles(grid, window, shift, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, poison_empty: None) -> None:
    """Only whole tiles, a partial last tile, and shifted windows."""
    from tokamix.ops.weight_mixing import kernels

    monkeypatch.setattr(kernels, "TILE", 16)
    inputs = make(grid, window, heads=2, dim=20, dtype=torch.float32)
    assert_kernel_close(mix, inputs, dtype, grid=grid, window=window, shift=shift, shift_mask=False)


def test_absolute_bank(poison_empty: None) -> None:
    grid, window, _ = CASES["windows"]
    assert_kernel_close(mix, make(grid, window, batch=1, absolute=True), torch.float32, grid=grid, window=window)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["identity", "sigmoid"])
def test_activations(activation: str, dtype: torch.dtype, poison_empty: None) -> None:
    grid, window, shift = CASES["shifted windows"]
    options = {"grid": grid, "window": window, "shift": shift, "activation": activation}
    assert_kernel_close(mix, make(grid, window, batch=1, heads=2), dtype, **options)


def test_shift_without_mask(poison_empty: None) -> None:
    grid, window, shift = CASES["shifted windows"]
    options = {"grid": grid, "window": window, "shift": shift, "shift_mask": False}
    assert_kernel_close(mix, make(grid, window, batch=1), torch.float32, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sizes_that_fit_no_block(dtype: torch.dtype, poison_empty: None) -> None:
    inputs = make((3, 7), (3, 7), batch=1, heads=5, dim=17, size=19)
    assert_kernel_close(mix, inputs, dtype, grid=(3, 7))


def test_more_destinations_than_a_block(monkeypatch: pytest.MonkeyPatch, poison_empty: None) -> None:
    """Softmax over several blocks, the first fully masked for some rows; partial sums of the policies' gradient."""
    from tokamix.ops.weight_mixing import kernels

    monkeypatch.setattr(kernels, "MAX_BLOCK", 16)
    inputs = make((5, 8), (5, 4), batch=1, heads=2, dim=3)
    for activation in ("softmax", "identity"):
        options = {"grid": (5, 8), "window": (5, 4), "shift": (3, 3), "activation": activation}
        assert_kernel_close(mix, inputs, torch.float32, **options)


def test_more_pairs_than_a_block(poison_empty: None) -> None:
    assert_kernel_close(mix, make((2, 2), (1, 2), batch=33, heads=1), torch.float32, grid=(2, 2), window=(1, 2))


def test_in_parts(monkeypatch: pytest.MonkeyPatch, poison_empty: None) -> None:
    """A batch whose logits exceed the scratch memory is processed in parts, with the same result."""
    from tokamix.ops.weight_mixing import kernels

    grid, window, shift = CASES["shifted windows"]
    monkeypatch.setattr(kernels, "SCRATCH_BYTES", 2 * 4 * 6 * 8 * 4)  # two images
    assert_kernel_close(mix, make(grid, window, batch=3, heads=1), torch.float32, grid=grid, window=window, shift=shift)


def test_non_contiguous(poison_empty: None) -> None:
    v, policy, bank = (x.to(DEVICE) for x in make((3, 5), (3, 5), dtype=torch.float32))
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (v, policy)]
    bank = bank.T.contiguous().T
    got = bank_mixing(*strided, bank, (3, 5), backend="triton")
    torch.testing.assert_close(got, bank_mixing(v, policy, bank, (3, 5), backend="eager"))


def test_mixed_dtypes(poison_empty: None) -> None:
    """Under autocast the bank stays float32 while values and policies are in half precision."""
    v, policy, bank = (x.to(DEVICE) for x in make((3, 5), (3, 5), dtype=torch.float32))
    bank.requires_grad_()
    out = bank_mixing(v.bfloat16(), policy.bfloat16(), bank, (3, 5), backend="triton")
    torch.testing.assert_close(out.float(), bank_mixing(v, policy, bank, (3, 5), backend="eager"), rtol=0.05, atol=0.05)
    out.float().sum().backward()
    assert bank.grad.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_extremes(dtype: torch.dtype, poison_empty: None) -> None:
    grid, window, shift = CASES["shifted windows"]
    v, policy, bank = (x.to(DEVICE) for x in make(grid, window, batch=1, heads=2, dtype=dtype))
    for scale in (0, 1e4):
        inputs = [x.detach().requires_grad_() for x in (v, policy * scale, bank)]
        out = bank_mixing(*inputs, grid, window, shift, backend="triton")
        grads = torch.autograd.grad(out.float().sum(), inputs)
        assert all(x.isfinite().all() for x in (out, *grads)), scale
        exact = bank_mixing(*(x.detach().double() for x in inputs), grid, window, shift)
        assert relative_rmse(out, exact) < 4 * torch.finfo(dtype).eps


def test_compiles_without_graph_break() -> None:
    grid, window, shift = CASES["shifted windows"]
    inputs = [x.to(DEVICE).requires_grad_() for x in make(grid, window, dtype=torch.float32)]
    compiled = torch.compile(bank_mixing, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        compiled(*inputs, grid, window, shift), bank_mixing(*inputs, grid, window, shift, backend="eager")
    )


def test_falls_back_with_a_reason() -> None:
    inputs = [x.to(DEVICE) for x in make((2, 2), (2, 2), dtype=torch.float32)]
    with pytest.raises(RuntimeError, match="activation 'l2' has no kernel, only softmax, identity, sigmoid have"):
        bank_mixing(*inputs, (2, 2), activation="l2", backend="triton")
    v, policy, bank = (x.to(DEVICE) for x in make((2, 2), (2, 2), dim=300, dtype=torch.float32))
    with pytest.raises(RuntimeError, match="head dim 300 is over 128"):
        bank_mixing(v, policy, bank, (2, 2), backend="triton")
