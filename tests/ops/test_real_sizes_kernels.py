"""The kernels at the sizes of real models, on a GPU: the compiler can fail where the interpreter does not."""

import itertools
import math

import pytest
import torch

from tests.ops.kernels import assert_kernel_close, both_axes, sample_and_scatter
from tokamix import ops

pytestmark = pytest.mark.gpu  # interpreted, it would take hours
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
Pair = tuple[int, int]


@DTYPES
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("window", [(7, 7), (9, 9), (14, 14), (16, 16)])
@pytest.mark.parametrize("dim", [16, 24, 32, 48, 64, 128])
def test_weight_mixing(dim: int, window: Pair, shift: int, dtype: torch.dtype) -> None:
    grid, entries, heads = (window[0], 2 * window[1]), 36 if window[0] == 14 else 18, 3
    displacements = math.prod(2 * side - 1 for side in window)
    v, policy = torch.randn(2, math.prod(grid), heads, dim), 0.5 * torch.randn(2, math.prod(grid), entries, heads)
    inputs = v, policy, 0.5 * torch.randn(entries, displacements)
    assert_kernel_close(ops.bank_mixing, inputs, dtype, grid=grid, window=window, shift=(shift, shift))


@pytest.mark.parametrize("dim", [16, 32, 64])
def test_weight_mixing_of_many_pairs(dim: int) -> None:
    """Enough pairs that every program loops."""
    inputs = torch.randn(96, 196, 24, dim), 0.5 * torch.randn(96, 196, 36, 24), 0.5 * torch.randn(36, 27 * 27)
    assert_kernel_close(ops.bank_mixing, inputs, torch.bfloat16, grid=(14, 14))


@DTYPES
@pytest.mark.parametrize("activation", ["identity", "sigmoid"])
@pytest.mark.parametrize("dim", [32, 64])
def test_other_activations(dim: int, activation: str, dtype: torch.dtype) -> None:
    inputs = torch.randn(2, 196, 3, dim), 0.2 * torch.randn(2, 196, 9, 3), 0.2 * torch.randn(9, 27 * 27)
    assert_kernel_close(ops.bank_mixing, inputs, dtype, grid=(14, 14), activation=activation)


@DTYPES
@pytest.mark.parametrize("tokens", [49, 197, 784, 5000])
@pytest.mark.parametrize("dim", [16, 32, 48, 64, 96, 128])
def test_sima(dim: int, tokens: int, dtype: torch.dtype) -> None:
    assert_kernel_close(ops.sima_attention, tuple(torch.randn(3, 2, 3, tokens, dim)), dtype)


def test_sima_of_many_tokens() -> None:
    assert_kernel_close(ops.sima_attention, tuple(torch.randn(3, 8, 6, 16_384, 64)), torch.bfloat16)


@DTYPES
@pytest.mark.parametrize("cell", [(2, 2), (4, 4), (7, 7), (8, 8)])
@pytest.mark.parametrize("channels", [64, 96, 128, 192, 384, 512])
def test_super_token(channels: int, cell: Pair, dtype: torch.dtype) -> None:
    assert_kernel_close(sample_and_scatter, (torch.randn(2, 28, 30, channels),), dtype, cell=cell)


@DTYPES
@pytest.mark.parametrize(
    ("side", "channels", "share"), [(56, 64, 2), (28, 128, 4), (14, 320, 4), (7, 512, 8), (100, 96, 2), (256, 64, 2)]
)
def test_active_token(side: int, channels: int, share: int, dtype: torch.dtype) -> None:
    size = (2, side, side, 2 * channels // share)
    offset = torch.randint(-6, 7, size) + torch.randint(1, 8, size) / 8  # exact in half precision, off the integers
    assert_kernel_close(both_axes, (torch.randn(2, side, side, channels), offset), dtype)


@DTYPES
@pytest.mark.parametrize(("side", "channels"), itertools.product((7, 14, 56), (64, 320, 1280)))
def test_depthwise_conv(side: int, channels: int, dtype: torch.dtype) -> None:
    inputs = torch.randn(2, side, side, channels), torch.randn(channels, 1, 3, 3), torch.randn(channels)
    assert_kernel_close(ops.depthwise_conv, inputs, dtype, residual=True, gelu=True)


@DTYPES
@pytest.mark.parametrize("tokens", [49, 197, 784, 5000])
def test_context_broadcast(tokens: int, dtype: torch.dtype) -> None:
    assert_kernel_close(ops.broadcast_context, (torch.randn(2, tokens, 384), torch.randn(384)), dtype)


@DTYPES
@pytest.mark.parametrize(("rows", "channels"), [(50_000, 64), (3001, 320), (700, 1280), (100, 8192)])
def test_layer_norm(rows: int, channels: int, dtype: torch.dtype) -> None:
    inputs = 3 * torch.randn(2, rows, channels) + 1, torch.randn(channels), torch.randn(channels)
    assert_kernel_close(ops.layer_norm, inputs, dtype)
