"""XCiT with SimA in place of cross-covariance attention.

SimA: Simple Softmax-free Attention for Vision Transformers, arXiv 2206.08898; XCiT: arXiv 2106.09681. A convolutional
stem makes tokens of 8 or 16 pixels, Fourier features encode their positions, blocks process them with attention, local
patch interaction and an MLP, and two class-attention blocks gather them into a class token.

Follows the authors' code where the paper differs (local patch interaction is convolution, GELU, BN, convolution)
and where it is silent (drop-path is constant over depth and absent from the class blocks; class attention is free of
softmax too). Deviates from it in two ways: a model in training mode returns plain logits, not a pair, and positions are
computed in float64 where the model is.
"""

import math
import re
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from timm.layers import DropPath, get_act_layer, register_notrace_module, trunc_normal_
from timm.models import build_model_with_cfg, generate_default_cfgs
from torch import Tensor, nn

from tokamix.layers import (
    GELU,
    DepthwiseConv,
    ImageConv,
    MapConv,
    MapSequential,
    Mlp,
    RecomputedLayerNorm,
    add_scaled,
    casts_weights,
    channels_first,
    channels_last,
    map_to_tokens,
    tokens_to_map,
)
from tokamix.mixers.sima import SimAClassAttention, SimASelfAttention
from tokamix.models._backbone import Column, Indices, image_cfg, register_model

LayerNorm = partial(nn.LayerNorm, eps=1e-6)
Grid = tuple[int, int]


class XCiTStem(MapSequential):
    """3x3 convolutions of stride 2 with batch norm and activations, until a patch is one token."""

    def __init__(
        self, in_chans: int, dim: int, patch_size: int, act_layer: Any, device: Any = None, dtype: Any = None
    ) -> None:
        if patch_size not in (8, 16):
            raise ValueError(f"the convolutional stem supports patches of 8 or 16 pixels, got patch_size={patch_size}")
        dd = {"device": device, "dtype": dtype}
        halvings = int(math.log2(patch_size))
        widths = [in_chans] + [dim // 2**i for i in reversed(range(halvings))]
        layers: list[nn.Module] = []
        for before, after in pairwise(widths):
            conv = MapConv if layers else ImageConv
            layers += [conv(before, after, 3, 2, 1, bias=False, **dd), nn.BatchNorm1d(after, **dd), act_layer()]
        super().__init__(*layers[:-1])

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> map (B, h, w, dim)."""
        first, *others = self
        return self._call(others, channels_last(first(x)))


class FourierPositions(nn.Module):
    """Sines and cosines of a token's relative height and width, projected to its channels."""

    def __init__(
        self, dim: int, features: int = 32, temperature: float = 10_000, device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__()
        self.features = features
        self.temperature = temperature
        self.proj = MapConv(2 * features, dim, 1, device=device, dtype=dtype)

    def forward(self, grid: Grid) -> Tensor:
        """Grid (H, W) -> encoding (1, H * W, dim)."""
        # float32 or wider: in half precision neighbouring positions would coincide
        dtype = torch.promote_types(self.proj.weight.dtype, torch.float32)
        height, width = (self._encode(n, dtype) for n in grid)  # (H, F), (W, F)
        both = torch.cat([height[:, None].expand(-1, grid[1], -1), width.expand(grid[0], -1, -1)], dim=-1)
        return self.proj(both[None].to(self.proj.weight.dtype)).flatten(1, 2)

    def _encode(self, n: int, dtype: torch.dtype) -> Tensor:
        device = self.proj.weight.device
        position = torch.arange(1, n + 1, dtype=dtype, device=device) / (n + 1e-6) * (2 * math.pi)
        exponent = torch.arange(0, self.features, 2, dtype=dtype, device=device) / self.features
        angle = position[:, None] / self.temperature**exponent  # (n, F / 2)
        return torch.stack([angle.sin(), angle.cos()], dim=-1).flatten(1)


class LocalPatchInteraction(nn.Module):
    """Depthwise 3x3 convolution, activation, batch norm, depthwise 3x3 convolution on the map of tokens."""

    def __init__(self, dim: int, act_layer: Any = GELU, device: Any = None, dtype: Any = None) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.conv1 = DepthwiseConv(dim, **dd)
        self.act = act_layer()
        self.bn = nn.BatchNorm2d(dim, **dd)
        self.conv2 = DepthwiseConv(dim, **dd)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Mix tokens x (B, N, C) with their neighbours on the grid."""
        x = self.act(self.conv1(tokens_to_map(x, grid)))
        return self.conv2(channels_last(self.bn(channels_first(x)))).flatten(1, 2)


@register_notrace_module
class Block(nn.Module):
    """A pre-norm block: SimA, local patch interaction and an MLP, each scaled per channel."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        norm: str | None = "l1",
        local_interaction: bool = True,
        drop_path: float = 0.0,
        act_layer: Any = GELU,
        eta: float = 1.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.eta = eta
        self.norm_attn = RecomputedLayerNorm(dim, eps=1e-6, **dd)
        self.attn = SimASelfAttention(dim, num_heads, qkv_bias, norm, **dd)
        self.scale_attn = nn.Parameter(torch.empty(dim, **dd))
        self.local = LocalPatchInteraction(dim, act_layer, **dd) if local_interaction else None
        if local_interaction:
            self.norm_local = RecomputedLayerNorm(dim, eps=1e-6, **dd)
            self.scale_local = nn.Parameter(torch.empty(dim, **dd))
        self.norm_mlp = RecomputedLayerNorm(dim, eps=1e-6, **dd)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, **dd)
        self.scale_mlp = nn.Parameter(torch.empty(dim, **dd))
        self.drop_path = DropPath(drop_path)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the scale of every branch with `eta`."""
        for scale in self.parameters(recurse=False):
            nn.init.constant_(scale, self.eta)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens (B, N, C) -> (B, N, C)."""
        x = add_scaled(x, self.attn(self.norm_attn(x), grid), self.scale_attn, self.drop_path)
        if self.local is not None:
            x = add_scaled(x, self.local(self.norm_local(x), grid), self.scale_local, self.drop_path)
        return add_scaled(x, self.mlp(self.norm_mlp(x)), self.scale_mlp, self.drop_path)


@register_notrace_module
class ClassBlock(nn.Module):
    """Class attention and an MLP on the class token.

    As in the authors' code, the patch tokens pass the same norms and scales, because the next class block reads them.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        norm: str | None = "l1",
        act_layer: Any = GELU,
        eta: float = 1.0,
        tokens_norm: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.eta = eta
        self.tokens_norm = tokens_norm
        self.norm_attn = LayerNorm(dim, **dd)
        self.attn = SimAClassAttention(dim, num_heads, qkv_bias, norm, **dd)
        self.scale_attn = nn.Parameter(torch.empty(dim, **dd))
        self.norm_mlp = LayerNorm(dim, **dd)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, **dd)
        self.scale_mlp = nn.Parameter(torch.empty(dim, **dd))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the scale of both branches with `eta`."""
        for scale in self.parameters(recurse=False):
            nn.init.constant_(scale, self.eta)

    def forward(self, x: Tensor, grid: Grid, class_only: bool = False) -> Tensor:
        """Tokens (B, 1 + N, C) -> (B, 1 + N, C), or only the class token (B, 1, C) if `class_only`."""
        normed = self.norm_attn(x)
        token = self.norm_mlp(x[:, :1] + self.scale_attn * self.attn(normed, grid))
        token = token + self.scale_mlp * self.mlp(token)
        if class_only:
            return token
        patches = x[:, 1:] + self.scale_attn * normed[:, 1:]
        if self.tokens_norm:
            patches = self.norm_mlp(patches)
        return torch.cat([token, 2 * patches], dim=1)  # the authors add the patches to themselves


class XCiTSimA(Column):
    """XCiT with SimA attention.

    Args:
        in_chans: channels of the images.
        num_classes: classes; 0 for no classifier.
        global_pool: "token" (class token), "avg" (average of the patch tokens) or "".
        patch_size: 8 or 16 pixels.
        embed_dim: channels of a token.
        depth: blocks.
        num_heads: heads of each block; 1 for single-head SimA.
        mlp_ratio: hidden over outer channels of the MLPs.
        qkv_bias: whether q, k and v have a bias.
        norm: "l1", or the paper's ablations "l2" and None.
        act_layer: activation of stem, local interaction and MLPs, by name or class; with nn.ReLU no exp is left.
        local_interaction: False leaves local patch interaction out.
        use_pos: whether positions are encoded.
        eta: initial value of the channel scales.
        tokens_norm: whether class blocks normalise the patch tokens too before the MLP.
        class_depth: class-attention blocks.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth, the same in every block; class blocks have none.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    num_prefix_tokens = 1
    pools = ("token", "avg", "")

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        patch_size: int = 16,
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 8,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        norm: str | None = "l1",
        act_layer: Any = GELU,
        local_interaction: bool = True,
        use_pos: bool = True,
        eta: float = 1.0,
        tokens_norm: bool = True,
        class_depth: int = 2,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.in_chans = in_chans
        self.min_side = patch_size  # a smaller image would be one token of mostly padding
        act_layer = get_act_layer(act_layer)
        shared: dict[str, Any] = {
            "dim": embed_dim,
            "num_heads": num_heads,
            "mlp_ratio": mlp_ratio,
            "qkv_bias": qkv_bias,
            "norm": norm,
            "act_layer": act_layer,
            "eta": eta,
            **dd,
        }
        self.stem = XCiTStem(in_chans, embed_dim, patch_size, act_layer, **dd)
        self.pos_embed = FourierPositions(embed_dim, **dd) if use_pos else None
        self.blocks = nn.ModuleList(
            Block(local_interaction=local_interaction, drop_path=drop_path_rate, **shared) for _ in range(depth)
        )
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd))
        self.class_blocks = nn.ModuleList(ClassBlock(tokens_norm=tokens_norm, **shared) for _ in range(class_depth))
        self.norm = LayerNorm(embed_dim, **dd)
        self.feature_info = [
            {"num_chs": embed_dim, "reduction": patch_size, "module": f"blocks.{i}"} for i in range(depth)
        ]
        self._build_head(embed_dim, num_classes, global_pool, drop_rate, **dd)
        self.reset_parameters()
        self.init_weights(needs_reset=False)

    def reset_parameters(self) -> None:
        """Initialise the class token."""
        trunc_normal_(self.cls_token, std=0.02)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The class token is not decayed."""
        return {"cls_token"}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's layer groups, for layer-wise learning rates."""
        return {
            "stem": r"^stem|^pos_embed",
            "blocks": r"^blocks\.(\d+)",
            "class_blocks": [(r"^class_blocks\.(\d+)", None), (r"^cls_token", (0,)), (r"^norm", (99999,))],
        }

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Images -> tokens with encoded positions, and their grid."""
        x, grid = map_to_tokens(self.stem(x))
        return (x if self.pos_embed is None else x + self.pos_embed(grid)), grid

    def finish(self, x: Tensor, grid: Grid, class_only: bool = False) -> Tensor:
        """Gather the patch tokens into a class token in front of them; return only that with `class_only`."""
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        for i, block in enumerate(self.class_blocks, start=1):
            x = self._run(block, x, grid, class_only and i == len(self.class_blocks))
        return self.norm(x)

    def forward_features(self, x: Tensor, class_only: bool = False) -> Tensor:
        """Images (B, in_chans, H, W) -> tokens (B, 1 + N, num_features), or (B, 1, num_features) if `class_only`."""
        self._check(x)
        x, grid = self.embed(x)
        for block in self.blocks:
            x = self._run(block, x, grid)
        return self.finish(x, grid, class_only)

    @casts_weights
    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> logits (B, num_classes)."""
        return self.forward_head(self.forward_features(x, class_only=self.global_pool == "token"))

    def prune_intermediate_layers(
        self, indices: Indices = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks after the last one in `indices`, and optionally the norm, classifier and class blocks."""
        taken = super().prune_intermediate_layers(indices, prune_norm, prune_head)
        if prune_head:
            self.class_blocks = nn.ModuleList()
        return taken


# pieces of the authors' parameter names, and ours
RENAMED = {
    "pos_embeder": "pos_embed",
    "token_projection": "proj",
    "cls_attn_blocks": "class_blocks",
    "local_mp": "local",
    "norm1": "norm_attn",
    "norm2": "norm_mlp",
    "norm3": "norm_local",
    "gamma1": "scale_attn",
    "gamma2": "scale_mlp",
    "gamma3": "scale_local",
}


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Map the authors' names to ours; our own state dicts pass unchanged."""
    return {_translate(name): value for name, value in state_dict.items()}


def _translate(name: str) -> str:
    # the authors' stem nests each convolution with its batch norm, ours is one flat sequence
    name = re.sub(r"^patch_embed\.proj\.(\d+)\.(\d)", lambda m: f"stem.{int(m[1]) // 2 * 3 + int(m[2])}", name)
    return ".".join(RENAMED.get(piece, piece) for piece in name.split("."))


SIZES: dict[str, dict[str, Any]] = {
    "nano_12": {"embed_dim": 128, "depth": 12, "num_heads": 4, "eta": 1.0, "tokens_norm": False},
    "tiny_12": {"embed_dim": 192, "depth": 12, "num_heads": 4, "eta": 1.0},
    "tiny_20": {"embed_dim": 192, "depth": 20, "num_heads": 4, "eta": 1e-5},  # eta is not printed: as other deep models
    "tiny_24": {"embed_dim": 192, "depth": 24, "num_heads": 4, "eta": 1e-5},
    "small_12": {"embed_dim": 384, "depth": 12, "num_heads": 8, "eta": 1.0},
    "small_24": {"embed_dim": 384, "depth": 24, "num_heads": 8, "eta": 1e-5},
    "medium_24": {"embed_dim": 512, "depth": 24, "num_heads": 8, "eta": 1e-5},
    "large_24": {"embed_dim": 768, "depth": 24, "num_heads": 16, "eta": 1e-5},
}


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return image_cfg(
        crop_pct=1.0,
        first_conv="stem.0",
        paper_ids="arXiv:2206.08898",
        paper_name="SimA: Simple Softmax-free Attention for Vision Transformers",
        origin_url="https://github.com/UCDvision/sima",
        **kwargs,
    )


default_cfgs = generate_default_cfgs(
    {
        "xcit_nano_12_p16_sima": _cfg(),
        "xcit_nano_12_p8_sima": _cfg(),
        "xcit_tiny_12_p16_sima": _cfg(),
        "xcit_tiny_12_p8_sima": _cfg(notes=("top1=79.4",)),
        "xcit_tiny_20_p16_sima": _cfg(notes=("top1=79.2",)),
        "xcit_tiny_24_p16_sima": _cfg(notes=("top1=79.8",)),
        "xcit_tiny_24_p8_sima": _cfg(),
        "xcit_small_12_p16_sima": _cfg(notes=("top1=82.1",)),
        "xcit_small_12_p8_sima": _cfg(),
        "xcit_small_24_p16_sima": _cfg(),
        "xcit_small_24_p8_sima": _cfg(),
        "xcit_medium_24_p16_sima": _cfg(),
        "xcit_medium_24_p8_sima": _cfg(),
        "xcit_large_24_p16_sima": _cfg(),
        "xcit_large_24_p8_sima": _cfg(),
    }
)


def _create(size: str, patch_size: int, pretrained: bool, kwargs: dict[str, Any]) -> XCiTSimA:
    kwargs = {"patch_size": patch_size, **SIZES[size], **kwargs}
    return build_model_with_cfg(
        XCiTSimA,
        f"xcit_{size}_p{patch_size}_sima",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": min(4, kwargs["depth"]), "feature_cls": "getter"},
        **kwargs,
    )


@register_model
def xcit_nano_12_p16_sima(pretrained: bool = False, **kwargs: Any) -> XCiTSimA:
    """XCiT-N12/16 with SimA."""
    return _create("nano_12", 16, pretrained, kwargs)


@register_model
def xcit_nano_12_p8_sima(pretrained: bool = False, **kwargs: Any) -> XCiTSimA:
    """XCiT-N12/8 with SimA."""
    return _create("nano_12", 8, pretrained, kwargs)


@register_model
def xcit_tiny_12_p16_sima(pretrained: bool = False, **kwargs: Any) -> XCiTSimA:
    """XCiT-T12/16 with SimA."""
    return _create("tiny_12", 16, pretrained, kwargs)


@register_model
def xcit_tiny_12_p8_sima(pretrained: bool = False, **kwargs: Any) -> XCiTSimA:
    """XCiT-T12/8 with SimA."""
    return _create("tiny_12", 8, pretrained, kwargs)


@register_model
def xcit_tiny_20_p16_sima(pretrained: bool = False, **kwargs: Any) -> XCiTSimA:
    """XCiT-T20/16 with SimA."""
    return _create("tiny_20", 16, pretrained, kwargs)


@register_model
def xcit_tiny_24_p16_sima(pretrained: bool = False, **kwargs: Any) -> XCiTSimA:
    """XCiT-T24/16 with SimA."""
    return _create("tiny_24", 16, pretrained, kwargs)


@register_model
def xcit_tiny_24_p8_sima(pretrained: bool = False, **kwargs: Any) -> XCiTSimA:
    """XCiT-T24/8 with SimA."""
    return _create("tiny_24", 8, pretrained, kwargs)


@register_model
def xcit_small_12_p16_sima(pretrained: bool = False, **kwargs: Any) -> XCiTSimA:
    """XCiT-S12/16 with SimA."""
    return _create("small_12", 16, pretrained, kwargs)


@register_model
def xcit_small_12_p8_sima(pretrained: bool = False, **kwargs: Any) -> XCiTSimA:
    """XCiT-S12/8 with SimA."""
    return _create("small_12", 8, pretrained, kwargs)


@register_model
def xcit_small_24_p16_sima(pretrained: bool = False, **kwargs: Any) -> XCiTSimA:
    """XCiT-S24/16 with SimA."""
    return _create("small_24", 16, pretrained, kwargs)


@register_model
def xcit_small_24_p8_sima(pretrained: bool = False, **kwargs: Any) -> XCiTSimA:
    """XCiT-S24/8 with SimA."""
    return _create("small_24", 8, pretrained, kwargs)


@register_model
def xcit_medium_24_p16_sima(pretrained: bool = False, **kwargs: Any) -> XCiTSimA:
    """XCiT-M24/16 with SimA."""
    return _create("medium_24", 16, pretrained, kwargs)


@register_model
def xcit_medium_24_p8_sima(pretrained: bool = False, **kwargs: Any) -> XCiTSimA:
    """XCiT-M24/8 with SimA."""
    return _create("medium_24", 8, pretrained, kwargs)


@register_model
def xcit_large_24_p16_sima(pretrained: bool = False, **kwargs: Any) -> XCiTSimA:
    """XCiT-L24/16 with SimA."""
    return _create("large_24", 16, pretrained, kwargs)


@register_model
def xcit_large_24_p8_sima(pretrained: bool = False, **kwargs: Any) -> XCiTSimA:
    """XCiT-L24/8 with SimA."""
    return _create("large_24", 8, pretrained, kwargs)
