"""Effective receptive fields, measured by gradients."""

from typing import Any

import torch
from torch import Tensor, nn

from tokamix.explain.capture import CapturedLayer, check_token, evaluation


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
    with evaluation(model), torch.inference_mode(False), torch.enable_grad():
        pixels = image.detach().clone().requires_grad_()
        features = _map(model, pixels[None], level)[0]  # (channels, h, w)
        row, column = check_token(token, (features.shape[1], features.shape[2]))
        channels = features[:, row, column]
        squares = torch.zeros_like(image)
        for direction in probe_directions(len(channels), probes, channels):
            (gradient,) = torch.autograd.grad(channels @ direction, pixels, retain_graph=True)
            squares += gradient.square()
    return squares.sum(0).sqrt()


def layer_receptive_field(
    model: nn.Module,
    image: Tensor,
    layer: CapturedLayer,
    token: tuple[int, int] | None = None,
    probes: int | None = 16,
) -> Tensor:  # (H, W)
    """Effective receptive field of a token after the block of a captured layer; see `receptive_field`.

    All directions are differentiated in one backward pass, as a batch of copies of the image.

    Args:
        model: the network that was captured.
        image: (C, H, W), normalised as the model expects.
        layer: of the capture; its block's output is explained.
        token: (row, column) in the layer's grid; None: the middle.
        probes: random directions from which the norm is estimated; None: all channels.
    """
    index, directions = layer.index_of(token), probe_directions(layer.tokens.shape[-1], probes, image)
    block = model.get_submodule(layer.layer.name.rpartition(".")[0])
    handle = block.register_forward_hook(_stop)
    try:
        with evaluation(model), torch.inference_mode(False), torch.enable_grad():
            copies = image.detach().expand(len(directions), -1, -1, -1).clone().requires_grad_()
            try:
                with torch.compiler.set_stance("force_eager"):
                    model(copies)
            except _BlockOutput as reached:
                tokens = layer.to_tokens(reached.tokens)[:, index]
            (gradient,) = torch.autograd.grad((tokens * directions).sum(), copies)
    finally:
        handle.remove()
    return gradient.square().sum((0, 1)).sqrt()


class _BlockOutput(Exception):
    """Ends a forward pass at a block whose output is all that is needed."""

    def __init__(self, tokens: Tensor) -> None:
        self.tokens = tokens


def _stop(block: nn.Module, args: Any, output: Any) -> None:
    raise _BlockOutput(output[0] if isinstance(output, tuple) else output)


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


def probe_directions(channels: int, probes: int | None, like: Tensor) -> Tensor:
    """Vectors whose outer products sum to the identity, exactly or in expectation; the same in each call."""
    if probes is None or probes >= channels:
        return torch.eye(channels).to(like)
    return (torch.randn(probes, channels, generator=torch.Generator().manual_seed(0)) / probes**0.5).to(like)
