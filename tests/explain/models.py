"""Small captured models for the tests."""

import torch
from torch import Tensor, nn

import tokamix
from tokamix.explain.capture import Capture, CapturedLayer, capture

SMALL = {"img_size": 32, "patch_size": 4, "dim": 16, "depth": 2, "num_heads": 2, "num_classes": 3}


def column(mixer: str, **kwargs) -> nn.Module:
    """Two blocks of 8x8 tokens, 16 channels, 2 heads, in float64 and with weights that matter."""
    model = tokamix.create_body("columnar_tiny", mixer, **{**SMALL, "weight_init": "fan_in", **kwargs})
    return model.double().eval()


def pyramid(mixer: str, **kwargs) -> nn.Module:
    """Stages of 8x8 and 4x4 tokens with one and two blocks."""
    sizes = {"dims": (8, 16), "depths": (1, 2), "num_heads": (1, 2), "img_size": 32, "num_classes": 3}
    return tokamix.create_body("pyramid_tiny", mixer, **{**sizes, "weight_init": "fan_in", **kwargs}).double().eval()


def images(count: int = 2, height: int = 32, width: int = 32) -> Tensor:
    return torch.randn(count, 3, height, width, dtype=torch.float64)


def captured(mixer: str, **kwargs) -> Capture:
    return capture(column(mixer, **kwargs), images())


def first_layer(mixer: str, **kwargs) -> CapturedLayer:
    return captured(mixer, **kwargs)[0]
