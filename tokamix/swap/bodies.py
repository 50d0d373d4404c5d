"""Softmax attention in tokamix's bodies, replaced by any registered mixer."""

from typing import Any

import torch
from torch import nn

from tokamix.mixers.registry import Site, create_mixer
from tokamix.mixers.softmax import SoftmaxAttention

WITH_QK_NORM = ("softmax", "nystrom", "super_token")  # mixers with this option


def find_body_blocks(model: nn.Module) -> dict[str, Any]:
    """The blocks of a body that mix by softmax attention, by the name of their mixer."""
    return {
        f"{name}.mixer": block
        for name, block in model.named_modules()
        if isinstance(getattr(block, "site", None), Site) and isinstance(block.mixer, SoftmaxAttention)
    }


def create_replacement(host: SoftmaxAttention, to: str, site: Site, **options: Any) -> nn.Module:
    """Create a mixer for the place of a host, with those of its weights that it can use.

    Projections are taken over by name and shape. Super tokens use all of them for the attention among super tokens,
    weight mixing those of values and outputs. Norms of queries and keys (`qk_norm`) stay where the mixer has them, and
    windows where it is softmax attention.
    """
    weight = host.qkv.weight
    if to in WITH_QK_NORM and not isinstance(host.q_norm, nn.Identity):
        options = {"qk_norm": True, **options}
    if to == "softmax":
        options = {"window": host.window, "shift": host.shift, **options}
    mixer = create_mixer(to, site, **options, device=weight.device, dtype=weight.dtype)
    target = getattr(mixer, "refine", mixer)
    state = host.state_dict()
    for part in ("weight", "bias") if host.qkv.bias is not None else ("weight",):
        state[f"v.{part}"] = state[f"qkv.{part}"].chunk(3)[2]
    with torch.no_grad():
        for name, own in target.state_dict().items():
            if name in state and state[name].shape == own.shape:
                own.copy_(state[name])
    return mixer.train(host.training)
