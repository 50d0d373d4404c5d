"""Replace the attention of an existing model by another mixer."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from tokamix._construction import describe, read_record, record_step
from tokamix.mixers import Site
from tokamix.mixers.context_broadcast import ContextBroadcast
from tokamix.mixers.registry import create_mixer, get_mixer
from tokamix.mixers.weight_mixing import WeightMixing
from tokamix.swap._host import Adapter
from tokamix.swap.activations import remaining_exp, replace_activations
from tokamix.swap.attention import ImageSize, find_window, remember_image_size, swap, token_grid
from tokamix.swap.bank import carry_bias
from tokamix.swap.bodies import create_replacement, find_body_blocks
from tokamix.swap.calibrate import Images, calibrate_mixers, check_images, describe_unfitted
from tokamix.swap.inspect import (
    Shapes,
    class_path,
    find_attentions,
    nominal_size,
    record_shapes,
    unchanged_on_error,
)
from tokamix.swap.options import check_heads, check_kwargs, check_size, check_where
from tokamix.swap.product import create_product
from tokamix.swap.report import Cost, SwapReport

# their parameters do not depend on widths or grids, and they accept any number of keys: no shapes need be known
SHAPELESS = ("sima", "softmax", "efficient", "nystrom")
# modules that compute a position bias outside of the attention
SHARED_POSITION = ("shared_rel_pos", "rel_pos_bias", "relative_position_bias", "shared_position_bias")
CLASS_TOKENS = ("cls_token", "class_token", "cls_token_0")  # names of parameters; CrossViT has one in each branch
# patch embeddings that see the image, but no convolution in them does
EMBEDS = ("timm.models.naflexvit.NaFlexEmbeds", "timm.models.tnt.PixelEmbed")
WHERE = ("global", "every_other")
Hosts = dict[str, tuple[Any, Adapter]]


def swap_mixer(
    model: nn.Module,
    to: str = "sima",
    num_heads: int | None = None,
    relu: bool = False,
    keep_class_attention: bool = False,
    where: str | Sequence[str | int] | None = None,
    partial: bool = False,
    mixer_kwargs: Mapping[str, Any] | None = None,
    image_size: int | tuple[int, int] | None = None,
    calibrate: Images | None = None,
) -> SwapReport:
    """Replace the attention of a model by another mixer, in place; projections keep their weights and names.

    It knows the attentions of timm, of torchvision's and Hugging Face's vision models, of tokamix, and
    nn.MultiheadAttention in any model. The outputs of a pretrained network change: fine-tune it, or use
    `tokamix convert`. Attention dropout is dropped. Load a host's checkpoint before the swap, or with strict=False.

    Mixers with queries, keys and values (softmax, xca, sima, linformer, performer, nystrom, efficient, cosformer,
    super_token) use the host's projections, q/k norms, rotary embeddings and gates. The others (active_token,
    weight_mixing, soft) have their own and keep the host's output projection; pooling and identity have none. Position
    biases of softmax are dropped, except for to="softmax"; weight_mixing starts from a relative one: its mixing weights
    are softmax(bias).

    Prefix tokens (class, distillation, register): mixers of sets of tokens treat them like all others. Mixers on a grid
    mix the patch tokens; prefix tokens then attend to all tokens with the host's queries and keys, or, for mixers
    without queries, receive the mean of the mixed patch tokens.

    Args:
        model: the network, changed in place.
        to: name of a registered mixer; `tokamix.mixers.list_mixers()` returns all.
        num_heads: heads of every attention, 1 for SimA's single-head form; None keeps the host's number.
        relu: also replace every GELU and SiLU by ReLU, so that inference with SimA needs no exponential.
        keep_class_attention: keep attention whose queries are a class token or learned (CaiT, XCiT, attention pools).
        where: the attentions to replace: names of them or of modules that contain them, or indices; "global", those
            that are not in windows; "every_other", the first, third and so on. None for all.
        partial: replace what can be replaced and keep the rest; otherwise nothing is changed if an attention cannot be.
        mixer_kwargs: options of the mixer's class.
        image_size: size of the images, (height, width) or a side: the cost before and after the swap is counted for
            it, and parameters that depend on the grid of tokens fit it. Default: the model's own, without the cost.
        calibrate: a few normalised images (B, C, H, W), or batches of them, on which the new mixers are fitted to the
            attention they replace, in closed form and without new parameters; see `tokamix.swap.calibrate`.

    Raises:
        ValueError: if the mixer or an option is unknown, or an attention cannot be replaced. The model is unchanged.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"swap_mixer changes a model, not {model!r}; create it first, with tokamix.create_model(name)")
    get_mixer(to)
    options, where, size = check_kwargs(mixer_kwargs), check_where(where), check_size(image_size)
    check_heads(num_heads)
    original = copy.deepcopy(model) if calibrate is not None else None
    if original is not None and calibrate is not None:
        calibrate = check_images(original, calibrate)
    with unchanged_on_error(model, original):
        if blocks := find_body_blocks(model):
            report, arguments = _swap_body(model, blocks, to, num_heads, where, options, size)
        else:
            report, arguments = _swap_hosts(model, to, num_heads, keep_class_attention, where, partial, options, size)
        if relu:
            report.activations = replace_activations(model)
            report.notes += remaining_exp(model, size or nominal_size(model))
            arguments["relu"] = True
        if original is not None and calibrate is not None:
            hosts = {name: original.get_submodule(name) for name in report.replaced}
            report.notes += describe_unfitted(model, hosts)
            calibrate_mixers(model, hosts, original, calibrate)
        report.after = _count_cost(model, size, f" with {to}")
        record_step(model, "swap_mixer", to=to, **{key: value for key, value in arguments.items() if value})
    return report


def _swap_hosts(
    model: nn.Module,
    to: str,
    num_heads: int | None,
    keep_class_attention: bool,
    where: str | list[str | int] | None,
    partial: bool,
    options: dict[str, Any],
    size: tuple[int, int] | None,
) -> tuple[SwapReport, dict[str, Any]]:
    """Replace the attention of other libraries' models; returns the report and the arguments to record."""
    hosts, kept, unknown = find_attentions(model)
    if not hosts:
        _raise_nothing_found(model, {**kept, **unknown})
    chosen, kept_by_choice = _choose(hosts, where, keep_class_attention)
    run_size = size or nominal_size(model)
    shapes: dict[str, Shapes] = {}
    if size or to not in SHAPELESS:
        compute = to == "weight_mixing" and any(adapter.relative for _, adapter in chosen.values())
        shapes, reason = record_shapes(model, chosen, run_size, compute)
        if not shapes and to not in SHAPELESS and _first_conv(model) is not None:
            raise ValueError(
                f"{type(model).__name__} did not run on an image of {run_size[0]}x{run_size[1]}, so that the shapes of"
                f" its tokens, which {to} needs, are unknown; give image_size, the size of its images, or use"
                f" {', '.join(SHAPELESS)} if it needs more than an image ({reason})"
            )
    mixers: dict[str, nn.Module] = {}
    grids: dict[str, tuple[int, int] | None] = {}
    impossible: dict[str, str] = dict(unknown) if where is None else {}
    for index, (name, (host, adapter)) in enumerate(chosen.items()):
        try:
            prefix = _prefix(model, name, adapter)
            grids[name] = _nominal_grid(host, adapter, shapes.get(name), prefix, run_size)
            mixers[name] = _create(to, name, host, adapter, shapes.get(name), grids[name], num_heads, index, options)
        except Impossible as error:
            impossible[name] = str(error)
    if not mixers or (impossible and not partial):
        name, reason = next(iter(impossible.items()))
        raise ValueError(
            f"{len(impossible)} attentions cannot become {to}, such as {name or type(model).__name__}: {reason};"
            + (" partial=True keeps them and replaces the others" if mixers else " choose another mixer")
        )

    report = SwapReport(to, {name: type(chosen[name][0]).__name__ for name in mixers})
    report.kept = {**kept_by_choice, **kept, **unknown, **impossible}
    report.before = _count_cost(model, size)
    before = {name: tensor.numel() for name, tensor in model.state_dict(keep_vars=True).items()}
    report.carried = [
        name for name, mixer in mixers.items() if _carry_bias(mixer, chosen[name][1], shapes.get(name), grids[name])
    ]
    source = _watch_image_size(model)
    for name, mixer in mixers.items():
        host, adapter = chosen[name]
        if adapter.convert is None or not adapter.convert(host, mixer):
            swap(host, adapter, mixer, source, _prefix(model, name, adapter))
    if not report.kept:
        _drop_shared_position(model, to)
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False  # nested tensors of padded batches support softmax attention only
    after = {name: tensor.numel() for name, tensor in model.state_dict(keep_vars=True).items()}
    report.dropped = sorted(before.keys() - after.keys())
    report.added = {name: after[name] for name in sorted(after.keys() - before.keys())}
    used = [chosen[name][1] for name in mixers if name not in report.carried]
    used = used if to != "softmax" else [adapter for adapter in used if adapter.lost is not None]
    report.notes = list(dict.fromkeys(adapter.note for adapter in used if adapter.note))
    return report, {
        **{"num_heads": num_heads, "keep_class_attention": keep_class_attention},
        **{"where": where, "partial": partial, "mixer_kwargs": options},
        "image_size": None if to in SHAPELESS else size,  # parameters of the others depend on the grid
    }


def _swap_body(
    model: nn.Module,
    blocks: Mapping[str, Any],
    to: str,
    num_heads: int | None,
    where: str | list[str | int] | None,
    options: dict[str, Any],
    size: tuple[int, int] | None,
) -> tuple[SwapReport, dict[str, Any]]:
    """Replace the softmax attention in the blocks of a body by a registered mixer, as `create_body` creates it."""
    chosen, kept = _choose({name: (block.mixer, Adapter()) for name, block in blocks.items()}, where, keep_class=False)
    mixers = {}
    for name, (host, _) in chosen.items():
        site = blocks[name].site
        mixers[name] = create_replacement(host, to, replace(site, num_heads=num_heads or site.num_heads), **options)
    report = SwapReport(to, dict.fromkeys(mixers, "SoftmaxAttention"), kept, before=_count_cost(model, size))
    before = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    for name, mixer in mixers.items():
        blocks[name].mixer = mixer
    after = {name: tensor.numel() for name, tensor in model.state_dict().items()}
    report.dropped = sorted(before.keys() - after.keys())
    report.added = {name: after[name] for name in sorted(after.keys() - before.keys())}
    return report, {"num_heads": num_heads, "where": where, "mixer_kwargs": options}


def _raise_nothing_found(model: nn.Module, left: Mapping[str, str]) -> None:
    record = read_record(model)
    reasons = [f"{name}: {reason}" for name, reason in list(left.items())[:3]]
    if any(step["function"] == "swap_mixer" for step in record["steps"]):
        reasons.insert(0, f"it was changed by {describe(record)}; swap a new model")
    raise ValueError(
        f"{type(model).__name__} has no attention that swap_mixer can replace"
        + (f" ({'; '.join(reasons)})" if reasons else "; docs/guides/swap.md lists the supported models")
    )


def _count_cost(model: nn.Module, size: tuple[int, int] | None, state: str = "") -> Cost | None:
    """The cost at an image size, if one is given."""
    if size is None:
        return None
    try:
        return Cost.of(model, size)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} does not run on an image of {size[0]}x{size[1]}{state}, so that its cost cannot be"
            f" counted; give the image_size that it takes, or none ({error})"
        ) from error


class Impossible(ValueError):
    """An attention that cannot become a mixer."""


def _choose(hosts: Hosts, where: str | Sequence[str | int] | None, keep_class: bool) -> tuple[Hosts, dict[str, str]]:
    """The attentions to replace, and names and reasons of the others."""
    names = [name for name, (_, adapter) in hosts.items() if not (keep_class and adapter.class_attention)]
    if where is None:
        selected = set(names)
    elif where == "global":
        selected = {name for name in names if not hosts[name][1].window}
    elif where == "every_other":
        selected = set(names[::2])
    elif isinstance(where, str):
        raise ValueError(f"unknown choice where={where!r}: use {', '.join(WHERE)}, or a list of names or indices")
    else:
        selected = set()
        for entry in where:
            matches = (
                names[entry : entry + 1 or None]
                if isinstance(entry, int)
                else [name for name in names if name == entry or name.startswith(f"{entry}.")]
            )
            if not matches:
                raise ValueError(
                    f"where={entry!r} matches no attention: there are {len(names)}, such as {', '.join(names[:3])}"
                )
            selected.update(matches)
    if not selected:
        raise ValueError(f"where={where!r} selects none of the {len(hosts)} attentions; choose others")
    kept = {name: "as chosen" for name in hosts if name not in selected}
    return {name: host for name, host in hosts.items() if name in selected}, kept


def _create(
    to: str,
    name: str,
    host: Any,
    adapter: Adapter,
    shapes: Shapes | None,
    grid: tuple[int, int] | None,
    num_heads: int | None,
    index: int,
    options: dict[str, Any],
) -> nn.Module:
    """The mixer for one attention; raises `Impossible` if there is none."""
    if any(isinstance(child, ContextBroadcast) for child in host.children()):
        raise ValueError(f"{name} has context broadcasting, which would be lost; swap first, then insert it")
    if adapter.check is not None:
        adapter.check(name, host)
    heads, width = _heads(host, adapter, shapes)
    number = heads if num_heads is None else num_heads
    if number < 1 or (width and width % number):
        raise ValueError(f"the {width} channels of {name} do not divide into {number} heads; choose a divisor")
    if number != heads and not isinstance(getattr(host, "q_norm", nn.Identity()), nn.Identity):
        raise ValueError(
            f"{name} normalises the queries of {heads} heads, so it cannot have {number}; leave num_heads unset"
        )
    parameter = next(host.parameters(), None)
    dd = {} if parameter is None else {"device": parameter.device, "dtype": parameter.dtype}
    # a pyramid's first stages have many tokens: windows and cells of several tokens, as in the papers' pyramids
    stage = None if grid is None or grid[0] * grid[1] <= 1024 else 0 if grid[0] * grid[1] >= 48 * 48 else 1
    site = Site(width or number, number, grid or (14, 14), stage, index)
    product = create_product(to, site, **options, **dd)
    if product is None:
        return _create_whole(to, host, adapter, shapes, grid, site, options, dd)
    if product.on_grid and not adapter.ordered:
        raise Impossible(f"its tokens are not in the order of a grid, which {to} needs")
    if shapes is not None:
        if product.on_grid and grid is None:
            raise Impossible(f"its {shapes.k[2]} tokens do not form a grid of the image, which {to} needs")
        axes = [axis for axis, same in ((2, product.square), (3, product.same_width)) if same]
        if any(not shapes.q[axis] == shapes.k[axis] == shapes.v[axis] for axis in axes):
            queries, keys, values = (tuple(shape[1:]) for shape in (shapes.q, shapes.k, shapes.v))
            raise Impossible(
                f"its queries {queries}, keys {keys} and values {values} differ in shape, which {to} does not allow"
            )
    product.num_heads = num_heads
    return product


def _create_whole(
    to: str,
    host: Any,
    adapter: Adapter,
    shapes: Shapes | None,
    grid: tuple[int, int] | None,
    site: Site,
    options: dict[str, Any],
    dd: dict[str, Any],
) -> nn.Module:
    """A mixer with its own projections in place of the whole attention."""
    if adapter.layout == "other" or not adapter.ordered or adapter.class_attention:
        raise Impossible(f"it does not map tokens of a grid to themselves, which {to} needs")
    if shapes is None or shapes.input is None:
        raise Impossible(
            f"{to} needs the grid of its tokens, which a model shows when it runs on an image; swap it in that model,"
            " with where=[its name]"
        )
    if isinstance(host, nn.MultiheadAttention) and (shapes.inputs > 1 or not host.batch_first):
        raise Impossible(f"{to} needs self-attention, one tensor as query, key and value, with the batch first")
    if shapes.output is not None and shapes.output != shapes.input:
        raise Impossible(f"it changes tokens from {tuple(shapes.input)} to {tuple(shapes.output)}, which {to} cannot")
    if grid is None:
        raise Impossible(f"its {shapes.k[2]} tokens do not form a grid of the image, which {to} needs")
    dim = shapes.input[1] if adapter.layout == "nchw" and len(shapes.input) == 4 else shapes.input[-1]
    heads = site.num_heads if dim % site.num_heads == 0 else 1
    return create_mixer(to, Site(dim, heads, site.grid, site.stage, site.index), **options, **dd)


def _carry_bias(mixer: nn.Module, adapter: Adapter, shapes: Shapes | None, grid: tuple[int, int] | None) -> bool:
    """Start weight mixing from the host's relative position bias, where it has one; whether it does."""
    if not (isinstance(mixer, WeightMixing) and adapter.relative and shapes is not None and shapes.bias is not None):
        return False
    return grid is not None and carry_bias(mixer, shapes.bias, grid)


def _heads(host: Any, adapter: Adapter, shapes: Shapes | None) -> tuple[int, int]:
    """Number of heads and channels of all heads together; 0 channels if unknown."""
    if shapes is not None:
        return shapes.q[1], shapes.q[1] * shapes.q[-1]
    heads = next((int(n) for n in (getattr(host, key, None) for key in ("num_heads", "heads", "groups")) if n), 1)
    layer = getattr(host, adapter.output, None)
    return heads, getattr(layer, "in_features", None) or getattr(layer, "in_channels", None) or 0


def _nominal_grid(
    host: Any, adapter: Adapter, shapes: Shapes | None, prefix: int, image_size: tuple[int, int]
) -> tuple[int, int] | None:
    """The grid of keys at the model's image size; None if it is unknown or there is none."""
    if shapes is None or shapes.input is None:
        return None
    if len(shapes.input) == 4 and adapter.layout in ("nchw", "nhwc"):
        size = shapes.input[2:] if adapter.layout == "nchw" else shapes.input[1:3]
        if shapes.k[2] == size[0] * size[1]:
            return size[0], size[1]
    count = max(1, shapes.k[2] - prefix)
    try:
        return token_grid(count, find_window(host, count) if adapter.window else image_size)
    except ValueError:
        return None


def _prefix(model: nn.Module, name: str, adapter: Adapter) -> int:
    """The number of prefix tokens of an attention: the adapter's, or that of the nearest module that has one."""
    if adapter.prefix is not None:
        return adapter.prefix(name, model.get_submodule(name)) if callable(adapter.prefix) else adapter.prefix
    if adapter.window or adapter.layout in ("nchw", "nhwc"):
        return 0
    parts = name.split(".")
    for end in range(len(parts), -1, -1):
        owner: Any = model.get_submodule(".".join(parts[:end]))
        if isinstance(count := getattr(owner, "num_prefix_tokens", None), int):
            return count
        for key in CLASS_TOKENS:
            if isinstance(token := getattr(owner, key, None), nn.Parameter):
                return token.shape[-2]
    return 0


def _watch_image_size(model: nn.Module) -> ImageSize:
    """Let the module that sees the image tell its size to the mixers, those of earlier swaps included.

    Without a convolution the model itself sees it.
    """
    embeds: Any = next((module for module in model.modules() if class_path(type(module)) in EMBEDS), None)
    module: Any = embeds or _first_conv(model) or model
    if not hasattr(module, "seen_size"):
        module.seen_size = ImageSize()
        module.register_forward_pre_hook(remember_image_size, with_kwargs=True)
    return module.seen_size


def _first_conv(model: nn.Module) -> Any:
    """The convolution that sees the image; None for models without one."""
    conv = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    return None if conv is None or conv.kernel_size == (1, 1) else conv


def _drop_shared_position(model: nn.Module, to: str) -> None:
    """Drop position biases that a model computes once for all blocks."""
    if to != "softmax":
        for module in model.modules():
            for name in SHARED_POSITION:
                if module._modules.get(name) is not None:
                    setattr(module, name, None)
