"""The papers' host models with SimA or context broadcasting, registered under their own names.

SimA: Simple Softmax-free Attention for Vision Transformers, arXiv 2206.08898 (DeiT-S and CvT-13, Table 1), and
Scratching Visual Transformer's Back with Uniform Attention, arXiv 2210.08457 (supplement, Tables S1, S3, S5 and S6).
Each is its host, created by the host's entry function with all its options, then changed by `tokamix.swap`; a host's
checkpoint loads, except for the scales of CB_S. Context broadcasting is at the end of the MLPs.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import timm.layers
import torch
import torch.nn.functional as F
from timm.models import (
    VisionTransformer,
    build_model_with_cfg,
    generate_default_cfgs,
    get_pretrained_cfg,
    model_entrypoint,
)
from torch import Tensor, nn

from tokamix._construction import forget_record
from tokamix.layers import GELU, Mlp, PatchConv
from tokamix.models import cvt, localvit, pvt  # noqa: F401  (registers the hosts that timm lacks)
from tokamix.models._backbone import register_model
from tokamix.ops import dispatch
from tokamix.swap import insert_context_broadcast, swap_mixer

SIMA = {
    "crop_pct": 1.0,
    "paper_ids": "arXiv:2206.08898",
    "paper_name": "SimA: Simple Softmax-free Attention for Vision Transformers",
    "origin_url": "https://github.com/UCDvision/sima",
}
CB = {
    "crop_pct": 0.875,
    "paper_ids": "arXiv:2210.08457",
    "paper_name": "Scratching Visual Transformer's Back with Uniform Attention",
    "origin_url": None,
}


@dataclass(frozen=True)
class Variant:
    """A host model, the change, the paper's cfg entries, and the top-1 accuracy in the paper, if any."""

    host: str
    change: Callable[[nn.Module], object]
    paper: dict[str, Any]
    top1: float | None = None


def _sima(host: str, top1: float, **options: Any) -> Variant:
    return Variant(host, partial(swap_mixer, **options), SIMA, top1)


def _cb(host: str, top1: float | None = None, kind: str = "cb") -> Variant:
    return Variant(host, partial(insert_context_broadcast, kind=kind), CB, top1)


VARIANTS = {
    "deit_small_sima": _sima("deit_small_patch16_224", 79.8),
    "deit_small_sima_1head": _sima("deit_small_patch16_224", 79.4, num_heads=1),
    "deit_small_sima_relu": _sima("deit_small_patch16_224", 79.6, relu=True),
    "cvt_13_sima": _sima("cvt_13", 81.4),
    "deit_tiny_cb": _cb("deit_tiny_patch16_224"),
    "deit_tiny_cbs": _cb("deit_tiny_patch16_224", kind="cbs"),
    "deit_tiny_cbgate": _cb("deit_tiny_patch16_224", kind="gate"),
    "deit_tiny_cbhybrid": _cb("deit_tiny_patch16_224", kind="hybrid"),
    "deit_small_cb": _cb("deit_small_patch16_224", 80.5),
    "deit_small_cbs": _cb("deit_small_patch16_224", kind="cbs"),
    "deit_small_cbgate": _cb("deit_small_patch16_224", 80.4, kind="gate"),
    "deit_small_cbhybrid": _cb("deit_small_patch16_224", 80.3, kind="hybrid"),  # Table S6; Table S5 prints 80.5
    "deit_base_cb": _cb("deit_base_patch16_224"),
    "deit_base_cbs": _cb("deit_base_patch16_224", kind="cbs"),
    "deit_base_cbgate": _cb("deit_base_patch16_224", kind="gate"),
    "deit_base_cbhybrid": _cb("deit_base_patch16_224", kind="hybrid"),
    "deit_tiny_distilled_cb": _cb("deit_tiny_distilled_patch16_224", 74.7),
    "deit_tiny_distilled_cbs": _cb("deit_tiny_distilled_patch16_224", 75.3, kind="cbs"),
    "deit_small_distilled_cb": _cb("deit_small_distilled_patch16_224", 81.3),
    "deit_small_distilled_cbs": _cb("deit_small_distilled_patch16_224", 81.6, kind="cbs"),
    "deit_base_distilled_cb": _cb("deit_base_distilled_patch16_224", 83.5),
    "deit_base_distilled_cbs": _cb("deit_base_distilled_patch16_224", 83.6, kind="cbs"),
    "pvt_small_cb": _cb("pvt_small", 77.3),  # this one and the following: 120 epochs
    "swin_tiny_cb": _cb("swin_tiny_patch4_window7_224", 79.5),
    "localvit_tiny_cb": _cb("localvit_tiny"),
    "pvt_v2_b0_cb": _cb("pvt_v2_b0"),
    "pit_s_cb": _cb("pit_s_224"),
}
# feature_cfg of each host's file in timm
FEATURES: dict[str, dict[str, Any]] = {
    "cvt": {"out_indices": (0, 1, 2), "feature_cls": "getter"},
    "deit": {"out_indices": 3, "feature_cls": "getter"},
    "localvit": {"out_indices": 3, "feature_cls": "getter"},
    "pit": {"out_indices": (0, 1, 2), "feature_cls": "hook"},
    "pvt": {"out_indices": (0, 1, 2, 3), "feature_cls": "getter"},
    "pvt_v2": {"out_indices": (0, 1, 2, 3), "flatten_sequential": True},
    "swin_transformer": {"out_indices": (0, 1, 2, 3), "flatten_sequential": True},
}


def _cfg(variant: Variant) -> dict[str, Any]:
    """The host's cfg, without the host's weights."""
    cfg = get_pretrained_cfg(variant.host).to_dict(remove_source=True)
    notes = (f"top1={variant.top1}",) if variant.top1 else None
    return {**cfg, "tag": None, "notes": notes, **variant.paper}


default_cfgs = generate_default_cfgs({name: _cfg(variant) for name, variant in VARIANTS.items()})


def _create(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Create a host by its entry function and change it, before timm loads weights or wraps it for features."""
    variant = VARIANTS[name]
    entry = model_entrypoint(variant.host)
    module = sys.modules[entry.__module__]

    def build(**kwargs: Any) -> nn.Module:
        model = entry(**kwargs)
        _use_own_layers(model)
        if isinstance(model, VisionTransformer) and model.dynamic_img_size:
            model._pos_embed = partial(_embed_positions, model)
        variant.change(model)
        forget_record(model)  # the registered name stands for the change
        return model

    return build_model_with_cfg(
        build,
        name,
        pretrained,
        pretrained_filter_fn=module.checkpoint_filter_fn,
        feature_cfg=dict(FEATURES[module.__name__.rpartition(".")[2]]),
        **kwargs,
    )


def _use_own_layers(model: nn.Module) -> None:
    """Replace a host's patch embedding convolution by `PatchConv`, and its MLPs with their GELUs by ours, in place."""
    for module in list(model.modules()):
        if type(module) is timm.layers.Mlp:
            module.__class__ = Mlp  # the same layers, another forward pass
            if type(module.act) in (nn.GELU, timm.layers.GELU) and getattr(module.act, "approximate", "none") == "none":
                module.act = GELU()
        conv = module.proj if isinstance(module, timm.layers.PatchEmbed) else None
        if type(conv) is nn.Conv2d and conv.kernel_size == conv.stride and conv.padding == (0, 0):
            height, width = conv.kernel_size
            product = PatchConv(conv.in_channels, conv.out_channels, (height, width), device="meta")
            product.weight, product.bias = conv.weight, conv.bias
            module.proj = product


def _embed_positions(model: Any, x: Tensor) -> Tensor:
    """timm's `_pos_embed` of a DeiT, without its shortcut for the native size, which an exported graph cannot take."""
    if not dispatch.is_exporting():
        return type(model)._pos_embed(model, x)
    count = model.num_prefix_tokens
    prefix, table = model.pos_embed.split([count, model.pos_embed.shape[1] - count], 1)
    grid = table.float().unflatten(1, model.patch_embed.grid_size).permute(0, 3, 1, 2)
    grid = F.interpolate(grid, (x.shape[1], x.shape[2]), mode="bicubic", antialias=True)
    positions = torch.cat([prefix, grid.flatten(2).mT.to(table.dtype)], 1)
    tokens = [
        t.expand(x.shape[0], -1, -1) for t in (model.cls_token, getattr(model, "dist_token", None)) if t is not None
    ]
    return model.pos_drop(torch.cat([*tokens, x.flatten(1, 2)], 1) + positions)


def _register(name: str) -> None:
    def entry(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return _create(name, pretrained, **kwargs)

    entry.__name__ = entry.__qualname__ = name
    entry.__doc__ = f"{VARIANTS[name].host}, changed; see `VARIANTS`."
    globals()[name] = register_model(entry)


for _name in VARIANTS:
    _register(_name)
