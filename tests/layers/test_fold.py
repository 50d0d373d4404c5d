"""Folding BatchNorm into the preceding layer."""

import pytest
import torch
from torch import nn

from tokamix.layers import FoldableSequential


@pytest.mark.parametrize("conv", [nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(3, 4, 2, stride=2, bias=False)])
def test_folding(conv: nn.Module) -> None:
    """Folding uses the running statistics in every mode, keeps requires_grad, and folding twice changes nothing."""
    layers = FoldableSequential(conv, nn.BatchNorm2d(4), nn.ReLU()).requires_grad_(False)
    for tensor in (layers[1].running_mean, layers[1].weight, layers[1].bias):
        nn.init.normal_(tensor)
    nn.init.uniform_(layers[1].running_var, 0.5, 2.0)
    x = torch.randn(2, 3, 5, 6)
    expected = layers.eval()(x)
    layers.train().reparameterize()
    layers.reparameterize()
    assert [type(layer) for layer in layers] == [type(conv), nn.Identity, nn.ReLU]
    assert not layers[0].bias.requires_grad
    assert all(layer.training for layer in layers)
    torch.testing.assert_close(layers(x), expected)


def test_folding_norms_of_higher_precision() -> None:
    layers = FoldableSequential(nn.Linear(3, 4).bfloat16(), nn.BatchNorm1d(4)).eval()
    layers.reparameterize()
    assert not any(layer.training for layer in layers)
    assert layers[0].bias.dtype == torch.bfloat16
    assert layers(torch.randn(2, 3, dtype=torch.bfloat16)).dtype == torch.bfloat16
