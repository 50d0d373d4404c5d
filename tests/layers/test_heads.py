"""Splitting and merging heads, and softmax attention between the projections."""

import torch

from tokamix.layers import SoftmaxProduct, merge_heads, split_heads


def test_softmax_product_takes_fewer_keys_than_queries() -> None:
    x, y = torch.randn(2, 7, 12, dtype=torch.float64), torch.randn(2, 3, 12, dtype=torch.float64)
    q, k, v = split_heads(x, 2), split_heads(y, 2), split_heads(y + 1, 2)
    out = merge_heads(SoftmaxProduct(0.3)(q, k, v))
    for h in range(2):
        part = slice(6 * h, 6 * (h + 1))
        expected = (0.3 * x[..., part] @ y[..., part].mT).softmax(-1) @ (y + 1)[..., part]
        torch.testing.assert_close(out[..., part], expected)
