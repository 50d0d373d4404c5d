"""Residual connections and MLPs in few operators give what the plain expressions give."""

import timm.layers
import torch
from timm.layers import DropPath
from torch import nn

from tokamix.layers import Mlp, add_scaled


def test_add_scaled() -> None:
    x, branch = torch.randn(2, 2, 3, 4, dtype=torch.float64).unbind()
    scale = torch.randn(4, dtype=torch.float64)
    with torch.inference_mode():
        torch.testing.assert_close(add_scaled(x, branch, scale, DropPath(0.5).eval()), x + scale * branch)
    assert torch.equal(add_scaled(x, branch, scale, DropPath(0.0)), x + scale * branch)


def test_paths_are_dropped() -> None:
    x, branch, scale = torch.zeros(64, 1), torch.ones(64, 1), torch.ones(1)
    with torch.inference_mode():  # also here, if the model is in training mode
        assert set(add_scaled(x, branch, scale, DropPath(0.5)).flatten().tolist()) == {0.0, 2.0}


def test_mlp_is_timms() -> None:
    mlp, other = Mlp(4, 8), timm.layers.Mlp(4, 8)
    other.load_state_dict(mlp.state_dict())
    x = torch.randn(2, 3, 4)
    assert torch.equal(mlp(x), other(x))
    assert isinstance(Mlp(4, 8, drop=0.5).drop1, nn.Dropout)
