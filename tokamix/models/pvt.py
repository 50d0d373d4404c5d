"""PVT (v1): a pyramid of attention whose keys and values come from a reduced map.

Pyramid Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions, arXiv 2102.12122. Each of
four stages merges patches and adds learned positions; its attention reads keys and values from the map shrunk by 8,
4, 2 and 1; the last stage adds a class token. Follows the authors' code, which normalises in the blocks with an
epsilon of 1e-6 and after embeddings and reductions with 1e-5. Position embeddings are resized to any other grid; the
authors do not resize them if a grid has a different shape but as many tokens.
"""

from typing import Any

import torch
from timm.layers import DropPath, calculate_drop_path_rates, get_act_layer, to_2tuple
from timm.models import build_model_with_cfg, generate_default_cfgs
from torch import Tensor, nn

from tokamix.layers import (
    ConvEmbed,
    Mlp,
    PatchEmbed,
    PositionEmbedding,
    SoftmaxProduct,
    fit_position_embeddings,
    merge_heads,
    split_heads,
    tokens_to_map,
)
from tokamix.models._backbone import ClassTokenPyramid, ClassTokenStage, PyramidStage, image_cfg, register_model, rename

Grid = tuple[int, int]


class ReducedAttention(nn.Module):
    """Attention to a map whose sides are divided by `reduction` with a strided convolution.

    `attend` is the part between the projections: q (B, H, Nq, D), k, v (B, H, Nk, D) -> (B, H, Nq, D).
    """

    def __init__(
        self, dim: int, num_heads: int, reduction: int, eps: float = 1e-5, device: Any = None, dtype: Any = None
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        self.num_heads = num_heads
        self.q = nn.Linear(dim, dim, **dd)
        self.reduce = ConvEmbed(dim, dim, reduction, reduction, eps=eps, **dd) if reduction > 1 else None
        self.kv = nn.Linear(dim, 2 * dim, **dd)
        self.attend = SoftmaxProduct((dim // num_heads) ** -0.5)
        self.proj = nn.Linear(dim, dim, **dd)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Mix tokens x (B, N, C) of `grid`; if the map is reduced, all of them are patch tokens."""
        source = x if self.reduce is None else self.reduce(tokens_to_map(x, grid)).flatten(1, 2)
        q, k, v = (split_heads(y, self.num_heads) for y in (self.q(x), *self.kv(source).chunk(2, dim=-1)))
        return self.proj(merge_heads(self.attend(q, k, v)))


class Block(nn.Module):
    """A pre-norm block: spatially reduced attention and an MLP, each with a residual connection."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        reduction: int,
        act_layer: Any,
        eps: float,
        embed_eps: float,
        drop_path: float,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=eps, **dd)
        self.attn = ReducedAttention(dim, num_heads, reduction, embed_eps, **dd)
        self.norm2 = nn.LayerNorm(dim, eps=eps, **dd)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, **dd)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens (B, N, C) -> (B, N, C)."""
        x = x + self.drop_path(self.attn(self.norm1(x), grid))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PVT(ClassTokenPyramid):
    """A pyramid of spatially reduced attention.

    Args:
        in_chans: channels of the images.
        num_classes: classes; 0 for no classifier.
        global_pool: "token" (class token), "avg" (average of the patch tokens) or "".
        img_size: side or (H, W) of the images for the position embeddings; they are resized for other sizes.
        dims: channels of each stage.
        depths: blocks of each stage.
        num_heads: attention heads of each stage.
        mlp_ratios: hidden over outer channels of each stage's MLPs.
        reductions: divisor of the map's sides in each stage's attention; 1 in the last stage.
        act_layer: the MLPs' activation, by name or class.
        eps: epsilon of the norms in the blocks and of the last norm.
        embed_eps: epsilon of the norms after embeddings and reductions.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    min_side = 32

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        img_size: int | tuple[int, int] = 224,
        dims: tuple[int, ...] = (64, 128, 320, 512),
        depths: tuple[int, ...] = (3, 4, 6, 3),
        num_heads: tuple[int, ...] = (1, 2, 5, 8),
        mlp_ratios: tuple[float, ...] = (8, 8, 4, 4),
        reductions: tuple[int, ...] = (8, 4, 2, 1),
        act_layer: Any = nn.GELU,
        eps: float = 1e-6,
        embed_eps: float = 1e-5,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        self.in_chans = in_chans
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(dims)
        ]
        act_layer = get_act_layer(act_layer)
        rates = calculate_drop_path_rates(drop_path_rate, depths, stagewise=True)
        self.stem = PatchEmbed(in_chans, dims[0], 4, eps=embed_eps, **dd)
        self.stages = nn.ModuleList()
        for i, (dim, grid) in enumerate(zip(dims, self._grids(img_size), strict=True)):
            shape = (dim, num_heads[i], mlp_ratios[i], reductions[i])
            blocks = [Block(*shape, act_layer, eps, embed_eps, rate, **dd) for rate in rates[i]]
            downsample = ConvEmbed(dims[i - 1], dim, 2, 2, eps=embed_eps, **dd) if i else None
            if i < len(dims) - 1:
                self.stages.append(PyramidStage(blocks, downsample, PositionEmbedding(dim, grid, **dd)))
            else:
                self.stages.append(
                    ClassTokenStage(dim, blocks, downsample, PositionEmbedding(dim, grid, prefix=1, **dd), **dd)
                )
        self.norm = nn.LayerNorm(dims[-1], eps=eps, **dd)
        self._build_head(dims[-1], num_classes, global_pool, drop_rate, **dd)
        self.init_weights(needs_reset=False)

    @torch.jit.ignore
    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resize the position embeddings permanently, so that they are not resized for each image."""
        tables = [module for module in self.modules() if isinstance(module, PositionEmbedding)]
        for table, grid in zip(tables, self._grids(img_size), strict=False):  # a pruned model has fewer tables
            table.set_grid(grid)

    def _grids(self, img_size: int | tuple[int, int]) -> list[Grid]:
        height, width = to_2tuple(img_size)
        if min(height, width) < self.min_side:
            raise ValueError(f"PVT needs sides of at least {self.min_side} px, got img_size={height}x{width}")
        return [(height // info["reduction"], width // info["reduction"]) for info in self.feature_info]


# the names of Hugging Face's transformers, piece by piece, and ours; then the authors' and ours
RENAMES = (
    (r"^pvt\.encoder\.patch_embeddings\.(\d+)\.projection\.", r"stages.\1.downsample.proj."),
    (r"^pvt\.encoder\.patch_embeddings\.(\d+)\.layer_norm\.", r"stages.\1.downsample.norm."),
    (r"^pvt\.encoder\.patch_embeddings\.(\d+)\.position_embeddings$", r"stages.\1.pos_embed.table"),
    (r"^pvt\.encoder\.patch_embeddings\.(\d+)\.cls_token$", r"stages.\1.cls_token"),
    (r"^pvt\.encoder\.block\.(\d+)\.", r"stages.\1.blocks."),
    (r"^pvt\.encoder\.layer_norm\.", "norm."),
    (r"^classifier\.", "head."),
    (r"\.layer_norm_(\d)\.", r".norm\1."),
    (r"\.attention\.self\.query\.", ".attn.q."),
    (r"\.attention\.self\.(key|value)\.", r".attn.\1."),
    (r"\.attention\.self\.sequence_reduction\.", ".attn.sr."),
    (r"\.attention\.self\.layer_norm\.", ".attn.norm."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.mlp\.dense(\d)\.", r".mlp.fc\1."),
    (r"^patch_embed(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.downsample."),
    (r"^pos_embed(\d)$", lambda m: f"stages.{int(m[1]) - 1}.pos_embed.table"),
    (r"^block(\d)\.", lambda m: f"stages.{int(m[1]) - 1}.blocks."),
    (r"^cls_token$", "stages.3.cls_token"),
    (r"^stages\.0\.downsample\.", "stem."),
    (r"\.attn\.sr\.", ".attn.reduce.proj."),
    (r"\.attn\.norm\.", ".attn.reduce.norm."),
)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Map the names of the authors (whai362/PVT) or of transformers to ours; our own state dicts pass unchanged.

    Position embeddings are resized to the model's image size.
    """
    state = rename(state_dict, RENAMES)
    for name in [name for name in state if ".attn.key." in name]:  # transformers has separate keys and values
        both = (state.pop(name), state.pop(name.replace(".key.", ".value.")))
        state[name.replace(".key.", ".kv.")] = torch.cat(both)
    fit_position_embeddings(state, model)
    return state


def _cfg(top1: float) -> dict[str, Any]:
    return image_cfg(
        first_conv="stem.proj",
        paper_ids="arXiv:2102.12122",
        paper_name="Pyramid Vision Transformer: A Versatile Backbone for Dense Prediction without Convolutions",
        origin_url="https://github.com/whai362/PVT",
        notes=(f"top1={top1}",),
    )


default_cfgs = generate_default_cfgs(
    {"pvt_tiny": _cfg(75.1), "pvt_small": _cfg(79.8), "pvt_medium": _cfg(81.2), "pvt_large": _cfg(81.7)},
)

DEPTHS = {
    "pvt_tiny": (2, 2, 2, 2),
    "pvt_small": (3, 4, 6, 3),
    "pvt_medium": (3, 4, 18, 3),
    "pvt_large": (3, 8, 27, 3),
}


def _create(variant: str, pretrained: bool, **kwargs: Any) -> PVT:
    return build_model_with_cfg(
        PVT,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": (0, 1, 2, 3), "feature_cls": "getter"},
        **({"depths": DEPTHS[variant]} | kwargs),
    )


@register_model
def pvt_tiny(pretrained: bool = False, **kwargs: Any) -> PVT:
    """PVT-Tiny, 13 M parameters."""
    return _create("pvt_tiny", pretrained, **kwargs)


@register_model
def pvt_small(pretrained: bool = False, **kwargs: Any) -> PVT:
    """PVT-Small, 24 M parameters."""
    return _create("pvt_small", pretrained, **kwargs)


@register_model
def pvt_medium(pretrained: bool = False, **kwargs: Any) -> PVT:
    """PVT-Medium, 44 M parameters."""
    return _create("pvt_medium", pretrained, **kwargs)


@register_model
def pvt_large(pretrained: bool = False, **kwargs: Any) -> PVT:
    """PVT-Large, 61 M parameters."""
    return _create("pvt_large", pretrained, **kwargs)
