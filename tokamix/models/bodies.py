"""Bodies: networks that differ only in their token mixer, for fair comparisons.

`create_body(body, mixer)` puts any registered mixer into a column (DeiT's sizes, average pooling, no class token) or a
pyramid (four stages, Swin's sizes). Stem, positions, depths, widths and MLPs stay the same, so differences in accuracy
and speed are due to the mixer. Every pair is registered with timm as `<body>_<mixer>`, and so are mixers added later.
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import (
    DropPath,
    calculate_drop_path_rates,
    get_act_layer,
    register_notrace_module,
    to_2tuple,
    trunc_normal_,
)
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from tokamix._construction import record_creation
from tokamix._hints import suggest
from tokamix.layers import (
    ConvEmbed,
    DepthwiseConv,
    ImageConv,
    MapConv,
    Mlp,
    PatchEmbed,
    PositionEmbedding,
    channels_last,
    map_to_tokens,
    tokens_to_map,
)
from tokamix.mixers.context_broadcast import ContextBroadcast
from tokamix.mixers.registry import Site, create_mixer, get_mixer, watch_mixers
from tokamix.models._backbone import Backbone, Column, Pyramid, PyramidStage, image_cfg
from tokamix.models.shipped import shipped_arguments, shipped_cfgs, shipped_weights

Pair = tuple[int, int]
WEIGHT_INITS = ("fixed", "fan_in")
CONTEXT_POSITIONS = ("end", "mid", "front", "msa", "both")


class BodyStem(PatchEmbed):
    """Patch embedding; incomplete patches at the right and bottom are padded with zeros."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, h, w, dim)."""
        # always the largest padding: the convolution ignores the rest, and symbolic shapes stay simple
        missing = self.proj.kernel_size[0] - 1
        return super().forward(F.pad(x, (0, missing, 0, missing)))


class ConvStem(nn.Module):
    """Convolutions of 3x3 px with GELU between them and a final LayerNorm, down to the grid of a patch embedding.

    Early Convolutions Help Transformers See Better, arXiv 2106.14881, without BatchNorm. Each convolution halves the
    image and doubles the channels; for a total stride of 2 the first one has stride 1.

    Args:
        in_chans: channels of the images.
        dim: channels of the output.
        stride: total stride, a power of 2.
        eps: of the LayerNorm.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self, in_chans: int, dim: int, stride: int, eps: float = 1e-6, device: Any = None, dtype: Any = None
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        halvings = stride.bit_length() - 1
        if stride < 2 or stride != 2**halvings:
            raise ValueError(f"a conv stem needs a patch_size of 2, 4, 8 or 16, got {stride}; or use stem='patch'")
        strides = [1, 2] if halvings == 1 else [2] * halvings
        widths = [max(1, dim // 2 ** (len(strides) - 1 - i)) for i in range(len(strides))]
        first: nn.Module = ImageConv(in_chans, widths[0], 3, strides[0], 1, **dd)
        rest = (MapConv(widths[i - 1], widths[i], 3, strides[i], 1, **dd) for i in range(1, len(strides)))
        self.convs = nn.ModuleList([first, *rest])
        self.norm = nn.LayerNorm(dim, eps=eps, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, h, w, dim)."""
        first, *rest = self.convs
        x = channels_last(first(x))
        for conv in rest:
            x = conv(F.gelu(x))
        return self.norm(x)


STEMS: dict[str, Any] = {"patch": BodyStem, "conv": ConvStem}


class Downsample(ConvEmbed):
    """A 2x2 convolution of stride 2 on maps (B, H, W, C), padded with zeros at the right and bottom."""

    def __init__(self, in_chans: int, dim: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__(in_chans, dim, 2, 2, eps=1e-6, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, in_chans) -> (B, h, w, dim)."""
        return super().forward(F.pad(x, (0, 0, 0, 1, 0, 1)))


@register_notrace_module
class Block(nn.Module):
    """A pre-norm block: a mixer and an MLP, each with a residual connection.

    Args:
        site: place of the block in the body.
        drop_path: stochastic depth.
        mixer: the registered mixer's name.
        mlp_ratio: hidden channels of the MLP, as a multiple of the block's.
        act_layer: the MLP's activation, a name or class.
        context_broadcast: kind of context broadcasting, "cb" or "cbs"; None for none.
        context_position: where it is: see `ColumnarBody`.
        conv_pos: add a depthwise 3x3 convolution of the tokens in front of the mixer.
        mixer_kwargs: options of the mixer.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        site: Site,
        drop_path: float,
        mixer: str,
        mlp_ratio: float,
        act_layer: str | type[nn.Module],
        context_broadcast: str | None,
        context_position: str,
        conv_pos: bool,
        mixer_kwargs: dict[str, Any] | None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        dim = site.dim
        self.site = site
        self.conv_pos = DepthwiseConv(dim, residual=True, **dd) if conv_pos else None
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, **dd)
        self.mixer = create_mixer(mixer, site, **(mixer_kwargs or {}), **dd)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, **dd)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=get_act_layer(act_layer), **dd)
        if context_position not in CONTEXT_POSITIONS:
            known = ", ".join(CONTEXT_POSITIONS)
            raise ValueError(f"unknown context_position {context_position!r}: choose one of {known}")
        self.context: nn.Module = nn.Identity()
        self.front: nn.Module = nn.Identity()
        self.mixed: nn.Module = nn.Identity()
        if context_broadcast is not None:
            create: Any = partial(ContextBroadcast, kind=context_broadcast, class_token=False, **dd)
            if context_position in ("end", "both"):
                self.context = create(dim)
            if context_position in ("msa", "both"):
                self.mixed = create(dim)
            if context_position == "front":
                self.front = create(dim)
            if context_position == "mid":
                self.mlp.norm = create(int(dim * mlp_ratio))  # the Mlp's place between its activation and second layer
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, grid: Pair) -> Tensor:
        """Tokens x (B, H*W, C) of grid (H, W) -> the same shape."""
        if self.conv_pos is not None:
            x = map_to_tokens(self.conv_pos(tokens_to_map(x, grid)))[0]
        x = x + self.drop_path(self.mixed(self.mixer(self.norm1(x), grid)))
        return x + self.drop_path(self.context(self.mlp(self.front(self.norm2(x)))))


class Body(Backbone):
    """Base class of both bodies: stem and initialisation of the weights."""

    weight_init: str
    scale_residual: bool

    @staticmethod
    def _create_stem(stem: str, in_chans: int, dim: int, patch_size: int, **dd: Any) -> nn.Module:
        if stem not in STEMS:
            raise ValueError(f"unknown stem {stem!r}: choose one of {', '.join(STEMS)}")
        return STEMS[stem](in_chans, dim, patch_size, eps=1e-6, **dd)

    def _set_weight_init(self, weight_init: str, scale_residual: bool) -> None:
        if weight_init not in WEIGHT_INITS:
            raise ValueError(f"unknown weight_init {weight_init!r}: choose one of {', '.join(WEIGHT_INITS)}")
        self.weight_init, self.scale_residual = weight_init, scale_residual

    @torch.jit.ignore
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise every parameter and derived buffer (after `to_empty` too)."""
        super().init_weights(needs_reset)
        if self.scale_residual:
            blocks = [module for module in self.modules() if isinstance(module, Block)]
            last_layers = [layer for block in blocks for layer in (getattr(block.mixer, "proj", None), block.mlp.fc2)]
            with torch.no_grad():
                for layer in last_layers:
                    if isinstance(layer, nn.Linear):  # not every mixer ends in one
                        layer.weight.mul_((2 * len(blocks)) ** -0.5)

    def _init_module(self, module: nn.Module, needs_reset: bool) -> None:
        super()._init_module(module, needs_reset)
        if self.weight_init == "fan_in" and module is not self.head:
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=module.in_features**-0.5)
            elif isinstance(module, PositionEmbedding):
                nn.init.normal_(module.table)


class ColumnarBody(Body, Column):
    """A column of equal blocks, like DeiT without class token.

    Args:
        mixer: name of a registered mixer.
        img_size: side or (H, W) of the images for the position embedding and the tables of some mixers, which are
            resized for other images.
        patch_size: side of a patch.
        in_chans: channels of the images.
        num_classes: classes; 0 for no classifier.
        global_pool: "avg" or "" (no pooling).
        dim: channels.
        depth: blocks.
        num_heads: heads of mixers that have heads.
        mlp_ratio: hidden channels of the MLPs, as a multiple of `dim`.
        act_layer: the MLPs' activation.
        context_broadcast: "cb" or "cbs" adds context broadcasting to each block.
        context_position: where: at the "end", in the middle ("mid", before the second layer) or at the "front" of the
            MLP, at the end of the mixer ("msa"), or "both", at the end of mixer and MLP.
        stem: "patch", one linear layer per patch; or "conv", 3x3 convolutions of stride 2 down to the same grid.
        conv_pos: add a depthwise 3x3 convolution of the tokens in front of each mixer: conditional positions (CPVT,
            arXiv 2102.10882).
        mixer_kwargs: options of the mixers.
        weight_init: "fixed", standard deviation 0.02 of Linear layers and positions, for wide networks; or "fan_in",
            1 / sqrt(inputs) and 1, with which narrow networks learn in far fewer steps.
        scale_residual: divide the initial weights of the last layer of each residual branch by sqrt(2 * blocks), as in
            GPT-2.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        mixer: str = "softmax",
        img_size: int | Pair = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        dim: int = 192,
        depth: int = 12,
        num_heads: int = 3,
        mlp_ratio: float = 4.0,
        act_layer: str | type[nn.Module] = "gelu",
        context_broadcast: str | None = None,
        context_position: str = "end",
        stem: str = "patch",
        conv_pos: bool = False,
        mixer_kwargs: dict[str, Any] | None = None,
        weight_init: str = "fixed",
        scale_residual: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        self.in_chans = in_chans
        self.feature_info = [{"num_chs": dim, "reduction": patch_size, "module": f"blocks.{i}"} for i in range(depth)]
        grid = _grid(img_size, patch_size)
        self.stem = self._create_stem(stem, in_chans, dim, patch_size, **dd)
        self.pos_embed = PositionEmbedding(dim, grid, **dd)
        options: dict[str, Any] = {"mixer": mixer, "mlp_ratio": mlp_ratio, "act_layer": act_layer, **dd}
        options |= {"context_broadcast": context_broadcast, "context_position": context_position}
        options |= {"conv_pos": conv_pos, "mixer_kwargs": mixer_kwargs}
        rates = calculate_drop_path_rates(drop_path_rate, depth)
        sites = [Site(dim, num_heads, grid, index=i) for i in range(depth)]
        self.blocks = nn.ModuleList(Block(site, rate, **options) for site, rate in zip(sites, rates, strict=True))
        self.norm = nn.LayerNorm(dim, eps=1e-6, **dd)
        self._build_head(dim, num_classes, global_pool, drop_rate, **dd)
        self._set_weight_init(weight_init, scale_residual)
        self.init_weights(needs_reset=False)

    def embed(self, x: Tensor) -> tuple[Tensor, Pair]:
        """Images -> tokens with their positions added, and their grid."""
        x, grid = super().embed(x)
        return self.pos_embed(x, grid), grid

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The position embedding."""
        return {"pos_embed.table"}

    @torch.jit.ignore
    def set_input_size(self, img_size: int | Pair) -> None:
        """Resize position embedding and mixer tables permanently, so that they are not resized for each image."""
        _set_grid(self, _grid(img_size, self.feature_info[0]["reduction"]))


class PyramidBody(Body, Pyramid):
    """Four stages of decreasing resolution, like Swin, with a position embedding before the first.

    Args:
        mixer: name of a registered mixer.
        img_size: side or (H, W) of the images for the position embedding and the tables of some mixers, which are
            resized for other images.
        patch_size: side of a patch, the stride of the first stage.
        in_chans: channels of the images.
        num_classes: classes; 0 for no classifier.
        global_pool: "avg" or "" (no pooling).
        dims: channels of each stage.
        depths: blocks of each stage.
        num_heads: heads of each stage, of mixers that have heads.
        mlp_ratio: hidden channels of the MLPs, as a multiple of the stage's.
        act_layer: the MLPs' activation.
        context_broadcast: "cb" or "cbs" adds context broadcasting to each block.
        context_position: where: at the "end", in the middle ("mid", before the second layer) or at the "front" of the
            MLP, at the end of the mixer ("msa"), or "both", at the end of mixer and MLP.
        stem: "patch", one linear layer per patch; or "conv", 3x3 convolutions of stride 2 down to the same grid.
        conv_pos: add a depthwise 3x3 convolution of the tokens in front of each mixer: conditional positions (CPVT,
            arXiv 2102.10882).
        mixer_kwargs: options of the mixers.
        weight_init: "fixed", standard deviation 0.02 of Linear layers and positions, for wide networks; or "fan_in",
            1 / sqrt(inputs) and 1, with which narrow networks learn in far fewer steps.
        scale_residual: divide the initial weights of the last layer of each residual branch by sqrt(2 * blocks), as in
            GPT-2.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        mixer: str = "softmax",
        img_size: int | Pair = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        dims: tuple[int, ...] = (96, 192, 384, 768),
        depths: tuple[int, ...] = (2, 2, 6, 2),
        num_heads: tuple[int, ...] = (3, 6, 12, 24),
        mlp_ratio: float = 4.0,
        act_layer: str | type[nn.Module] = "gelu",
        context_broadcast: str | None = None,
        context_position: str = "end",
        stem: str = "patch",
        conv_pos: bool = False,
        mixer_kwargs: dict[str, Any] | None = None,
        weight_init: str = "fixed",
        scale_residual: bool = False,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        if not len(dims) == len(depths) == len(num_heads):
            raise ValueError(f"dims {dims}, depths {depths} and num_heads {num_heads} must have one value per stage")
        self.in_chans = in_chans
        self.feature_info = [
            {"num_chs": dim, "reduction": patch_size * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(dims)
        ]
        self.stem = self._create_stem(stem, in_chans, dims[0], patch_size, **dd)
        options: dict[str, Any] = {"mixer": mixer, "mlp_ratio": mlp_ratio, "act_layer": act_layer, **dd}
        options |= {"context_broadcast": context_broadcast, "context_position": context_position}
        options |= {"conv_pos": conv_pos, "mixer_kwargs": mixer_kwargs}
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        stages = []
        for i, dim in enumerate(dims):
            grid = _grid(img_size, self.feature_info[i]["reduction"])
            sites = [Site(dim, num_heads[i], grid, stage=i, index=j) for j in range(depths[i])]
            blocks: list[nn.Module] = [Block(site, rate, **options) for site, rate in zip(sites, rates[i], strict=True)]
            if i == 0:
                stages.append(PyramidStage(blocks, pos_embed=PositionEmbedding(dim, grid, **dd)))
            else:
                stages.append(PyramidStage(blocks, Downsample(dims[i - 1], dim, **dd)))
        self.stages = nn.ModuleList(stages)
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6, **dd)
        self._build_head(dims[-1], num_classes, global_pool, drop_rate, **dd)
        self._set_weight_init(weight_init, scale_residual)
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The position embedding."""
        return {"stages.0.pos_embed.table"}

    @torch.jit.ignore
    def set_input_size(self, img_size: int | Pair) -> None:
        """Resize position embedding and mixer tables permanently, so that they are not resized for each image."""
        for stage, info in zip(self.stages, self.feature_info, strict=False):  # a pruned model has fewer stages
            _set_grid(stage, _grid(img_size, info["reduction"]))


def _grid(img_size: int | Pair, stride: int) -> Pair:
    height, width = to_2tuple(img_size)
    return math.ceil(height / stride), math.ceil(width / stride)


def _set_grid(module: nn.Module, grid: Pair) -> None:
    for child in module.modules():
        if callable(set_grid := getattr(child, "set_grid", None)):
            set_grid(grid)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Resize position embeddings and the mixers' size-dependent parameters to the model's image size."""
    own = model.state_dict()
    out = dict(state_dict)
    for name, tensor in state_dict.items():
        if name in own and tensor.shape != own[name].shape:
            fit = getattr(model.get_submodule(name.rpartition(".")[0]), "fit", None)
            out[name] = fit(tensor) if callable(fit) else tensor
    return out


# what a network needs that learns from some thousand images
SMALL_DATA = {"stem": "conv", "conv_pos": True, "weight_init": "fan_in", "scale_residual": True}
BODIES: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "columnar_tiny": (ColumnarBody, {"dim": 192, "num_heads": 3}),
    "columnar_small": (ColumnarBody, {"dim": 384, "num_heads": 6}),
    "pyramid_nano": (PyramidBody, {"dims": (48, 96, 144), "depths": (2, 4, 2), "num_heads": (2, 4, 6)} | SMALL_DATA),
    "pyramid_tiny": (PyramidBody, {"dims": (48, 96, 192, 384)}),
    "pyramid_small": (PyramidBody, {"dims": (96, 192, 384, 768)}),
}
default_cfgs = generate_default_cfgs({})


def create_body(body: str, mixer: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """Create a body with a mixer: `create_body("columnar_small", "sima", num_classes=10, context_broadcast="cb")`.

    Args:
        body: one of "columnar_tiny", "columnar_small", "pyramid_nano", "pyramid_tiny", "pyramid_small".
        mixer: name of a registered mixer; `tokamix.mixers.list_mixers()` returns all.
        pretrained: load the weights that come with the package, which some mixers have in "pyramid_nano".
        kwargs: arguments of `ColumnarBody` or `PyramidBody`; `pretrained_cfg` is the tag of the weights.
    """
    if body not in BODIES:
        raise ValueError(f"there is no body {body!r}; {suggest(body, BODIES)}")
    get_mixer(mixer)
    shape, sizes = BODIES[body]
    # weights fit one network: their tag stands for its arguments too
    kwargs = {**shipped_arguments(f"{body}_{mixer}", kwargs.get("pretrained_cfg")), **kwargs}
    arguments = {"mixer": mixer, **sizes, **kwargs}
    levels = tuple(range(len(arguments["dims"]))) if shape is PyramidBody else 3
    arguments["pretrained_cfg_overlay"] = {"first_conv": _first_conv(arguments)} | (
        kwargs.get("pretrained_cfg_overlay") or {}
    )
    model: Any = build_model_with_cfg(
        shape,
        f"{body}_{mixer}",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": levels, "feature_cls": "getter"},
        **arguments,
    )
    record_creation(model, f"{body}_{mixer}", kwargs)
    return model


def _first_conv(arguments: dict[str, Any]) -> str:
    """Name of the layer whose weights timm adapts to other in_chans."""
    return "stem.convs.0" if arguments.get("stem") == "conv" else "stem.proj"


def _register(mixer: str) -> None:
    """Register the mixer in each body with timm, and the weights that come with the package."""
    entry = get_mixer(mixer)
    for body, (shape, sizes) in BODIES.items():
        name = f"{body}_{mixer}"
        paper = {"paper_ids": entry.paper_ids, "paper_name": entry.paper_name}
        cfg = image_cfg(first_conv=_first_conv(sizes), **paper)
        cfgs = {tagged: cfg | fields for tagged, fields in shipped_cfgs(name).items()} or {name: cfg}
        if shape is PyramidBody:
            for tagged, fields in cfgs.items():
                arguments = shipped_weights()[tagged]["arguments"] if tagged != name else {}
                stride = arguments.get("patch_size", 4) * 2 ** (len(sizes["dims"]) - 1)
                fields["pool_size"] = (fields["input_size"][-1] // stride,) * 2
        default_cfgs.update(generate_default_cfgs(cfgs))
        globals()[name] = register_model(_entrypoint(name, body, mixer))


def _entrypoint(name: str, body: str, mixer: str) -> Any:
    def create(pretrained: bool = False, **kwargs: Any) -> nn.Module:
        return create_body(body, mixer, pretrained, **kwargs)

    create.__name__ = create.__qualname__ = name
    create.__doc__ = f"{body} with {mixer}."
    return create


watch_mixers(_register)
