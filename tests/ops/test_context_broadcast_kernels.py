"""The context broadcasting kernel against the float32 reference, under Triton's interpreter or on a GPU."""

import pytest
import torch

from tests.ops.kernels import DEVICE, assert_kernel_close
from tokamix.ops import broadcast_context


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1, 7), (2, 7, 63), (1, 65, 33), (3, 197, 24)])
@pytest.mark.parametrize("scaled", [False, True])
def test_against_reference(shape: tuple[int, int, int], dtype: torch.dtype, scaled: bool, poison_empty: None) -> None:
    inputs = (torch.randn(shape),) + ((torch.randn(shape[-1]),) if scaled else ())
    assert_kernel_close(broadcast_context, inputs, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 65, 33), (2, 300, 70)])
def test_many_tokens(
    shape: tuple[int, int, int], dtype: torch.dtype, poison_empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tokamix.ops.context_broadcast import kernels

    monkeypatch.setattr(kernels, "SOME_TOKENS", 64)
    monkeypatch.setattr(kernels, "PARTS", 2)
    assert_kernel_close(broadcast_context, (torch.randn(shape), torch.randn(shape[-1])), dtype)


def test_non_contiguous(poison_empty: None) -> None:
    x = torch.randn(2, 5, 9, device=DEVICE).transpose(1, 2)
    got, expected = broadcast_context(x, backend="triton"), broadcast_context(x, backend="eager")
    torch.testing.assert_close(got, expected)


def test_large_values_in_float16(poison_empty: None) -> None:
    x = torch.full((1, 300, 4), 1e4, dtype=torch.float16, device=DEVICE)
    torch.testing.assert_close(broadcast_context(x, backend="triton"), x)


def test_a_channel_of_zeros_and_another_default_dtype(poison_empty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sums over many tokens are kept in float32, independent of the default dtype."""
    from tokamix.ops.context_broadcast import kernels

    monkeypatch.setattr(kernels, "SOME_TOKENS", 64)
    x = torch.full((1, 100, 4), 3000.0, device=DEVICE, dtype=torch.float16)
    x[..., 1] = 0
    torch.set_default_dtype(torch.float16)
    try:
        torch.testing.assert_close(broadcast_context(x, backend="triton"), x)
    finally:
        torch.set_default_dtype(torch.float32)
