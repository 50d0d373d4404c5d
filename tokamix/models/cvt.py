"""CvT: a pyramid of attention whose queries, keys and values come from depthwise convolutions.

CvT: Introducing Convolutions to Vision Transformers, arXiv 2103.15808. Convolutions embed the tokens of each of three
stages, so no position embeddings are needed; keys and values are on a grid of half the side; the last stage adds a
class token, which bypasses the convolutions. Follows the authors' code: the scores are scaled by the width of all heads
together, the activation is QuickGELU, and drop-path rises inside the last stage only.
"""

from typing import Any

import torch
from timm.layers import DropPath, Mlp, QuickGELU, calculate_drop_path_rates, get_act_layer
from timm.models import build_model_with_cfg, generate_default_cfgs
from torch import Tensor, nn

from tokamix.layers import (
    ConvEmbed,
    MapConv,
    SoftmaxProduct,
    apply_batch_norm,
    channels_last,
    fold_into_previous,
    merge_heads,
    split_heads,
    tokens_to_map,
)
from tokamix.models._backbone import ClassTokenPyramid, ClassTokenStage, PyramidStage, image_cfg, register_model, rename

Grid = tuple[int, int]


class CvTStem(ConvEmbed):
    """Overlapping patches of images."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_chans, H, W) -> (B, h, w, dim)."""
        return super().forward(channels_last(x).contiguous())


class ConvProjection(nn.Module):
    """A depthwise 3x3 convolution with batch norm, then a Linear layer; prefix tokens pass the Linear layer only."""

    def __init__(self, dim: int, stride: int = 1, device: Any = None, dtype: Any = None) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.conv = MapConv(dim, dim, 3, stride, padding=1, groups=dim, bias=False, **dd)
        self.norm: nn.Module = nn.BatchNorm1d(dim, **dd)
        self.linear = nn.Linear(dim, dim, **dd)

    def forward(self, patches: Tensor, prefix: Tensor | None) -> Tensor:
        """Map (B, H, W, C) and prefix (B, P, C) -> tokens (B, P + h * w, C)."""
        x = apply_batch_norm(self.norm, self.conv(patches)).flatten(1, 2)
        return self.linear(x if prefix is None else torch.cat([prefix, x], dim=1))

    def reparameterize(self) -> None:
        """Fold the batch norm into the convolution, for inference; see `timm.utils.reparameterize_model`."""
        self.norm = fold_into_previous(self.conv, self.norm)


class ConvAttention(nn.Module):
    """Attention with convolutional projections: N queries attend to about N / 4 keys.

    `attend` is the part between the projections: q (B, H, Nq, D), k, v (B, H, Nk, D) -> (B, H, Nq, D).
    """

    def __init__(self, dim: int, num_heads: int, prefix: int = 0, device: Any = None, dtype: Any = None) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.num_heads, self.prefix = num_heads, prefix
        self.q = ConvProjection(dim, **dd)
        self.k = ConvProjection(dim, stride=2, **dd)
        self.v = ConvProjection(dim, stride=2, **dd)
        self.attend = SoftmaxProduct(dim**-0.5)
        self.proj = nn.Linear(dim, dim, **dd)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Mix tokens x (B, prefix + H * W, C) of grid (H, W)."""
        prefix = x[:, : self.prefix] if self.prefix else None
        patches = tokens_to_map(x[:, self.prefix :], grid)
        q, k, v = (split_heads(project(patches, prefix), self.num_heads) for project in (self.q, self.k, self.v))
        return self.proj(merge_heads(self.attend(q, k, v)))


class Block(nn.Module):
    """A pre-norm block: convolutional attention and an MLP, each with a residual connection."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        prefix: int,
        act_layer: Any,
        drop_path: float,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, **dd)
        self.attn = ConvAttention(dim, num_heads, prefix, **dd)
        self.norm2 = nn.LayerNorm(dim, **dd)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=act_layer, **dd)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens (B, N, C) -> (B, N, C)."""
        x = x + self.drop_path(self.attn(self.norm1(x), grid))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class CvT(ClassTokenPyramid):
    """A pyramid of convolutional attention.

    Args:
        in_chans: channels of the images.
        num_classes: classes; 0 for no classifier.
        global_pool: "token" (class token), "avg" (average of the patch tokens) or "".
        dims: channels of each stage.
        depths: blocks of each stage.
        num_heads: attention heads of each stage.
        mlp_ratio: hidden over outer channels of the MLPs.
        act_layer: the MLPs' activation, by name or class.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0 inside the last stage.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    min_side = 3  # minimum of the 7x7 convolution with its padding

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        dims: tuple[int, ...] = (64, 192, 384),
        depths: tuple[int, ...] = (1, 2, 10),
        num_heads: tuple[int, ...] = (1, 3, 6),
        mlp_ratio: float = 4.0,
        act_layer: Any = QuickGELU,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        self.in_chans = in_chans
        act_layer = get_act_layer(act_layer)
        last = len(dims) - 1
        self.stem = CvTStem(in_chans, dims[0], kernel_size=7, stride=4, padding=2, **dd)
        self.stages = nn.ModuleList()
        for i, (dim, depth, heads) in enumerate(zip(dims, depths, num_heads, strict=True)):
            rates = calculate_drop_path_rates(drop_path_rate if i == last else 0.0, depth)
            blocks = [Block(dim, heads, mlp_ratio, int(i == last), act_layer, rate, **dd) for rate in rates]
            downsample = ConvEmbed(dims[i - 1], dim, kernel_size=3, stride=2, padding=1, **dd) if i else None
            self.stages.append(
                ClassTokenStage(dim, blocks, downsample, **dd) if i == last else PyramidStage(blocks, downsample)
            )
        self.norm = nn.LayerNorm(dims[-1], **dd)
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(dims)
        ]
        self._build_head(dims[-1], num_classes, global_pool, drop_rate, **dd)
        self.init_weights(needs_reset=False)


# the names of Hugging Face's transformers, piece by piece, and the authors'; then the authors' and ours
RENAMES = (
    (r"^cvt\.encoder\.stages\.(\d+)\.", r"stage\1."),
    (r"\.embedding\.convolution_embeddings\.projection\.", ".patch_embed.proj."),
    (r"\.embedding\.convolution_embeddings\.normalization\.", ".patch_embed.norm."),
    (r"^(stage\d+)\.layers\.", r"\1.blocks."),
    (r"\.attention\.attention\.", ".attn."),
    (r"\.convolution_projection_(.)\w+\.convolution_projection\.convolution\.", r".conv_proj_\1.conv."),
    (r"\.convolution_projection_(.)\w+\.convolution_projection\.normalization\.", r".conv_proj_\1.bn."),
    (r"\.projection_(.)\w+\.", r".proj_\1."),
    (r"\.attention\.output\.dense\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"\.output\.dense\.", ".mlp.fc2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
    (r"\.conv_proj_(.)\.conv\.", r".\1.conv."),
    (r"\.conv_proj_(.)\.bn\.", r".\1.norm."),
    (r"\.proj_(.)\.", r".\1.linear."),
    (r"^stage0\.patch_embed\.", "stem."),
    (r"^stage(\d+)\.patch_embed\.", r"stages.\1.downsample."),
    (r"^stage(\d+)\.", r"stages.\1."),
)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Map the names of the authors (microsoft/CvT) or of transformers to ours; our own state dicts pass unchanged."""
    return rename(state_dict, RENAMES)


default_cfgs = generate_default_cfgs(
    {
        "cvt_13": image_cfg(
            first_conv="stem.proj",
            paper_ids="arXiv:2103.15808",
            paper_name="CvT: Introducing Convolutions to Vision Transformers",
            origin_url="https://github.com/microsoft/CvT",
            notes=("top1=81.6",),
        )
    }
)


@register_model
def cvt_13(pretrained: bool = False, **kwargs: Any) -> CvT:
    """CvT-13, 20 M parameters."""
    return build_model_with_cfg(
        CvT,
        "cvt_13",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": (0, 1, 2), "feature_cls": "getter"},
        **kwargs,
    )
