"""GELU and its approximation."""

import torch
import torch.nn.functional as F

from tokamix.layers import GELU, approximate_gelu


def test_approximate_gelu() -> None:
    x = torch.linspace(-30, 30, 60_001, dtype=torch.float64, requires_grad=True)
    approximate, exact = approximate_gelu(x), F.gelu(x)
    assert (approximate - exact).abs().max() < 3e-5
    slopes = (torch.autograd.grad(y.sum(), x)[0] for y in (approximate, exact))
    assert (next(slopes) - next(slopes)).abs().max() < 2e-4
    torch.testing.assert_close(GELU()(x), exact)
