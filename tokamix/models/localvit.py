"""LocalViT: DeiT whose MLPs are inverted residuals on the map of patch tokens.

LocalViT: Bringing Locality to Vision Transformers, arXiv 2104.05707. A depthwise convolution, hard swish and squeeze
and excitation stand between the two Linear layers of each feed-forward layer, with a batch norm after each; the class
token bypasses it. Follows the authors' code: 4 heads where DeiT-Ti has 3, no LayerNorm before and no drop-path around
the feed-forward layer. The last block's feed-forward layer thus changes only the patch tokens: with a classifier
on the class token it gets no gradient. Positions are resized to any other grid, bicubically as in DeiT.
"""

from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import (
    Attention,
    DropPath,
    calculate_drop_path_rates,
    register_notrace_module,
    to_2tuple,
    trunc_normal_,
)
from timm.models import build_model_with_cfg, generate_default_cfgs
from torch import Tensor, nn

from tokamix.layers import (
    DepthwiseConv,
    PatchConv,
    PositionEmbedding,
    apply_batch_norm,
    channels_last,
    fit_position_embeddings,
    fold_into_previous,
    tokens_to_map,
)
from tokamix.models._backbone import Column, image_cfg, register_model, rename

Grid = tuple[int, int]


class Pointwise(nn.Linear):
    """A 1x1 convolution without bias on tokens, initialised like a convolution."""

    def __init__(self, in_features: int, out_features: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)


class SqueezeExcite(nn.Module):
    """Scale each channel by a gate computed from the average of all tokens."""

    def __init__(self, dim: int, hidden_dim: int, device: Any = None, dtype: Any = None) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim, **dd)
        self.fc2 = nn.Linear(hidden_dim, dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (B, N, C) -> (B, N, C)."""
        return x * F.hardsigmoid(self.fc2(F.relu(self.fc1(x.mean(1, keepdim=True)))))


class LocalMlp(nn.Module):
    """Linear, depthwise 3x3 convolution, squeeze and excitation, Linear; batch norms instead of biases."""

    def __init__(self, dim: int, hidden_dim: int, se_dim: int, device: Any = None, dtype: Any = None) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.fc1 = Pointwise(dim, hidden_dim, **dd)
        self.norm1: nn.Module = nn.BatchNorm1d(hidden_dim, **dd)
        self.conv = DepthwiseConv(hidden_dim, bias=False, **dd)
        self.norm2: nn.Module = nn.BatchNorm1d(hidden_dim, **dd)
        self.act = nn.Hardswish()
        self.se = SqueezeExcite(hidden_dim, se_dim, **dd)
        self.fc2 = Pointwise(hidden_dim, dim, **dd)
        self.norm3: nn.Module = nn.BatchNorm1d(dim, **dd)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Patch tokens x (B, H * W, C) of grid (H, W) -> the same shape."""
        x = self.act(apply_batch_norm(self.norm1, self.fc1(x)))
        x = self.act(apply_batch_norm(self.norm2, self.conv(tokens_to_map(x, grid)))).flatten(1, 2)
        return apply_batch_norm(self.norm3, self.fc2(self.se(x)))

    def reparameterize(self) -> None:
        """Fold the batch norms into the layers before them, for inference; see `timm.utils.reparameterize_model`."""
        self.norm1 = fold_into_previous(self.fc1, self.norm1)
        self.norm2 = fold_into_previous(self.conv, self.norm2)
        self.norm3 = fold_into_previous(self.fc2, self.norm3)


@register_notrace_module
class Block(nn.Module):
    """Attention of all tokens, then a local feed-forward layer on the patch tokens, each with a residual connection."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mlp_ratio: float,
        se_reduction: int,
        drop_path: float,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        hidden_dim = int(dim * mlp_ratio)
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, **dd)
        self.attn = Attention(dim, num_heads, qkv_bias=True, **dd)
        self.drop_path = DropPath(drop_path)
        self.mlp = LocalMlp(dim, hidden_dim, hidden_dim // se_reduction, **dd)

    def forward(self, x: Tensor, grid: Grid) -> Tensor:
        """Tokens (B, 1 + H * W, C) -> the same shape."""
        x = x + self.drop_path(self.attn(self.norm1(x)))
        token, patches = x[:, :1], x[:, 1:]
        return torch.cat([token, patches + self.mlp(patches, grid)], dim=1)


class LocalViTStem(PatchConv):
    """Images (B, in_chans, H, W) -> a map of patches; sides are cropped to multiples of the patch size."""

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> (B, h, w, dim)."""
        return channels_last(super().forward(x))


class LocalViT(Column):
    """A vision transformer with local feed-forward layers.

    Args:
        in_chans: channels of the images.
        num_classes: classes; 0 for no classifier.
        global_pool: "token" (class token), "avg" (average of the patch tokens) or "".
        img_size: side or (H, W) of the images for the position embedding; it is resized for other sizes.
        patch_size: side of a patch in pixels.
        embed_dim: channels of a token.
        depth: blocks.
        num_heads: attention heads.
        mlp_ratio: hidden over outer channels of the feed-forward layers.
        se_reduction: what squeeze and excitation divides the hidden channels by.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block's attention, rising linearly from 0.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    num_prefix_tokens = 1
    prefix_in_blocks = True
    pools = ("token", "avg", "")

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        embed_dim: int = 192,
        depth: int = 12,
        num_heads: int = 4,
        mlp_ratio: float = 4.0,
        se_reduction: int = 192,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        self.in_chans = in_chans
        self.patch_size = self.min_side = patch_size
        self.stem = LocalViTStem(in_chans, embed_dim, patch_size, **dd)
        self.cls_token = nn.Parameter(torch.empty(1, 1, embed_dim, **dd))
        self.pos_embed = PositionEmbedding(embed_dim, self._grid(img_size), prefix=1, mode="bicubic", **dd)
        self.blocks = nn.ModuleList(
            Block(embed_dim, num_heads, mlp_ratio, se_reduction, rate, **dd)
            for rate in calculate_drop_path_rates(drop_path_rate, depth)
        )
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6, **dd)
        self.feature_info = [
            {"num_chs": embed_dim, "reduction": patch_size, "module": f"blocks.{i}"} for i in range(depth)
        ]
        self._build_head(embed_dim, num_classes, global_pool, drop_rate, **dd)
        self.reset_parameters()
        self.init_weights(needs_reset=False)

    def reset_parameters(self) -> None:
        """Initialise the class token."""
        trunc_normal_(self.cls_token, std=0.02)

    def _init_module(self, module: nn.Module, needs_reset: bool) -> None:
        if not isinstance(module, Pointwise):
            super()._init_module(module, needs_reset)
        elif needs_reset:
            module.reset_parameters()

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Class token and positions are not decayed."""
        return {"cls_token", "pos_embed.table"}

    @torch.jit.ignore
    def set_input_size(self, img_size: int | tuple[int, int]) -> None:
        """Resize the position embedding permanently, so that it is not resized for each image."""
        self.pos_embed.set_grid(self._grid(img_size))

    def _grid(self, img_size: int | tuple[int, int]) -> Grid:
        height, width = to_2tuple(img_size)
        if min(height, width) < self.min_side:
            raise ValueError(f"LocalViT needs sides of at least {self.min_side} px, got img_size={height}x{width}")
        return height // self.patch_size, width // self.patch_size

    def embed(self, x: Tensor) -> tuple[Tensor, Grid]:
        """Images -> class and patch tokens with position embeddings, and the grid."""
        x, grid = super().embed(x)
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1)
        return self.pos_embed(x, grid), grid


# the authors' names, piece by piece, and ours
RENAMES = (
    (r"^patch_embed\.proj\.", "stem."),
    (r"^pos_embed$", "pos_embed.table"),
    (r"\.conv\.conv\.0\.", ".mlp.fc1."),
    (r"\.conv\.conv\.1\.", ".mlp.norm1."),
    (r"\.conv\.conv\.3\.", ".mlp.conv."),
    (r"\.conv\.conv\.4\.", ".mlp.norm2."),
    (r"\.conv\.conv\.6\.fc\.0\.", ".mlp.se.fc1."),
    (r"\.conv\.conv\.6\.fc\.2\.", ".mlp.se.fc2."),
    (r"\.conv\.conv\.7\.", ".mlp.fc2."),
    (r"\.conv\.conv\.8\.", ".mlp.norm3."),
)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Map the authors' names (ofsoundof/LocalViT) and 1x1 convolutions to ours; our own state dicts pass unchanged.

    The position embedding is resized to the model's image size.
    """
    state = rename(state_dict, RENAMES)
    for name, tensor in state.items():
        if name.endswith(("mlp.fc1.weight", "mlp.fc2.weight")):
            state[name] = tensor.flatten(1)
    fit_position_embeddings(state, model)
    return state


default_cfgs = generate_default_cfgs(
    {
        "localvit_tiny": image_cfg(
            first_conv="stem",
            paper_ids="arXiv:2104.05707",
            paper_name="LocalViT: Bringing Locality to Vision Transformers",
            origin_url="https://github.com/ofsoundof/LocalViT",
            notes=("top1=74.84",),
        )
    }
)


@register_model
def localvit_tiny(pretrained: bool = False, **kwargs: Any) -> LocalViT:
    """LocalViT-T, 5.9 M parameters."""
    return build_model_with_cfg(
        LocalViT,
        "localvit_tiny",
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": 3, "feature_cls": "getter"},
        **kwargs,
    )
