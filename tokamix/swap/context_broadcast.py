"""Insert context broadcasting into an existing model, and remove it again."""

from typing import Any

from timm.layers import register_notrace_module
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from tokamix._construction import forget_steps, record_step
from tokamix.mixers import SimA
from tokamix.mixers.context_broadcast import KINDS, ContextBroadcast
from tokamix.swap import hf, torchvision
from tokamix.swap import timm as timm_host
from tokamix.swap import tokamix as tokamix_host
from tokamix.swap import torch as torch_host
from tokamix.swap._host import AFTER, BEFORE, BlockLayout
from tokamix.swap.attention import Swapped
from tokamix.swap.inspect import KEPT, class_path, find_adapter

# blocks whose MLP and attention receive the class token
CLASS_TOKEN = {
    "timm.models.eva.EvaBlock",
    "timm.models.eva.EvaBlockPostNorm",
    "timm.models.beit.Block",
    "timm.models.vision_transformer.ResPostBlock",
    "timm.models.vision_transformer_relpos.RelPosBlock",
    "timm.models.vision_transformer_relpos.ResPostRelPosBlock",
    "torchvision.models.vision_transformer.EncoderBlock",
}
CLASS_TOKENS = ("cls_token", "class_token", "class_embedding")  # names of parameters
BLOCKS: dict[str, BlockLayout] = {
    **timm_host.BLOCKS,
    **torch_host.BLOCKS,
    **torchvision.BLOCKS,
    **tokamix_host.BLOCKS,
}
POSITIONS = ("end", "mid", "front")
MLPS = ("mlp", "ffn", "feed_forward")  # names of the MLP of a block
PARTS = {"mlp": ("mlp",), "msa": ("msa",), "both": ("mlp", "msa")}


def insert_context_broadcast(
    model: nn.Module, kind: str = "cb", position: str = "end", block: str = "mlp", scale_init: float = 1.0
) -> list[str]:
    """Add the average token back to every token in each block of a model, in place.

    Scratching Visual Transformer's Back with Uniform Attention, arXiv 2210.08457; the kinds are those of
    `tokamix.ops.broadcast_context`. A block is a module with an attention that `swap_mixer` knows and an MLP: those of
    timm, torchvision, Hugging Face and tokamix, and nn.TransformerEncoderLayer. Text towers stay as they are. "end" is
    after the last dropout, inside the residual branch; in Hugging Face's newer ViT it is before that dropout, which
    both branches share. The mean is over all tokens of the MLP: with the class token where there is one (but not in
    LocalViT, whose MLPs do not receive it), over the whole map in Swin (but over each window for the attention of SAM),
    with padding in ViLT.

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
    layouts = _find_blocks(model)
    if not layouts:
        raise ValueError(
            f"{type(model).__name__} has no blocks that insert_context_broadcast supports: it needs modules with an"
            " attention and an MLP"
        )
    if kind in ("gate", "hybrid") and not (
        all(layout.class_token for _, layout in layouts.values())
        and any(name.endswith(CLASS_TOKENS) for name, _ in model.named_parameters())
    ):
        raise ValueError(
            f"{kind!r} multiplies by the class token, which {type(model).__name__} does not have in every block: use"
            " 'cb' or 'cbs'"
        )

    sites: dict[str, tuple[nn.Module, str, Any, bool]] = {}
    for name, (module, layout) in layouts.items():
        _check_batch_first(name, module)
        for part in PARTS[block]:
            path, side = getattr(layout, "msa" if part == "msa" else position)
            try:
                if position == "mid" and not _layers(module, path):  # the second layer has another name
                    path = next(name for name, child in module.named_modules() if child is _last_layer(module, layout))
                site = module.get_submodule(path)
                if part == "msa":
                    layer, channels_first = _attention_output(module, path)
                else:
                    layer = _layers(module, path)[0] if position == "mid" else _last_layer(module, layout)
                    channels_first = isinstance(layer, nn.Conv2d)
                while isinstance(site, nn.Sequential):  # it would run a child that is added to it
                    child = list(site._modules)[0 if side == BEFORE else -1]
                    path, site = f"{path}.{child}", site.get_submodule(child)
            except (AttributeError, IndexError, StopIteration):
                raise ValueError(
                    f"position {position!r} does not exist in {name} ({type(module).__name__}): {path} is missing"
                ) from None
            present = getattr(site, side, None)
            if present is not None and present.kind != kind:
                raise ValueError(
                    f"{name}.{path} already has {present.kind!r}: call remove_context_broadcast before {kind!r}"
                )
            sites[f"{name}.{path}".lstrip(".")] = (site, side, layer, channels_first)

    new = [site for site in sites.values() if not hasattr(*site[:2])]
    broadcasts = [_create(layer, position, kind, scale_init) for _, _, layer, _ in new]
    for (site, side, _, channels_first), broadcast in zip(new, broadcasts, strict=True):
        broadcast.channels_first = channels_first
        broadcast.training = site.training
        site.add_module(side, broadcast)
        hook = site.register_forward_pre_hook(_before) if side == BEFORE else site.register_forward_hook(_after)
        broadcast.handle = hook
    if new:
        options = {"kind": kind, "position": position, "block": block, "scale_init": scale_init}
        record_step(model, "insert_context_broadcast", **options)
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


def _create(layer: Any, position: str, kind: str, scale_init: float) -> "InsertedBroadcast":
    """Context broadcasting of the tokens before a layer ("mid"), or after it."""
    outputs, inputs = layer.weight.shape[:2]
    dd = {"device": layer.weight.device, "dtype": layer.weight.dtype}
    return InsertedBroadcast(inputs if position == "mid" else outputs, kind, scale_init, **dd)


@register_notrace_module
class InsertedBroadcast(ContextBroadcast):
    """Context broadcasting as the child of a module; a hook applies it to that module's input or output."""

    handle: RemovableHandle
    channels_first = False

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C), a map (B, H, W, C), or (B, C, H, W) with `channels_first`."""
        if self.channels_first and x.ndim == 4:
            return super().forward(x.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(x.shape)
        return super().forward(x.flatten(1, -2)).reshape(x.shape)


# the hooks are module-level functions, so that models with hooks can be copied and pickled


def _before(site: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return site.get_submodule(BEFORE)(args[0]), *args[1:]


def _after(site: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    broadcast = site.get_submodule(AFTER)
    # attentions of PyTorch and Hugging Face also return their weights
    return (broadcast(output[0]), *output[1:]) if isinstance(output, tuple) else broadcast(output)


def _find_blocks(model: nn.Module) -> dict[str, tuple[nn.Module, BlockLayout]]:
    """The blocks of a model: those of the tables, then the innermost modules with an attention and an MLP."""
    blocks: dict[str, tuple[nn.Module, BlockLayout]] = {}
    for name, module in reversed(list(model.named_modules())):  # children before their parents
        path = class_path(type(module))
        layout = BLOCKS.get(path) or hf.find_layout(path, module)
        prefix = f"{name}." if name else ""
        if layout is None and not any(inner.startswith(prefix) for inner in blocks):
            layout = _guess_layout(module)
        if layout is not None:
            blocks[name] = (module, layout)
    return {name: block for name, block in reversed(blocks.items()) if not _is_kept(name, block[0])}


def _is_kept(name: str, block: nn.Module) -> bool:
    """Whether `swap_mixer` keeps the attention of a block, as in text towers, whose later tokens must not be seen."""
    for inner, module in block.named_modules():
        kind: Any = type(module)
        adapter = module.adapter if isinstance(module, Swapped) else find_adapter(kind)
        if adapter is not None and adapter.keep is not None and adapter.keep(f"{name}.{inner}".lstrip(".")):
            return True
    return False


def _check_batch_first(name: str, block: nn.Module) -> None:
    for module in block.modules():
        if isinstance(module, nn.MultiheadAttention) and not module.batch_first:
            raise ValueError(
                f"{name or type(block).__name__} has nn.MultiheadAttention with the batch second, where the mean would"
                " be over the images; build the model with batch_first=True"
            )


def _guess_layout(module: nn.Module) -> BlockLayout | None:
    """The layout of a module with an attention and an MLP, or None."""
    mlp = next((name for name in MLPS if isinstance(getattr(module, name, None), nn.Module)), None)
    if mlp is None or not any(True for _ in module.get_submodule(mlp).parameters()):
        return None
    attention = next((name for name, child in module.named_children() if name != mlp and _has_attention(child)), None)
    if attention is None:
        return None
    windows = any(_adapts_windows(child) for child in module.get_submodule(attention).modules())
    msa = ("drop_path1", BEFORE) if windows else (attention, AFTER)  # outside the windows
    path = class_path(type(module))
    layers = [name for name, layer in module.get_submodule(mlp).named_modules() if _is_layer(layer)]
    second = "fc2" if "fc2" in layers or not layers else layers[-1]
    class_token = path in CLASS_TOKEN or hf.has_class_token(path)
    return BlockLayout((mlp, BEFORE), (f"{mlp}.{second}", BEFORE), (mlp, AFTER), msa, class_token)


def _has_attention(module: nn.Module) -> bool:
    return any(_is_attention(child) for child in module.modules())


def _is_attention(module: Any) -> bool:
    kind: Any = type(module)
    known = isinstance(module, Swapped | SimA) or find_adapter(kind) is not None or class_path(kind) in KEPT
    return known or kind.__module__.startswith("tokamix.mixers")


def _adapts_windows(module: Any) -> bool:
    kind: Any = type(module)
    adapter = module.adapter if isinstance(module, Swapped) else find_adapter(kind)
    return adapter is not None and (adapter.window or adapter.windowed is not None)


def _mlp(block: nn.Module, layout: BlockLayout) -> nn.Module:
    mlp = block.get_submodule(layout.end[0].split(".")[0])
    # the dropout of nn.TransformerEncoderLayer follows the second layer
    return mlp if any(_is_layer(layer) for layer in mlp.modules()) else block.get_submodule(layout.mid[0])


def _attention_output(block: nn.Module, path: str) -> tuple[Any, bool]:
    """The output projection of the attention at a path of a block, or of the first in it, and whether it has a map
    (B, C, H, W); else the block's last layer.
    """
    modules: list[Any] = [*block.get_submodule(path).modules(), *block.modules()]
    for module in modules:
        kind: Any = type(module)
        adapter = module.adapter if isinstance(module, Swapped) else find_adapter(kind)
        if adapter is not None and (layers := _layers(module, adapter.output)):
            by_layer = adapter.layout == "other" and isinstance(layers[-1], nn.Conv2d)
            return layers[-1], by_layer or adapter.layout == "nchw"
    last = _last_layer(block)
    return last, isinstance(last, nn.Conv2d)


def _layers(module: nn.Module, path: str) -> list[nn.Module]:
    """The Linear layers and convolutions of a submodule; none if it does not exist."""
    try:
        children = module.get_submodule(path).modules()
    except AttributeError:
        return []
    return [child for child in children if _is_layer(child)]


def _is_layer(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear | nn.Conv2d)


def _last_layer(block: nn.Module, layout: BlockLayout | None = None) -> Any:
    """The last Linear or convolution of a block, or of its MLP, whose width is that of the tokens."""
    module = block if layout is None else _mlp(block, layout)
    return [child for child in module.modules() if _is_layer(child)][-1]
