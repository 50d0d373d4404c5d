"""Put SimA, or context broadcasting, into a model somebody already has."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import GELU, Attention, GELUTanh, QuickGELU, register_notrace_module
from timm.models.cait import ClassAttn, TalkingHeadAttn
from timm.models.swin_transformer import WindowAttention
from timm.models.xcit import XCA
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tokamix.layers import SoftmaxProduct, merge_heads, split_heads
from tokamix.mixers.context_broadcast import KINDS, ContextBroadcast
from tokamix.mixers.sima_multihead import SimA, weigh
from tokamix.ops import sima_attention, sima_class_attention, sima_self_attention

MIXERS = ("sima",)
GELUS = (nn.GELU, GELU, GELUTanh, QuickGELU)


@dataclass
class SwapReport:
    """What `swap_mixer` did.

    Attributes:
        replaced: each attention that was replaced and the class it had, by its name in the model.
        dropped: parameters that the model no longer has.
        activations: activations that became ReLU.
        notes: what else changed with the mixer.
    """

    replaced: dict[str, str]
    dropped: list[str]
    activations: list[str]
    notes: list[str]

    def __str__(self) -> str:
        kinds = ", ".join(sorted(set(self.replaced.values())))
        lines = [f"{len(self.replaced)} mixers replaced ({kinds}): {', '.join(self.replaced)}"]
        if self.dropped:
            lines.append(f"{len(self.dropped)} parameters dropped: {', '.join(self.dropped)}")
        if self.activations:
            lines.append(f"{len(self.activations)} activations are ReLU now: {', '.join(self.activations)}")
        return "\n".join(lines + self.notes)


def swap_mixer(
    model: nn.Module,
    to: str = "sima",
    num_heads: int | None = None,
    relu: bool = False,
    keep_class_attention: bool = False,
) -> SwapReport:
    """Replace softmax and cross-covariance attention by SimA, in place; projections keep their weights and names.

    SimA: Simple Softmax-free Attention for Vision Transformers, arXiv 2206.08898. Knows the attention of timm's ViT,
    DeiT, PiT, XCiT, CaiT and Swin, of CvT, PVT and LocalViT here, and nn.MultiheadAttention wherever it stands. A
    pretrained network computes something else afterwards: fine-tune it. Attention dropout goes, for want of weights
    that could be dropped. Load a host's checkpoint before the swap, or tolerate the parameters that the report calls
    dropped.

    Args:
        model: the network, changed in place.
        to: the mixer; "sima".
        num_heads: heads of every attention, 1 for the paper's single-head form; None keeps each host's.
        relu: every GELU becomes ReLU as well, so that inference needs no exponential.
        keep_class_attention: leave the class attention of CaiT and XCiT as it is. SimA's authors replace it too.

    Raises:
        ValueError: if the mixer is unknown, nothing can be replaced, or an attention cannot take that many heads. The
            model is unchanged then.
    """
    if to not in MIXERS:
        raise ValueError(f"unknown mixer {to!r}: with a host's own projections swap_mixer can use {', '.join(MIXERS)}")
    hosts: dict[str, Any] = {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if name and _form(module) and not (keep_class_attention and type(module) is ClassAttn)
    }
    if not hosts:
        known = ", ".join(sorted(host.__name__ for host in FORMS))
        raise ValueError(
            f"{type(model).__name__} has no attention left that swap_mixer knows ({known}, and those of CvT and PVT)"
        )
    heads = {name: host.num_heads if num_heads is None else num_heads for name, host in hosts.items()}
    for name, host in hosts.items():
        _check_host(name, host, heads[name])

    before = {name for name, _ in model.named_parameters()}
    for name, host in hosts.items():
        module = _form(host)(host, heads[name])  # type: ignore[misc]
        module.training = host.training
        model.set_submodule(name, module)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # in eval mode padded batches would become nested ones
    return SwapReport(
        replaced={name: type(host).__name__ for name, host in hosts.items()},
        dropped=sorted(before - {name for name, _ in model.named_parameters()}),
        activations=_use_relu(model) if relu else [],
        notes=[NOTES[kind] for kind in NOTES if any(type(host) is kind for host in hosts.values())],
    )


# operators look at shapes, so what calls them is a leaf to symbolic tracing (timm's feature extraction by torch.fx)


@register_notrace_module
class QKVSimA(nn.Module):
    """SimA between the layers of a host that projects to queries, keys and values at once."""

    def __init__(self, host: Any, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj, self.proj_drop = host.qkv, host.proj, host.proj_drop
        # what timm's Attention may have besides
        self.q_norm: nn.Module = getattr(host, "q_norm", nn.Identity())
        self.k_norm: nn.Module = getattr(host, "k_norm", nn.Identity())
        self.norm: nn.Module = getattr(host, "norm", nn.Identity())
        self.gate: nn.Module | None = getattr(host, "gate", None)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Mix tokens x (B, N, C) or (B, H, W, C); pairs that a mask forbids (False, or negative) weigh nothing."""
        if is_causal:
            raise ValueError("SimA normalises over all tokens, the future ones among them, so it has no causal form")
        qkv = self.qkv(x.flatten(1, -2)).unflatten(-1, (3, self.num_heads, -1))  # (B, N, 3, H, D)
        if not isinstance(self.q_norm, nn.Identity):
            q, k, v = qkv.unbind(2)
            qkv = torch.stack([self.q_norm(q), self.k_norm(k), v], dim=2)
        if attn_mask is None:
            out = sima_self_attention(qkv)
        else:
            q, k, v = qkv.transpose(1, 3).unbind(2)  # (B, H, N, D)
            forbidden = attn_mask < 0 if attn_mask.is_floating_point() else ~attn_mask
            out = merge_heads(weigh(q, k, v, forbidden)[0])
        out = self.norm(out).reshape(*x.shape[:-1], -1)
        out = out if self.gate is None else out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


class WindowSimA(QKVSimA):
    """`QKVSimA` in the windows of Swin."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Mix the tokens x (B * windows, N, C) of each window; `mask` (windows, N, N) is negative across borders."""
        if mask is not None:
            mask = mask.repeat(x.shape[0] // mask.shape[0], 1, 1).unsqueeze(1)
        return super().forward(x, mask)

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Called by timm when the image size changes: nothing here depends on the window."""


@register_notrace_module
class ClassSimA(nn.Module):
    """SimA between the layers of timm's class attention, as the authors of SimA have it in XCiT.

    Queries and keys are normalised over all tokens with eps 1e-6, so every token gets a query though one attends.
    """

    def __init__(self, host: Any, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.proj, self.proj_drop = host.q, host.k, host.v, host.proj, host.proj_drop

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1 + N, C) -> the new class token (B, 1, C)."""
        q, k, v = (split_heads(layer(x), self.num_heads) for layer in (self.q, self.k, self.v))
        return self.proj_drop(self.proj(merge_heads(sima_class_attention(q, k, v, eps=1e-6))))


@register_notrace_module
class SimAProduct(nn.Module):
    """SimA in the place that CvT and PVT leave between their projections."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, H, Nq, D), k and v (B, H, Nk, D) -> (B, H, Nq, D); queries and keys have norms of their own."""
        return sima_attention(q, k, v)


def _attend_by_sima(host: Any, num_heads: int) -> nn.Module:
    host.num_heads, host.attend = num_heads, SimAProduct()
    return host


def _multihead(host: nn.MultiheadAttention, num_heads: int) -> SimA:
    module = SimA(
        host.embed_dim,
        num_heads,
        host.dropout,
        bias=host.in_proj_bias is not None,
        kdim=host.kdim,
        vdim=host.vdim,
        batch_first=host.batch_first,
        device="meta",
    )
    for name, parameter in host.named_parameters(recurse=False):
        setattr(module, name, parameter)
    module.out_proj = host.out_proj
    return module


Form = Callable[[Any, int], nn.Module]
FORMS: dict[type[nn.Module], Form] = {
    Attention: QKVSimA,
    XCA: QKVSimA,
    TalkingHeadAttn: QKVSimA,
    WindowAttention: WindowSimA,
    ClassAttn: ClassSimA,
    nn.MultiheadAttention: _multihead,
}
NOTES: dict[type[nn.Module], str] = {
    XCA: "cross-covariance attention: its temperatures are gone, and tokens mix instead of channels",
    TalkingHeadAttn: "talking heads (proj_l, proj_w) are gone: SimA forms no weights that they could mix",
    WindowAttention: "windows are the token sets: each is normalised on its own; the relative position bias is gone,"
    " and pairs that the shift forbids weigh nothing",
    ClassAttn: "class attention normalises over all tokens, so every token gets a query",
}


def _form(module: nn.Module) -> Form | None:
    # exact classes: a subclass may compute something else
    if isinstance(getattr(module, "attend", None), SoftmaxProduct):
        return _attend_by_sima
    return FORMS.get(type(module))


def _check_host(name: str, host: Any, num_heads: int) -> None:
    """Refuse what cannot be swapped, before anything is."""
    width = (host.out_proj if isinstance(host, nn.MultiheadAttention) else host.proj).in_features
    if num_heads < 1 or width % num_heads:
        raise ValueError(f"the {width} channels of {name} do not divide into {num_heads} heads; choose a divisor")
    if isinstance(host, nn.MultiheadAttention) and (host.bias_k is not None or host.add_zero_attn):
        raise ValueError(f"{name} adds a token to keys and values (add_bias_kv, add_zero_attn), which SimA cannot")
    if num_heads != host.num_heads and not isinstance(getattr(host, "q_norm", nn.Identity()), nn.Identity):
        raise ValueError(f"{name} normalises the queries of {host.num_heads} heads, so it cannot have {num_heads}")
    if any(isinstance(child, ContextBroadcast) for child in host.children()):
        raise ValueError(f"{name} carries context broadcasting, which would be lost: swap first, then insert it")


def _use_relu(model: nn.Module) -> list[str]:
    """Replace every GELU, module or function, and return their names."""
    names = [name for name, module in model.named_modules(remove_duplicate=False) if isinstance(module, GELUS)]
    for name in names:
        model.set_submodule(name, nn.ReLU())
    for name, module in model.named_modules():
        if getattr(module, "activation", None) is F.gelu:  # nn.TransformerEncoderLayer and its decoder
            module.activation = F.relu
            names.append(f"{name}.activation")
    return names


BEFORE, AFTER = "broadcast_before", "broadcast_after"  # names of the modules that context broadcasting adds
Site = tuple[str, str]


@dataclass(frozen=True)
class BlockPlan:
    """Where the parts of a block are: submodules, and whether context broadcasting stands before or after them."""

    front: Site = ("mlp", BEFORE)
    mid: Site = ("mlp.fc2", BEFORE)
    end: Site = ("mlp", AFTER)
    msa: Site = ("attn", AFTER)
    class_token: bool = False  # whether every MLP and attention gets the class token, if there is one


PLAIN = BlockPlan()
HUGGING_FACE = BlockPlan(msa=("attention.o_proj", AFTER), class_token=True)
HUGGING_FACE_SPLIT = BlockPlan(
    ("intermediate", BEFORE), ("output.dense", BEFORE), ("output.dropout", AFTER), ("attention.output", AFTER), True
)
# by name, so that neither models nor transformers need to be imported
BLOCKS = {
    "timm.models.vision_transformer.Block": replace(PLAIN, class_token=True),  # also DeiT's and PiT's
    "timm.models.pvt_v2.Block": PLAIN,
    "timm.models.twins.Block": PLAIN,
    "timm.models.swin_transformer.SwinTransformerBlock": replace(PLAIN, msa=("drop_path1", BEFORE)),  # not in windows
    "tokamix.models.pvt.Block": PLAIN,
    "tokamix.models.localvit.Block": PLAIN,
    "transformers.models.vit.modeling_vit.ViTLayer": HUGGING_FACE,
    "transformers.models.vilt.modeling_vilt.ViltLayer": HUGGING_FACE_SPLIT,
}
POSITIONS = ("end", "mid", "front")
PARTS = {"mlp": ("mlp",), "msa": ("msa",), "both": ("mlp", "msa")}


def insert_context_broadcast(
    model: nn.Module, kind: str = "cb", position: str = "end", block: str = "mlp", scale_init: float = 1.0
) -> list[str]:
    """Add the average token back to every token in each block of a model, in place.

    Scratching Visual Transformer's Back with Uniform Attention, arXiv 2210.08457; the kinds are those of
    `tokamix.ops.broadcast_context`. Knows timm's ViT, DeiT (distilled too), PiT, PVTv2, Swin and Twins, the PVT and
    LocalViT of this library, and Hugging Face's ViT and ViLT. The end is after the last dropout, inside the residual
    branch; in Hugging Face's newer ViT it is before it, because one dropout serves both branches. The mean runs over
    all the tokens that pass: the class token where there is one (LocalViT's passes by its MLPs), the whole map in Swin,
    padding in ViLT.

    A model keeps its parameters' names; "cbs" adds its scales. Doing it twice is doing it once, and
    `remove_context_broadcast` undoes it.

    Args:
        model: the network, changed in place.
        kind: "cb", "cbs" (a learned scale of the mean per channel), "gate" or "hybrid" (both need a class token).
        position: "end", "mid" (before the second layer) or "front" of the MLP; attention has the end alone.
        block: "mlp", "msa" or "both".
        scale_init: what the scales of "cbs" start at.

    Returns:
        Names of the modules it stands before or after.

    Raises:
        ValueError: if the model has no known blocks, the position does not exist in them, there is no class token for
            the kind, or another kind stands there. The model is unchanged then.
    """
    for given, possible, what in ((kind, KINDS, "kind"), (position, POSITIONS, "position"), (block, PARTS, "block")):
        if given not in possible:
            raise ValueError(f"unknown {what} {given!r} of context broadcasting: choose one of {', '.join(possible)}")
    if position != "end" and block != "mlp":
        raise ValueError(f"there is no {position!r} in attention, which has the end alone: use block='mlp'")
    plans = {name: (module, plan) for name, module in model.named_modules() if (plan := _plan(module))}
    if not plans:
        raise ValueError(
            f"{type(model).__name__} has no blocks that insert_context_broadcast knows: it needs timm's ViT, DeiT, PiT,"
            " PVTv2, Swin or Twins, tokamix's PVT or LocalViT, or Hugging Face's ViT or ViLT"
        )
    if kind in ("gate", "hybrid") and not (
        all(plan.class_token for _, plan in plans.values())
        and any(name.endswith("cls_token") for name, _ in model.named_parameters())
    ):
        raise ValueError(
            f"{kind!r} multiplies by the class token, which {type(model).__name__} does not have in every block: use"
            " 'cb' or 'cbs'"
        )

    sites: dict[str, tuple[nn.Module, str, Any]] = {}
    for name, (module, plan) in plans.items():
        for part in PARTS[block]:
            path, side = getattr(plan, "msa" if part == "msa" else position)
            try:
                site, linear = module.get_submodule(path), module.get_submodule(plan.mid[0])
            except AttributeError:
                raise ValueError(
                    f"position {position!r} does not exist in {name} ({type(module).__name__}): {path} is missing"
                ) from None
            present = getattr(site, side, None)
            if present is not None and present.kind != kind:
                raise ValueError(
                    f"{name}.{path} has {present.kind!r} already: call remove_context_broadcast before {kind!r}"
                )
            sites[f"{name}.{path}".lstrip(".")] = (site, side, linear)

    for site, side, linear in sites.values():
        if not hasattr(site, side):
            dim = linear.in_features if position == "mid" else linear.out_features
            dd = {"device": linear.weight.device, "dtype": linear.weight.dtype}
            broadcast = InsertedBroadcast(dim, kind, scale_init, **dd)
            broadcast.training = site.training
            site.add_module(side, broadcast)
            hook = site.register_forward_pre_hook(_before) if side == BEFORE else site.register_forward_hook(_after)
            broadcast.handle = hook
    return list(sites)


def remove_context_broadcast(model: nn.Module) -> list[str]:
    """Take out what `insert_context_broadcast` put in, and return the names of the modules it stood at."""
    removed = []
    for name, site in model.named_modules():
        for side, child in list(site.named_children()):
            if isinstance(child, InsertedBroadcast):
                child.handle.remove()
                delattr(site, side)
                removed.append(name)
    return removed


@register_notrace_module
class InsertedBroadcast(ContextBroadcast):
    """Context broadcasting as the child of a module, before or after which a hook calls it."""

    handle: RemovableHandle

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C), or a map (B, H, W, C)."""
        return super().forward(x.flatten(1, -2)).reshape(x.shape)


# hooks are functions of this module, so that models that carry them can be copied and pickled


def _before(site: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return site.get_submodule(BEFORE)(args[0]), *args[1:]


def _after(site: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return site.get_submodule(AFTER)(output)


def _plan(module: nn.Module) -> BlockPlan | None:
    plan = BLOCKS.get(f"{type(module).__module__}.{type(module).__qualname__}")
    if plan is HUGGING_FACE and hasattr(module, "intermediate"):  # as transformers had it before version 5
        return HUGGING_FACE_SPLIT
    return plan
