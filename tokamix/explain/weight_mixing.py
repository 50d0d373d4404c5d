"""Weight mixing: the banks of a network (figure 2 of AMixer's supplement) and the weights composed from them."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tokamix.explain.capture import CapturedLayer
from tokamix.layers import tokens_to_map
from tokamix.ops import resize_bank
from tokamix.ops.weight_mixing import reference


def weight_bank(layer: CapturedLayer) -> Tensor:
    """The bank (K, 2h - 1, 2w - 1) in relative form: one weight for each displacement of the source, 0 in the middle.

    Entries are logits if the weights are normalised by softmax.
    """
    _check(layer)
    bank, (h, w) = layer.mixer.bank.detach(), layer.mixer.window
    if bank.ndim == 3:
        raise ValueError(f"{layer.layer.name} has a weight for each pair of positions, not for each displacement")
    return bank.unflatten(1, (2 * h - 1, 2 * w - 1))


@torch.no_grad()
def composed_weights(layer: CapturedLayer, queries: Tensor | None = None) -> Tensor:
    """Weights (B, heads, Q, N) that the layer composes from its bank; zero outside of a token's window.

    Padding that fills incomplete windows also takes part, so that rows at the border may sum to less than 1.

    Args:
        layer: a captured layer with weight mixing.
        queries: indices (Q,) of the tokens that receive; None: all.
    """
    _check(layer)
    mixer, (height, width) = layer.mixer, layer.grid
    window, shift, padded, bank = layer.grid, (0, 0), layer.grid, mixer.bank
    if mixer.partition:
        window, shift = mixer.window, mixer.shift
        padded = (-(-height // window[0]) * window[0], -(-width // window[1]) * window[1])
    elif layer.grid != mixer.window:
        bank = resize_bank(bank, mixer.window, layer.grid)
    x = F.pad(tokens_to_map(layer.x, layer.grid), (0, 0, 0, padded[1] - width, 0, padded[0] - height)).flatten(1, 2)
    embed = next((value for value in (*layer.args, *layer.kwargs.values()) if isinstance(value, Tensor)), None)
    policy = None
    if mixer.adapter is not None:
        policy = mixer._policy(x if embed is None else x + mixer._tile(embed, padded))
    weights = reference.mixing_weights(policy, bank, padded, window, shift, mixer.shift_mask, mixer.activation)
    weights = weights.permute(1, 3, 2, 4, 0)  # (B, heads, windows, destinations, sources)

    number = torch.arange(padded[0] * padded[1], device=x.device)
    ids = reference.to_windows(number[None, :, None], padded, window, shift)[0, :, :, 0]  # (windows, h*w)
    place = torch.empty_like(number)
    place[ids.flatten()] = number  # of each token: its window and its place in it
    real = number.unflatten(0, padded)[:height, :width].flatten()  # tokens that are not padding
    chosen = place[real if queries is None else real[queries]]
    rows = weights.expand(len(x), -1, len(ids), -1, -1).flatten(2, 3)[:, :, chosen]  # (B, heads, Q, h*w)
    sources = ids[chosen // ids.shape[1]].expand_as(rows)
    return rows.new_zeros(*rows.shape[:3], len(number)).scatter_(3, sources, rows)[..., real]


def _check(layer: CapturedLayer) -> None:
    if layer.layer.kind != "weight_mixing":
        raise ValueError(f"{layer.layer.name} ({layer.layer.kind}) has no weight bank")
