"""Insert context broadcasting into an existing model, and remove it again."""

from typing import Any

from timm.layers import register_notrace_module
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tokamix._construction import forget_steps, record_step
from tokamix.mixers.context_broadcast import KINDS, ContextBroadcast
from tokamix.swap import hf
from tokamix.swap import timm as timm_host
from tokamix.swap import tokamix as tokamix_host
from tokamix.swap._host import AFTER, BEFORE, BlockLayout

POSITIONS = ("end", "mid", "front")
PARTS = {"mlp": ("mlp",), "msa": ("msa",), "both": ("mlp", "msa")}


def insert_context_broadcast(
    model: nn.Module, kind: str = "cb", position: str = "end", block: str = "mlp", scale_init: float = 1.0
) -> list[str]:
    """Add the average token back to every token in each block of a model, in place.

    Scratching Visual Transformer's Back with Uniform Attention, arXiv 2210.08457; the kinds are those of
    `tokamix.ops.broadcast_context`. It supports timm's ViT, DeiT (also distilled), PiT, PVTv2, Swin and Twins,
    tokamix's PVT and LocalViT, and Hugging Face's ViT and ViLT. "end" is after the last dropout, inside the residual
    branch; in Hugging Face's newer ViT it is before that dropout, which both branches share. The mean is over all
    tokens of the MLP: with the class token where there is one (but not in LocalViT, whose MLPs do not receive it), over
    the whole map in Swin, with padding in ViLT.

    Parameters keep their names; "cbs" adds its scales. A second call changes nothing, and `remove_context_broadcast`
    undoes it.

    Args:
        model: the network, changed in place.
        kind: "cb", "cbs" (a learned scale of the mean per channel), "gate" or "hybrid" (both need a class token).
        position: "end", "mid" (before the second layer) or "front" of the MLP; attention has only the end.
        block: "mlp", "msa" or "both".
        scale_init: initial value of the scales of "cbs".

    Returns:
        Names of the modules before or after which it was inserted.

    Raises:
        ValueError: if the model has no supported blocks, the position does not exist in them, the kind needs a class
            token that is missing, or another kind is already inserted. The model is unchanged then.
    """
    for value, possible, what in ((kind, KINDS, "kind"), (position, POSITIONS, "position"), (block, PARTS, "block")):
        if value not in possible:
            raise ValueError(f"unknown {what} {value!r} of context broadcasting: choose one of {', '.join(possible)}")
    if position != "end" and block != "mlp":
        raise ValueError(f"attention has no position {position!r}, only 'end': use block='mlp'")
    layouts = {name: (module, layout) for name, module in model.named_modules() if (layout := _find_layout(module))}
    if not layouts:
        raise ValueError(
            f"{type(model).__name__} has no blocks that insert_context_broadcast supports: it needs timm's ViT, DeiT,"
            " PiT, PVTv2, Swin or Twins, tokamix's PVT or LocalViT, or Hugging Face's ViT or ViLT"
        )
    if kind in ("gate", "hybrid") and not (
        all(layout.class_token for _, layout in layouts.values())
        and any(name.endswith("cls_token") for name, _ in model.named_parameters())
    ):
        raise ValueError(
            f"{kind!r} multiplies by the class token, which {type(model).__name__} does not have in every block: use"
            " 'cb' or 'cbs'"
        )

    sites: dict[str, tuple[nn.Module, str, Any]] = {}
    for name, (module, layout) in layouts.items():
        for part in PARTS[block]:
            path, side = getattr(layout, "msa" if part == "msa" else position)
            try:
                site, linear = module.get_submodule(path), module.get_submodule(layout.mid[0])
            except AttributeError:
                raise ValueError(
                    f"position {position!r} does not exist in {name} ({type(module).__name__}): {path} is missing"
                ) from None
            present = getattr(site, side, None)
            if present is not None and present.kind != kind:
                raise ValueError(
                    f"{name}.{path} already has {present.kind!r}: call remove_context_broadcast before {kind!r}"
                )
            sites[f"{name}.{path}".lstrip(".")] = (site, side, linear)

    if not all(hasattr(site, side) for site, side, _ in sites.values()):
        options = {"kind": kind, "position": position, "block": block, "scale_init": scale_init}
        record_step(model, "insert_context_broadcast", **options)
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
    """Remove what `insert_context_broadcast` inserted, and return the names of the modules it was attached to."""
    removed = []
    for name, site in model.named_modules():
        for side, child in list(site.named_children()):
            if isinstance(child, InsertedBroadcast):
                child.handle.remove()
                delattr(site, side)
                removed.append(name)
    # a registered model such as deit_small_cb has it without a recorded step
    if removed and not forget_steps(model, "insert_context_broadcast"):
        record_step(model, "remove_context_broadcast")
    return removed


@register_notrace_module
class InsertedBroadcast(ContextBroadcast):
    """Context broadcasting as the child of a module; a hook applies it to that module's input or output."""

    handle: RemovableHandle

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C), or a map (B, H, W, C)."""
        return super().forward(x.flatten(1, -2)).reshape(x.shape)


# the hooks are module-level functions, so that models with hooks can be copied and pickled


def _before(site: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return site.get_submodule(BEFORE)(args[0]), *args[1:]


def _after(site: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return site.get_submodule(AFTER)(output)


def _find_layout(module: nn.Module) -> BlockLayout | None:
    name = f"{type(module).__module__}.{type(module).__qualname__}"
    return timm_host.BLOCKS.get(name) or tokamix_host.BLOCKS.get(name) or hf.find_layout(name, module)
