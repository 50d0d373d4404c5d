"""Banks of weight mixing from what is known of the attention it replaces: its position bias, or its mean weights."""

from typing import Any

import torch
from torch import Tensor

from tokamix.mixers.weight_mixing import WeightMixing

Grid = tuple[int, int]


def displacements(grid: Grid, window: Grid, device: Any = None) -> tuple[Tensor, Tensor]:
    """The entry of a relative bank that mixes each pair of tokens of a grid: destinations are rows, sources columns.

    Returns:
        Indices (N, N) into the bank of a window, and whether the window holds the pair's displacement.
    """
    offsets, inside = [], []
    for size, side in zip(grid, window, strict=True):
        line = torch.arange(size, device=device)
        offset = line - line[:, None]  # source minus destination, as in `expand_bank`
        offsets.append(offset.clamp(1 - side, side - 1) + side - 1)
        inside.append(offset.abs() < side)
    # (H, 1, H, 1) for the rows, (W, 1, W) for the columns -> (H, W, H, W)
    index = offsets[0][:, None, :, None] * (2 * window[1] - 1) + offsets[1][:, None]
    held = inside[0][:, None, :, None] & inside[1][:, None]
    return index.flatten(2).flatten(0, 1), held.flatten(2).flatten(0, 1)


def set_entries(mixer: WeightMixing, logits: Tensor, adapt: float) -> bool:
    """Make logits (heads, displacements) the first entries of a bank, and let the policy of each head choose its own.

    With `adapt` 0 the weights are then exactly softmax(logits), for all tokens.

    Args:
        mixer: the mixer, changed in place.
        logits: one table for each head.
        adapt: factor on the weights of the policy's last layer, through which it depends on the tokens.

    Returns:
        Whether the mixer has such a bank: relative, with softmax, an entry for each head and a linear policy.
    """
    heads = mixer.num_heads
    fits = mixer.bank.ndim == 2 and len(mixer.bank) >= heads == len(logits) and mixer.activation == "softmax"
    if not fits or (mixer.adapter is not None and mixer.policy_activation != "identity"):
        return False
    with torch.no_grad():
        mixer.bank[:heads] = logits.to(mixer.bank)
        if mixer.adapter is not None:
            last: Any = list(mixer.adapter.children())[-1]
            choice = torch.zeros(len(mixer.bank), heads)
            choice[:heads] = torch.eye(heads)
            last.weight.mul_(adapt)
            last.bias.copy_(choice.flatten())
    return True


def carry_bias(mixer: WeightMixing, bias: Tensor, grid: Grid) -> bool:
    """Make a host's relative position bias (..., heads, N, N) of queries and keys the bank; whether that was possible.

    The mixing weights are then those of an attention whose queries are 0: softmax(bias), among the patch tokens.
    Displacements that no pair of tokens has get the lowest bias.
    """
    count = grid[0] * grid[1]
    if bias.is_meta or bias.ndim < 3 or min(bias.shape[-2:]) < count:
        return False
    bias = bias.detach().flatten(0, -4)[0] if bias.ndim > 3 else bias.detach()
    bias = bias[:, -count:, -count:]  # prefix tokens are not on the grid
    index, held = displacements(grid, mixer.window, bias.device)
    height, width = mixer.window
    table = bias.amin((1, 2))[:, None].repeat(1, (2 * height - 1) * (2 * width - 1))
    table[:, index[held]] = bias[:, held]
    relative = torch.allclose(table[:, index[held]], bias[:, held], rtol=1e-3, atol=1e-4)
    return relative and set_entries(mixer, table, adapt=0.0)
