"""Effective receptive fields, measured by gradients."""

from typing import Any

import torch
from torch import Tensor, nn


def receptive_field(
    model: nn.Module,
    image: Tensor,
    token: tuple[int, int] | None = None,
    level: int = -1,
    probes: int | None = None,
) -> Tensor:  # (H, W)
    """Effective receptive field: how strongly the output of one token depends on each pixel of an image.

    After arXiv 1701.04128, which averages the gradient of one unit over many inputs. Here it is computed for one image,
    as the norm of the gradient of *all* channels of the token with respect to a pixel (the norm of a column of the
    Jacobian): in a sum over channels the gradients would cancel, after a LayerNorm completely.

    Args:
        model: one of ours or timm's, with `forward_intermediates`, or with `forward_features` that returns maps or
            tokens. It runs in evaluation mode; its parameters get no gradients.
        image: (C, H, W), normalised as the model expects.
        token: (row, column) in the map; None: the middle.
        level: index of the map of `forward_intermediates`; negative: from the end.
        probes: estimate the norm from this number of random directions instead of all channels; each costs a backward
            pass.
    """
    if image.ndim != 3:
        raise ValueError(f"receptive_field needs one image (C, H, W), got shape {tuple(image.shape)}")
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.enable_grad():
            pixels = image.detach().clone().requires_grad_()
            features = _map(model, pixels[None], level)[0]  # (channels, h, w)
            channels = features[:, *_position(token, *features.shape[1:])]
            squares = torch.zeros_like(image)
            for direction in _directions(channels, probes):
                (gradient,) = torch.autograd.grad(channels @ direction, pixels, retain_graph=True)
                squares += gradient.square()
    finally:
        for module, flag in training.items():
            module.training = flag
    return squares.sum(0).sqrt()


def _map(model: nn.Module, x: Tensor, level: int) -> Tensor:
    """One feature map (1, C, h, w) of the model."""
    network: Any = model
    if hasattr(model, "forward_intermediates"):
        return network.forward_intermediates(x, indices=[level], intermediates_only=True, output_fmt="NCHW")[0]
    if not hasattr(model, "forward_features"):
        raise ValueError(f"{type(model).__name__} has neither forward_intermediates nor forward_features; use timm's")
    if level != -1:
        raise ValueError(f"{type(model).__name__} gives only its last features, got level={level}; leave it out")
    x, (height, width) = network.forward_features(x), x.shape[2:]
    if x.ndim == 3:  # tokens: a grid with the aspect ratio of the image
        x = x[:, getattr(model, "num_prefix_tokens", 0) :].transpose(1, 2)
        rows = round((x.shape[2] * height / width) ** 0.5)
        return x.unflatten(2, (rows, -1))
    return x.permute(0, 3, 1, 2) if getattr(model, "output_fmt", "NCHW") == "NHWC" else x


def _position(token: tuple[int, int] | None, height: int, width: int) -> tuple[int, int]:
    row, column = token or (height // 2, width // 2)
    if not (0 <= row < height and 0 <= column < width):
        raise ValueError(f"token ({row}, {column}) is outside of the map of {height}x{width} tokens")
    return row, column


def _directions(channels: Tensor, probes: int | None) -> Tensor:
    """Vectors whose outer products sum to the identity, exactly or in expectation; the same in each call."""
    size = len(channels)
    if probes is None or probes >= size:
        return torch.eye(size).to(channels)
    return (torch.randn(probes, size, generator=torch.Generator().manual_seed(0)) / probes**0.5).to(channels)
