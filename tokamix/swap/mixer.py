"""Replace the attention of an existing model by SimA."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch.nn.functional as F
from timm.layers import GELU, GELUTanh, QuickGELU
from torch import nn

from tokamix._construction import record_step
from tokamix.mixers.context_broadcast import ContextBroadcast
from tokamix.swap import timm as timm_host
from tokamix.swap import tokamix as tokamix_host
from tokamix.swap import torch as torch_host
from tokamix.swap._host import Adapter
from tokamix.swap.bodies import create_replacement, find_body_blocks
from tokamix.swap.calibrate import Images, calibrate_mixers
from tokamix.swap.report import SwapReport

MIXERS = ("sima",)
GELUS = (nn.GELU, GELU, GELUTanh, QuickGELU)
ADAPTERS: dict[type[nn.Module], Adapter] = {**timm_host.ADAPTERS, **torch_host.ADAPTERS}


def swap_mixer(
    model: nn.Module,
    to: str = "sima",
    num_heads: int | None = None,
    relu: bool = False,
    keep_class_attention: bool = False,
    where: Sequence[str] | None = None,
    mixer_kwargs: Mapping[str, Any] | None = None,
    calibrate: Images | None = None,
) -> SwapReport:
    """Replace softmax and cross-covariance attention by SimA, in place; projections keep their weights and names.

    SimA: Simple Softmax-free Attention for Vision Transformers, arXiv 2206.08898. It replaces the attention of timm's
    ViT, DeiT, PiT, XCiT, CaiT and Swin, of tokamix's CvT, PVT and LocalViT, and nn.MultiheadAttention in any model. The
    outputs of a pretrained network change: fine-tune it. Attention dropout is dropped, because SimA has no attention
    weights. Load a host's checkpoint before the swap, or with strict=False.

    Args:
        model: the network, changed in place.
        to: the mixer; "sima".
        num_heads: heads of every attention, 1 for the paper's single-head form; None keeps the host's number.
        relu: also replace every GELU by ReLU, so that inference needs no exponential.
        keep_class_attention: keep the class attention of CaiT and XCiT. SimA's authors replace it too.
        where: names of the attentions to replace, in a body; None for all.
        mixer_kwargs: options of the mixer, in a body.
        calibrate: a few normalised images (B, C, H, W), or batches of them, on which the new mixers are fitted to the
            attention they replace; see `tokamix.swap.calibrate`. 256 images are plenty.

    Raises:
        ValueError: if the mixer is unknown, nothing can be replaced, or the channels of an attention do not divide into
            `num_heads`. The model is unchanged then.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"swap_mixer changes a model, not {model!r}; create it first, with tokamix.create_model(name)")
    if blocks := find_body_blocks(model):
        return _swap_body(model, blocks, to, where, mixer_kwargs, calibrate)
    if to not in MIXERS:
        raise ValueError(f"unknown mixer {to!r}: with the host's projections swap_mixer supports {', '.join(MIXERS)}")
    hosts: dict[str, tuple[Any, Adapter]] = {
        name: (module, adapter)
        for name, module in model.named_modules(remove_duplicate=False)
        if name and (adapter := find_adapter(module)) and not (keep_class_attention and adapter.class_attention)
    }
    if not hosts:
        supported = ", ".join(sorted(host.__name__ for host in ADAPTERS))
        raise ValueError(
            f"{type(model).__name__} has no attention that swap_mixer can replace: it supports {supported}, and the"
            " attention of tokamix's CvT and PVT"
        )
    heads = {name: host.num_heads if num_heads is None else num_heads for name, (host, _) in hosts.items()}
    for name, (host, adapter) in hosts.items():
        _check(name, host, adapter, heads[name])

    original = copy.deepcopy(model) if calibrate is not None else None
    before = {name for name, _ in model.named_parameters()}
    for name, (host, adapter) in hosts.items():
        module = adapter.create(host, heads[name])
        module.training = host.training
        model.set_submodule(name, module)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # nested tensors of padded batches support softmax attention only
    used = [adapter for _, adapter in hosts.values()]
    options = {"num_heads": num_heads, "relu": relu, "keep_class_attention": keep_class_attention}
    record_step(model, "swap_mixer", to=to, **options)
    if original is not None and calibrate is not None:
        calibrate_mixers(model, {name: original.get_submodule(name) for name in hosts}, original, calibrate)
    return SwapReport(
        replaced={name: type(host).__name__ for name, (host, _) in hosts.items()},
        dropped=sorted(before - {name for name, _ in model.named_parameters()}),
        activations=_replace_gelu(model) if relu else [],
        notes=[adapter.note for adapter in ADAPTERS.values() if adapter in used and adapter.note],
    )


def _swap_body(
    model: nn.Module,
    blocks: Mapping[str, Any],
    to: str,
    where: Sequence[str] | None,
    mixer_kwargs: Mapping[str, Any] | None,
    calibrate: Images | None,
) -> SwapReport:
    """Replace the softmax attention of a body's blocks by a registered mixer."""
    names = list(blocks) if where is None else list(where)
    if unknown := [name for name in names if name not in blocks]:
        raise ValueError(f"where={unknown[0]!r} is no softmax attention of this body: choose from {', '.join(blocks)}")
    options = dict(mixer_kwargs or {})
    mixers = {name: create_replacement(blocks[name].mixer, to, blocks[name].site, **options) for name in names}
    original = copy.deepcopy(model) if calibrate is not None else None
    before = {name for name, _ in model.named_parameters()}
    for name, mixer in mixers.items():
        blocks[name].mixer = mixer
    record_step(model, "swap_mixer", to=to, where=where and names, mixer_kwargs=options)
    if original is not None and calibrate is not None:
        calibrate_mixers(model, {name: original.get_submodule(name) for name in names}, original, calibrate)
    dropped = sorted(before - {name for name, _ in model.named_parameters()})
    return SwapReport(dict.fromkeys(names, "SoftmaxAttention"), dropped, [], [])


def find_adapter(module: nn.Module) -> Adapter | None:
    """The adapter of a module, or None if `swap_mixer` cannot replace it."""
    if tokamix_host.is_replaceable(module):
        return tokamix_host.ATTEND_ADAPTER
    return ADAPTERS.get(type(module))  # the exact class: a subclass may compute something else


def _check(name: str, host: Any, adapter: Adapter, num_heads: int) -> None:
    """Raise ValueError if an attention cannot be replaced."""
    width = getattr(host, adapter.output).in_features
    if num_heads < 1 or width % num_heads:
        raise ValueError(f"the {width} channels of {name} do not divide into {num_heads} heads; choose a divisor")
    if adapter.check is not None:
        adapter.check(name, host)
    if num_heads != host.num_heads and not isinstance(getattr(host, "q_norm", nn.Identity()), nn.Identity):
        raise ValueError(
            f"{name} normalises the queries of {host.num_heads} heads, so it cannot have {num_heads}; leave num_heads"
            " unset"
        )
    if any(isinstance(child, ContextBroadcast) for child in host.children()):
        raise ValueError(f"{name} has context broadcasting, which would be lost; swap first, then insert it")


def _replace_gelu(model: nn.Module) -> list[str]:
    """Replace every GELU, module or function, by ReLU and return their names."""
    names = [name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, GELUS)]
    for name in names:
        model.set_submodule(name, nn.ReLU())
    for name, module in model.named_modules():
        if getattr(module, "activation", None) is F.gelu:  # nn.TransformerEncoderLayer and its decoder
            module.activation = F.relu
            names.append(f"{name}.activation")
    return names
