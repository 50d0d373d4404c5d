"""Operators: tensor functions without parameters, one folder each."""

from tokamix.ops.active_token.op import active_gather, active_gather_axes, active_gather_joint
from tokamix.ops.context_broadcast.op import broadcast_context
from tokamix.ops.depthwise_conv.op import depthwise_conv
from tokamix.ops.layer_norm.op import layer_norm
from tokamix.ops.mask_paste.op import paste_masks
from tokamix.ops.nms.op import batched_nms
from tokamix.ops.roi_align.op import multiscale_roi_align
from tokamix.ops.sima.op import sima_attention, sima_class_attention, sima_self_attention
from tokamix.ops.super_token.op import super_token_sample, super_token_scatter
from tokamix.ops.weight_mixing.op import bank_mixing, bank_mixing_weights, resize_bank

__all__ = [
    "active_gather",
    "active_gather_axes",
    "active_gather_joint",
    "bank_mixing",
    "bank_mixing_weights",
    "batched_nms",
    "broadcast_context",
    "depthwise_conv",
    "layer_norm",
    "multiscale_roi_align",
    "paste_masks",
    "resize_bank",
    "sima_attention",
    "sima_class_attention",
    "sima_self_attention",
    "super_token_sample",
    "super_token_scatter",
]
