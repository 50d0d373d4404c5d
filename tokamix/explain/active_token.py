"""Active tokens: where a token samples (figure 5 of the paper), and how far (figures 3, 6 and 7)."""

import torch
from torch import Tensor

from tokamix.explain.capture import CapturedLayer, Pair, check_token


@torch.no_grad()
def sampling_offsets(layer: CapturedLayer) -> Tensor:
    """Offsets (B, H, W, 2, samples) of every token, in tokens: along the width first, then along the height.

    A sample belongs to a group of channels that share an offset.
    """
    if layer.layer.kind != "active_token":
        raise ValueError(f"{layer.layer.name} ({layer.layer.kind}) has no sampling offsets")
    mixer = layer.mixer
    offset = next((value for value in (*layer.args, *layer.kwargs.values()) if isinstance(value, Tensor)), None)
    if offset is None:
        if mixer.offset is None:
            raise ValueError(f"{layer.layer.name} was built with offsets='zero': it samples the token itself")
        offset = mixer.offset(layer.x)
    parts = offset.unflatten(-1, (mixer.contexts, 2, -1)).transpose(2, 3).flatten(3)  # (B, H*W, 2, samples)
    return parts.unflatten(1, layer.grid)


def sampled_positions(layer: CapturedLayer, token: Pair | None = None) -> Tensor:
    """How often a token samples each position: fractions (B, directions, H, W) of the samples.

    Directions are horizontal and vertical; with joint offsets there is one. A sample between two tokens counts for
    both, by its interpolation weights. Samples beyond the border read zeros and are not counted.

    Args:
        layer: a captured layer with active tokens.
        token: (row, column); None: the middle.
    """
    row, column = check_token(token, layer.grid)
    offset = sampling_offsets(layer)[:, row, column]  # (B, 2, samples)
    height, width = layer.grid
    across, down = _spread(column + offset[:, 0], width), _spread(row + offset[:, 1], height)  # (B, samples, size)
    if layer.mixer.offsets == "joint":
        return (down.mT @ across / offset.shape[2]).unsqueeze(1)
    result = offset.new_zeros(len(offset), 2, height, width)
    result[:, 0, row], result[:, 1, :, column] = across.mean(1), down.mean(1)
    return result


def offset_histogram(layer: CapturedLayer, token: Pair | None = None) -> tuple[Tensor, Tensor]:
    """Counts of a token's offsets over all images of the capture: horizontal (W,) and vertical (H,).

    Bin i holds offsets that round to i - W // 2 (or H // 2): the possible range for the token in the middle. Offsets
    beyond it count for the first or the last bin.
    """
    row, column = check_token(token, layer.grid)
    offset = sampling_offsets(layer)[:, row, column]
    counts = []
    for values, size in zip(offset.unbind(1), reversed(layer.grid), strict=True):
        bins = (values.round().long() + size // 2).clamp(0, size - 1)
        counts.append(torch.bincount(bins.flatten(), minlength=size))
    return counts[0], counts[1]


def _spread(position: Tensor, size: int) -> Tensor:
    """Interpolation weights (B, samples, size) of fractional positions (B, samples)."""
    places = torch.arange(size, device=position.device)
    return (1 - (position.unsqueeze(-1) - places).abs()).clamp_min(0)
