"""timm's attention classes, and the layout of timm's blocks.

An `Adapter` without forward runs the host's own forward. The classes are named, not imported: a name that an older or
newer timm does not have is no error.
"""

from typing import Any

from tokamix.swap import timm_forwards as forwards
from tokamix.swap._host import AFTER, BEFORE, Adapter, BlockLayout

BIASES: dict[str, Any] = {
    "position": ("attention_biases", "attention_bias_idxs"),
    "bias_methods": ("get_attention_biases",),
    "relative": True,
}
CHANNELS = "cross-covariance attention: its temperatures are dropped, and tokens mix instead of channels"
WINDOW = (
    "each window is mixed on its own; its relative position bias is dropped, and in shifted windows SimA gives pairs"
    " across borders weight 0, other mixers mix them"
)
RELATIVE = "the relative position bias is dropped: only softmax has logits to add it to"
DOWN: dict[str, Any] = {"layout": "other", "note": RELATIVE}
POOL: dict[str, Any] = {"layout": "other", "class_attention": True}


def _set_heads(host: Any) -> None:
    """Here the host's own number of heads can change."""
    host.num_heads = getattr(host.mixer, "num_heads", None) or host.num_heads


def _no_relative(host: Any) -> None:
    """SAM's attention has a flag for its relative positions."""
    host.use_rel_pos = host.use_rel_pos and host.rel_pos_h is not None


def _no_spatial(host: Any) -> None:
    """MViTv2's likewise."""
    if not getattr(host.mixer, "keeps_bias", False):
        host.rel_pos_type = ""


def _in_patch(name: str, model: Any = None) -> bool:
    """TNT's inner attention is among the pixels of a patch."""
    return name.endswith("attn_in")


def _in_windowed_block(name: str, model: Any) -> bool:
    """SAM's blocks have windows or none; SAM 2's have a size of 0 for none, twice."""
    size = getattr(_owner(name, model), "window_size", 0)
    return any(size) if isinstance(size, tuple | list) else bool(size)


def _in_partition(name: str, model: Any) -> bool:
    """MaxViT's attention is inside a partition into windows or grids, CoAtNet's is not."""
    return hasattr(_owner(name, model), "partition_size")


def _in_mask_unit(name: str, model: Any) -> bool:
    """Hiera's first stages attend inside mask units, its last ones globally."""
    return bool(model.get_submodule(name).use_mask_unit_attn)


def _in_block_of_level(name: str, model: Any) -> bool:
    """NesT's last level is one block."""
    level = model.get_submodule(name.partition(".transformer_encoder.")[0]) if ".transformer_encoder." in name else None
    return level is None or level.pos_embed.shape[1] > 1


def _owner(name: str, model: Any) -> Any:
    return model.get_submodule(name.rpartition(".")[0])


def _tnt_prefix(name: str, host: Any) -> int:
    """The pixels of a patch have no class token, the patches have."""
    return 0 if _in_patch(name) else 1


ADAPTERS: dict[str, Adapter] = {
    "timm.layers.attention.Attention": Adapter(forwards.attention, prepare=_set_heads),
    "timm.layers.attention.AttentionRope": Adapter(),
    "timm.layers.diff_attention.DiffAttention": Adapter(
        note="differential attention is now the difference of two products of the new mixer"
    ),
    "timm.layers.attention2d.MultiQueryAttention2d": Adapter(layout="nchw", output="output.proj"),
    "timm.layers.attention2d.Attention2d": Adapter(layout="nchw"),
    "timm.layers.attention_pool.AttentionPoolLatent": Adapter(**POOL),
    "timm.layers.attention_pool.AttentionPoolPrr": Adapter(**POOL),
    # the mean of the patches is their first token
    "timm.layers.attention_pool2d.AttentionPool2d": Adapter(**POOL, prefix=1),
    "timm.layers.attention_pool2d.RotAttentionPool2d": Adapter(**POOL, prefix=1),
    "timm.layers.bottleneck_attn.BottleneckAttn": Adapter(
        forwards.bottleneck, layout="other", position=("pos_embed",), note=RELATIVE
    ),
    "timm.layers.halo_attn.HaloAttn": Adapter(
        forwards.halo, layout="other", window=True, position=("pos_embed",), note=RELATIVE
    ),
    "timm.models.vision_transformer.ParallelScalingBlock": Adapter(layout="other"),
    "timm.models.vision_transformer.DiffParallelScalingBlock": Adapter(layout="other"),
    "timm.models.beit.Attention": Adapter(
        position=("relative_position_bias_table", "relative_position_index"), note=RELATIVE, relative=True
    ),
    "timm.models.cait.TalkingHeadAttn": Adapter(
        forwards.attention,
        position=("proj_l", "proj_w"),
        lost=("proj_l", "proj_w"),
        prefix=0,  # the class token comes after these blocks
        note="talking heads (proj_l, proj_w) are dropped: without attention weights there is nothing to mix",
    ),
    "timm.models.cait.ClassAttn": Adapter(
        forwards.class_attention,
        layout="other",
        class_attention=True,
        note="class attention with SimA normalises over all tokens, so every token gets a query",
    ),
    "timm.models.coat.FactorAttnConvRelPosEnc": Adapter(
        forwards.coat,
        lost=(),
        prefix=1,
        note="factorised attention is replaced, its convolutional position encoding kept",
    ),
    "timm.models.convit.MHSA": Adapter(forwards.attention, prefix=1),
    "timm.models.convit.GPSA": Adapter(
        forwards.gpsa,
        position=("pos_proj", "gating_param"),
        prefix=0,
        note="the attention to positions and its gate are dropped",
    ),
    "timm.models.cpubone.ConvAttention": Adapter(layout="nchw", output="o_proj"),
    "timm.models.crossvit.CrossAttention": Adapter(forwards.crossvit, layout="other", class_attention=True),
    "timm.models.davit.WindowAttention": Adapter(window=True),
    "timm.models.edgenext.CrossCovarianceAttn": Adapter(
        forwards.attention, position=("temperature",), lost=("temperature",), prefix=0, note=CHANNELS
    ),
    "timm.models.efficientformer.Attention": Adapter(forwards.efficientformer, **BIASES, prefix=0, note=RELATIVE),
    "timm.models.efficientformer_v2.Attention2d": Adapter(
        forwards.efficientformer_v2,
        layout="nchw",
        position=(*BIASES["position"], "talking_head1", "talking_head2"),
        lost=("talking_head1", "talking_head2"),
        bias_methods=BIASES["bias_methods"],
        note="attention biases and talking heads are dropped: without attention weights there is nothing to mix",
    ),
    "timm.models.efficientformer_v2.Attention2dDownsample": Adapter(forwards.efficientformer_v2_down, **BIASES, **DOWN),
    "timm.models.efficientvit_msra.CascadedGroupAttention": Adapter(
        forwards.cascaded_group, **BIASES, layout="nchw", window=True, note=RELATIVE
    ),
    "timm.models.eva.EvaAttention": Adapter(),
    "timm.models.fastvit.Attention": Adapter(layout="nchw"),
    "timm.models.gcvit.WindowAttentionGlobal": Adapter(
        forwards.gcvit, position=("rel_pos",), relative=True, window=True, note=RELATIVE
    ),
    "timm.models.gemma4_vit.Gemma4Attention": Adapter(output="o_proj", prefix=0),
    "timm.models.hiera.MaskUnitAttention": Adapter(layout="other", window=True, windowed=_in_mask_unit, ordered=False),
    "timm.models.hieradet_sam2.MultiScaleAttention": Adapter(layout="nhwc", window=True, windowed=_in_windowed_block),
    "timm.models.iformer.SHMA": Adapter(layout="nchw"),
    "timm.models.levit.Attention": Adapter(forwards.levit, **BIASES, prefix=0, layout="nchw", note=RELATIVE),
    "timm.models.levit.AttentionDownsample": Adapter(forwards.levit_down, **BIASES, **DOWN),
    "timm.models.lowformer.ConvAttention": Adapter(layout="nchw", output="o_proj"),
    "timm.models.maxxvit.Attention2d": Adapter(
        layout="nchw", position=("rel_pos",), relative=True, windowed=_in_partition, note=RELATIVE
    ),
    "timm.models.maxxvit.AttentionCl": Adapter(
        layout="nhwc", position=("rel_pos",), relative=True, window=True, note=RELATIVE
    ),
    "timm.models.metaformer.Attention": Adapter(prefix=0),
    "timm.models.mvitv2.MultiScaleAttention": Adapter(
        forwards.mvit, position=("rel_pos_h", "rel_pos_w"), prepare=_no_spatial, **DOWN
    ),
    "timm.models.nest.Attention": Adapter(layout="other", window=True, windowed=_in_block_of_level),
    "timm.models.nextvit.EfficientAttention": Adapter(prefix=0),
    "timm.models.pvt_v2.Attention": Adapter(prefix=0),
    "timm.models.shvit.SHSA": Adapter(forwards.shvit, layout="nchw"),
    "timm.models.swin_transformer.WindowAttention": Adapter(
        forwards.window_attention,
        position=("relative_position_bias_table", "relative_position_index"),
        relative=True,
        window=True,
        note=WINDOW,
    ),
    "timm.models.swin_transformer_v2.WindowAttention": Adapter(
        forwards.cosine_window_attention,
        position=("cpb_mlp", "logit_scale", "relative_coords_table", "relative_position_index"),
        relative=True,
        window=True,
        note=WINDOW,
    ),
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": Adapter(
        forwards.cosine_window_attention,
        position=("meta_mlp", "logit_scale", "relative_coordinates_log"),
        relative=True,
        window=True,
        note=WINDOW,
    ),
    "timm.models.tiny_vit.Attention": Adapter(**BIASES, window=True, note=RELATIVE),
    "timm.models.tnt.Attention": Adapter(forwards.tnt, prefix=_tnt_prefix, windowed=_in_patch),
    "timm.models.twins.LocallyGroupedAttn": Adapter(head_axis=2, prefix=0, window=True),
    "timm.models.twins.GlobalSubSampleAttn": Adapter(prefix=0),
    "timm.models.visformer.Attention": Adapter(layout="nchw"),
    "timm.models.vision_transformer_relpos.RelPosAttention": Adapter(
        position=("rel_pos",), relative=True, note=RELATIVE
    ),
    "timm.models.vision_transformer_sam.Attention": Adapter(
        layout="nhwc",
        head_axis=0,
        position=("rel_pos_h", "rel_pos_w"),
        windowed=_in_windowed_block,
        prepare=_no_relative,
        note=RELATIVE,
    ),
    "timm.models.volo.Attention": Adapter(layout="nhwc"),
    "timm.models.volo.ClassAttention": Adapter(forwards.class_attention, layout="other", class_attention=True),
    "timm.models.xcit.XCA": Adapter(
        forwards.attention, position=("temperature",), lost=("temperature",), prefix=0, note=CHANNELS
    ),
}

# what computes a softmax but mixes no tokens by queries and keys: kept, and named in the report
KEPT = {
    "timm.models.davit.ChannelAttention": "mixes channels, not tokens",
    "timm.models.davit.ChannelAttentionV2": "mixes channels, not tokens",
    "timm.models.csatv2.SpatialTransformerBlock": "weighs positions of one channel, without queries and keys per image",
    "timm.models.volo.OutlookAttention": "predicts weights from one token: it has no keys",
    "timm.models.mobilevit.LinearSelfAttention": "is linear in the tokens already: one softmax over them, no keys",
    "timm.models.efficientvim.HSMSSD": "is a state-space mixer, linear in the tokens",
    "timm.models.efficientvim.EfficientViM": "weighs the heads of its stages",
    "timm.models.efficientvim.EfficientViMDistilled": "weighs the heads of its stages",
    "timm.layers.lambda_layer.LambdaLayer": "is linear in the tokens already",
    "timm.layers.global_context.GlobalContext": "pools positions to one context",
    "timm.layers.split_attn.RadixSoftmax": "weighs branches, not tokens",
    "timm.layers.split_attn.SplitAttn": "weighs branches, not tokens",
    "timm.layers.selective_kernel.SelectiveKernelAttn": "weighs branches, not tokens",
    "timm.layers.non_local_attn.BilinearAttnTransform": "mixes rows and columns by predicted maps: it has no keys",
}

# by name, so that these models need not be imported
BLOCKS = {
    "timm.models.vision_transformer.Block": BlockLayout(class_token=True),  # also of DeiT and PiT
    "timm.models.pvt_v2.Block": BlockLayout(),
    # here the MLP is inside a module that adds the residual
    "timm.models.efficientvit_msra.EfficientVitBlock": BlockLayout(
        ("ffn1.m", BEFORE), ("ffn1.m.pw2", BEFORE), ("ffn1.m", AFTER), ("mixer.m", AFTER)
    ),
    "timm.models.lowformer.LowFormerBlock": BlockLayout(
        ("mlp.main", BEFORE), ("mlp.main.fc2", BEFORE), ("mlp.main", AFTER), ("attn.main", AFTER)
    ),
    "timm.models.cpubone.CPUBoneBlock": BlockLayout(
        ("total.0.1.main.1", BEFORE), ("total.0.1.main.3", BEFORE), ("total.0.1.main", AFTER), ("total.0.0.main", AFTER)
    ),
    "timm.models.twins.Block": BlockLayout(),
    "timm.models.tnt.Block": BlockLayout(msa=("attn_out", AFTER)),  # among patches, as its MLP
    "timm.models.mvitv2.MultiScaleBlock": BlockLayout(msa=("drop_path1", BEFORE)),  # the attention returns a pair
    "timm.models.swin_transformer.SwinTransformerBlock": BlockLayout(msa=("drop_path1", BEFORE)),  # outside the windows
}
