"""Layers shared by the blocks of several model families."""

from tokamix.layers.activation import GELU, approximate_gelu
from tokamix.layers.bare import is_bare, is_hooked
from tokamix.layers.cast import cast_weights, casts_weights
from tokamix.layers.conv import DepthwiseConv, ImageConv, MapConv, PatchConv
from tokamix.layers.embed import ConvEmbed, PatchEmbed
from tokamix.layers.fold import FoldableSequential, MapSequential, fold_into_next, fold_into_previous
from tokamix.layers.heads import SoftmaxProduct, merge_heads, split_heads
from tokamix.layers.layout import channels_first, channels_last, map_to_tokens, tokens_to_map
from tokamix.layers.linear import LinearSequential, apply_linear, fused_linear_gelu
from tokamix.layers.norm import BatchNorm, LayerNorm, RecomputedLayerNorm, apply_batch_norm
from tokamix.layers.position import PositionEmbedding, fit_position_embeddings
from tokamix.layers.recompute import recompute_in_backward
from tokamix.layers.residual import Mlp, add_scaled

__all__ = [
    "GELU",
    "BatchNorm",
    "ConvEmbed",
    "DepthwiseConv",
    "FoldableSequential",
    "ImageConv",
    "LayerNorm",
    "LinearSequential",
    "MapConv",
    "MapSequential",
    "Mlp",
    "PatchConv",
    "PatchEmbed",
    "PositionEmbedding",
    "RecomputedLayerNorm",
    "SoftmaxProduct",
    "add_scaled",
    "apply_batch_norm",
    "apply_linear",
    "approximate_gelu",
    "cast_weights",
    "casts_weights",
    "channels_first",
    "channels_last",
    "fit_position_embeddings",
    "fold_into_next",
    "fold_into_previous",
    "fused_linear_gelu",
    "is_bare",
    "is_hooked",
    "map_to_tokens",
    "merge_heads",
    "recompute_in_backward",
    "split_heads",
    "tokens_to_map",
]
