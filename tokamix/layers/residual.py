"""Residual connections and MLPs in few operators: in eager mode each one costs time on the host."""

from typing import Any

import torch
from timm import layers
from torch import Tensor, nn

from tokamix.layers.linear import apply_linear, linear_gelu


class Mlp(layers.Mlp):
    """timm's Mlp; dropout that drops nothing is no layer, and GELU can be a part of the first one."""

    def __init__(self, *args: Any, drop: float | tuple[float, float] = 0.0, **kwargs: Any) -> None:
        super().__init__(*args, drop=drop, **kwargs)
        if not drop:
            self.drop1, self.drop2 = nn.Identity(), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """(..., in_features) -> (..., out_features)."""
        x = self.drop1(linear_gelu(self.fc1, self.act, x))
        return self.drop2(apply_linear(self.fc2, self.norm(x)))


def add_scaled(x: Tensor, branch: Tensor, scale: Tensor, drop_path: nn.Module) -> Tensor:
    """x + drop_path(scale * branch); in inference mode in one operator, whose backward pass would need more."""
    # a compiler fuses these by itself, and cannot trace the question
    if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled() and not drop_path.training:
        return torch.addcmul(x, branch, scale)
    return x + drop_path(scale * branch)
