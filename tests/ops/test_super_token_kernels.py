"""The super token kernels against the float32 reference, under Triton's interpreter or on a GPU."""

import pytest
import torch
from torch import Tensor

from tests.ops.kernels import DEVICE, FLOAT32_TOLERANCE, TIMES_PLAIN, assert_kernel_close, relative_rmse
from tokamix.ops import super_token_sample, super_token_scatter

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [  # B, H, W, C, cell, iterations
    (1, 1, 1, 3, (1, 1), 1),
    (2, 7, 5, 33, (2, 3), 1),
    (1, 17, 11, 20, (8, 8), 2),
    (1, 4, 6, 65, (4, 4), 1),
    (1, 9, 8, 600, (5, 7), 1),  # cells of more tokens than a program holds at once
]


def sampled(x: Tensor, cell: tuple[int, int], n_iter: int, backend: str) -> Tensor:
    return super_token_sample(x, cell, n_iter, backend=backend)[0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("b", "h", "w", "c", "cell", "n_iter"), SHAPES)
def test_against_reference(
    b: int, h: int, w: int, c: int, cell: tuple[int, int], n_iter: int, dtype: torch.dtype, poison_empty: None
) -> None:
    x = torch.randn(b, h, w, c)
    assert_kernel_close(sampled, (x,), dtype, cell=cell, n_iter=n_iter)

    rounded = x.to(DEVICE, dtype)
    kernel, plain = (super_token_sample(rounded, cell, n_iter, backend=k)[1] for k in ("triton", "eager"))
    exact = super_token_sample(rounded.double(), cell, n_iter)[1]
    bound = TIMES_PLAIN[dtype] * relative_rmse(plain, exact) if dtype in TIMES_PLAIN else FLOAT32_TOLERANCE
    assert (kernel.shape, kernel.dtype) == (plain.shape, plain.dtype)
    assert relative_rmse(kernel, exact) <= bound

    def scattered(tokens: Tensor, backend: str) -> Tensor:
        return super_token_scatter(tokens, exact.to(dtype), cell, backend=backend)

    p, q = (h + cell[0] - 1) // cell[0], (w + cell[1] - 1) // cell[1]
    assert_kernel_close(scattered, (torch.randn(b, p, q, c),), dtype)


def test_non_contiguous(poison_empty: None) -> None:
    x = torch.randn(2, 18, 5, 6, device=DEVICE).permute(0, 2, 3, 1)
    results = [super_token_sample(x, (2, 2), backend=backend) for backend in ("triton", "eager")]
    torch.testing.assert_close(*results)
    tokens = torch.randn(2, 9, 3, 3, device=DEVICE).permute(0, 2, 3, 1)
    association = results[0][1].transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(
        *(super_token_scatter(tokens, association, (2, 2), backend=backend) for backend in ("triton", "eager"))
    )


@pytest.mark.parametrize("value", [0.0, 1e-3, 1e4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_extremes(dtype: torch.dtype, value: float, poison_empty: None) -> None:
    x = (torch.randn(1, 9, 9, 16, device=DEVICE).clamp(-3, 3) * value).to(dtype).requires_grad_()
    tokens, association = super_token_sample(x, (8, 8), backend="triton")
    out = super_token_scatter(tokens, association, (8, 8), backend="triton")
    plain = super_token_scatter(*super_token_sample(x, (8, 8), backend="eager"), (8, 8), backend="eager")
    torch.testing.assert_close(out, plain, rtol=2e-2, atol=2e-2 * value)
    for ours, expected in zip(
        *(torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True) for y in (out, plain)), strict=True
    ):
        torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


def test_compile() -> None:
    def roundtrip(x: Tensor) -> Tensor:
        return super_token_scatter(*super_token_sample(x, (4, 4)), (4, 4))

    x = torch.randn(1, 9, 7, 8, device=DEVICE)
    torch.testing.assert_close(torch.compile(roundtrip, fullgraph=True, backend="aot_eager")(x), roundtrip(x))


def test_limit() -> None:
    with pytest.raises(RuntimeError, match="1030 channels are over 1024"):
        super_token_sample(torch.randn(1, 2, 2, 1030, device=DEVICE), (2, 2), backend="triton")
