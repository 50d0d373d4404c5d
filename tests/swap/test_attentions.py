"""Every attention of the tables, one small module of each class: the adapters against the host's own forward."""

import copy
import importlib
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.swap.hosts import skip_if_missing, skip_if_mixed
from tokamix.swap import swap_mixer
from tokamix.swap.attention import Swapped
from tokamix.swap.inspect import ADAPTERS

TOKENS, MAP, CHANNELS = (2, 16, 24), (2, 4, 4, 24), (2, 24, 4, 4)
BIAS = {"key_dim": 6, "num_heads": 2, "attn_ratio": 2, "resolution": 4}
WINDOW = {"num_heads": 2, "window_size": (4, 4)}
# arguments, shape of the input, further arguments of the call
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...], tuple[Any, ...]]] = {
    "timm.layers.attention.Attention": ({"dim": 24, "num_heads": 2}, TOKENS, ()),
    "timm.layers.attention.AttentionRope": ({"dim": 24, "num_heads": 2}, TOKENS, ()),
    "timm.layers.diff_attention.DiffAttention": ({"dim": 24, "num_heads": 2}, TOKENS, ()),
    "timm.layers.attention2d.MultiQueryAttention2d": ({"dim": 24, "num_heads": 2, "kv_stride": 2}, CHANNELS, ()),
    "timm.layers.attention2d.Attention2d": ({"dim": 24, "num_heads": 2}, CHANNELS, ()),
    "timm.layers.attention_pool.AttentionPoolLatent": ({"in_features": 24, "num_heads": 2}, TOKENS, ()),
    "timm.layers.attention_pool.AttentionPoolPrr": ({"dim": 24, "num_heads": 2}, TOKENS, ()),
    "timm.layers.attention_pool2d.AttentionPool2d": ({"in_features": 24, "feat_size": 4, "num_heads": 2}, CHANNELS, ()),
    "timm.layers.attention_pool2d.RotAttentionPool2d": (
        {"in_features": 24, "ref_feat_size": 4, "num_heads": 2, "head_dim": 12},
        CHANNELS,
        (),
    ),
    "timm.layers.bottleneck_attn.BottleneckAttn": ({"dim": 24, "feat_size": (4, 4), "num_heads": 2}, CHANNELS, ()),
    "timm.layers.halo_attn.HaloAttn": (
        {"dim": 24, "feat_size": (4, 4), "num_heads": 2, "block_size": 2, "halo_size": 1},
        CHANNELS,
        (),
    ),
    "timm.models.vision_transformer.ParallelScalingBlock": ({"dim": 24, "num_heads": 2}, TOKENS, ()),
    "timm.models.vision_transformer.DiffParallelScalingBlock": ({"dim": 24, "num_heads": 2}, TOKENS, ()),
    "timm.models.beit.Attention": ({"dim": 24, "qkv_bias": True, **WINDOW}, (2, 17, 24), ()),
    "timm.models.cait.TalkingHeadAttn": ({"dim": 24, "num_heads": 2}, TOKENS, ()),
    "timm.models.cait.ClassAttn": ({"dim": 24, "num_heads": 2}, TOKENS, ()),
    "timm.models.convit.MHSA": ({"dim": 24, "num_heads": 2}, TOKENS, ()),
    "timm.models.convit.GPSA": ({"dim": 24, "num_heads": 2}, TOKENS, ()),
    "timm.models.cpubone.ConvAttention": ({"input_dim": 60, "att_stride": 2}, (2, 60, 4, 4), ()),
    "timm.models.crossvit.CrossAttention": ({"dim": 24, "num_heads": 2}, TOKENS, ()),
    "timm.models.davit.WindowAttention": ({"dim": 24, **WINDOW}, TOKENS, ()),
    "timm.models.edgenext.CrossCovarianceAttn": ({"dim": 24, "num_heads": 2}, TOKENS, ()),
    "timm.models.efficientformer.Attention": ({"dim": 24, **BIAS}, TOKENS, ()),
    "timm.models.efficientformer_v2.Attention2d": ({"dim": 24, **BIAS}, CHANNELS, ()),
    "timm.models.efficientformer_v2.Attention2dDownsample": ({"dim": 24, **BIAS}, CHANNELS, ()),
    "timm.models.efficientvit_msra.CascadedGroupAttention": ({"dim": 24, **BIAS, "kernels": (3, 3)}, CHANNELS, ()),
    "timm.models.eva.EvaAttention": ({"dim": 24, "num_heads": 2, "norm_layer": nn.LayerNorm}, TOKENS, ()),
    "timm.models.fastvit.Attention": ({"dim": 24, "head_dim": 12}, CHANNELS, ()),
    "timm.models.gcvit.WindowAttentionGlobal": (
        {"dim": 24, **WINDOW, "use_global": True},
        (4, 16, 24),  # two images of two windows
        (torch.randn(2, 4, 4, 24, dtype=torch.float64),),
    ),
    "timm.models.hiera.MaskUnitAttention": (
        {"dim": 24, "dim_out": 24, "heads": 2, "window_size": 4, "use_mask_unit_attn": True},
        TOKENS,
        (),
    ),
    "timm.models.hieradet_sam2.MultiScaleAttention": ({"dim": 24, "dim_out": 24, "num_heads": 2}, MAP, ()),
    "timm.models.iformer.SHMA": ({"dim": 24}, CHANNELS, ()),
    "timm.models.levit.Attention": ({"dim": 24, **BIAS}, TOKENS, ()),
    "timm.models.levit.AttentionDownsample": ({"in_dim": 24, "out_dim": 32, **BIAS}, TOKENS, ()),
    "timm.models.lowformer.ConvAttention": ({"input_dim": 60, "att_stride": 2}, (2, 60, 4, 4), ()),
    "timm.models.maxxvit.Attention2d": ({"dim": 24, "dim_head": 12}, CHANNELS, ()),
    "timm.models.maxxvit.AttentionCl": ({"dim": 24, "dim_head": 12}, MAP, ()),
    "timm.models.metaformer.Attention": ({"dim": 24, "head_dim": 12}, TOKENS, ()),
    "timm.models.mvitv2.MultiScaleAttention": (
        {"dim": 24, "dim_out": 24, "feat_size": (4, 4), "num_heads": 2, "kernel_kv": (3, 3), "stride_kv": (2, 2)},
        (2, 17, 24),
        ((4, 4),),
    ),
    "timm.models.nest.Attention": ({"dim": 24, "num_heads": 2}, (2, 3, 16, 24), ()),
    "timm.models.nextvit.EfficientAttention": ({"dim": 24, "head_dim": 12, "sr_ratio": 2}, TOKENS, ()),
    "timm.models.pvt_v2.Attention": ({"dim": 24, "num_heads": 2, "sr_ratio": 2}, TOKENS, ((4, 4),)),
    "timm.models.shvit.SHSA": (
        {"dim": 24, "qk_dim": 4, "pdim": 8, "norm_layer": nn.BatchNorm2d, "act_layer": nn.ReLU},
        CHANNELS,
        (),
    ),
    "timm.models.swin_transformer.WindowAttention": ({"dim": 24, **WINDOW}, TOKENS, ()),
    "timm.models.swin_transformer_v2.WindowAttention": ({"dim": 24, **WINDOW}, TOKENS, ()),
    "timm.models.swin_transformer_v2_cr.WindowMultiHeadAttention": ({"dim": 24, **WINDOW}, TOKENS, ()),
    "timm.models.tiny_vit.Attention": (
        {"dim": 24, "key_dim": 12, "num_heads": 2, "attn_ratio": 1, "resolution": (4, 4)},
        TOKENS,
        (),
    ),
    "timm.models.tnt.Attention": ({"dim": 24, "hidden_dim": 12, "num_heads": 2}, TOKENS, ()),
    "timm.models.twins.LocallyGroupedAttn": ({"dim": 24, "num_heads": 2, "ws": 2}, TOKENS, ((4, 4),)),
    "timm.models.twins.GlobalSubSampleAttn": ({"dim": 24, "num_heads": 2, "sr_ratio": 2}, TOKENS, ((4, 4),)),
    "timm.models.visformer.Attention": ({"dim": 24, "num_heads": 2}, CHANNELS, ()),
    "timm.models.vision_transformer_relpos.RelPosAttention": ({"dim": 24, "num_heads": 2}, TOKENS, ()),
    "timm.models.vision_transformer_sam.Attention": (
        {"dim": 24, "num_heads": 2, "use_rel_pos": True, "input_size": (4, 4)},
        MAP,
        (),
    ),
    "timm.models.volo.Attention": ({"dim": 24, "num_heads": 2}, MAP, ()),
    "timm.models.volo.ClassAttention": ({"dim": 24, "num_heads": 2}, TOKENS, ()),
    "timm.models.xcit.XCA": ({"dim": 24, "num_heads": 2}, TOKENS, ()),
    "torchvision.models.swin_transformer.ShiftedWindowAttention": (
        {"dim": 24, "window_size": [2, 2], "shift_size": [1, 1], "num_heads": 2},
        (2, 5, 6, 24),
        (),
    ),
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": (
        {"dim": 24, "window_size": [2, 2], "shift_size": [1, 1], "num_heads": 2},
        (2, 5, 6, 24),
        (),
    ),
    "tokamix.layers.heads.SoftmaxProduct": ({"scale": 0.3}, (2, 2, 16, 12), ()),
}
# here softmax among tokens is not the host's own function, or other parts are dropped with the position biases
CHANGED = ("TalkingHead", "XCA", "CrossCovariance", "efficientformer_v2.Attention2d")
# tested with the models that have them
ELSEWHERE = ("transformers.", "torch.nn.", "timm.models.coat.", "timm.models.gemma4_vit.")


def create(name: str) -> tuple[Any, tuple[Any, ...]]:
    """A module with random parameters in float64, and the arguments of a call."""
    torch.manual_seed(0)
    options, shape, rest = CASES[name]
    module, _, kind = name.rpartition(".")
    skip_if_missing(module.removeprefix("timm.models."))
    attention = getattr(importlib.import_module(module), kind)(**options).double()
    attention.eval()
    with torch.no_grad():
        for parameter in attention.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    return attention, (x, x, x) if kind == "SoftmaxProduct" else (x, *rest)


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


class Softmax(TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += "softmax" in func.overloadpacket.__name__ or "scaled_dot" in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))


def test_every_adapter_has_a_case() -> None:
    assert set(ADAPTERS) == {*CASES, *(name for name in ADAPTERS if name.startswith(ELSEWHERE))}


@pytest.mark.parametrize("name", [name for name in CASES if not any(part in name for part in CHANGED)])
def test_softmax_gives_the_host(name: str) -> None:
    """With the host's own product and its position biases, the swapped module is the same function."""
    attention, args = create(name)
    skip_if_mixed(name.split(".")[-2])
    with torch.no_grad():
        expected = first(attention(*args))
        report = swap_mixer(attention, "softmax")
        assert list(report.replaced) == [""]
        assert not report.dropped
        torch.testing.assert_close(first(attention(*args)), expected, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", [name for name in CASES if any(part in name for part in CHANGED)])
def test_softmax_drops_what_it_cannot_use(name: str) -> None:
    """Talking heads and temperatures of channels: dropped and named, not left without effect."""
    attention, args = create(name)
    report = swap_mixer(attention, "softmax")
    if "Downsample" not in name:
        assert report.dropped
        assert report.notes
    first(attention(*args)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in attention.parameters())


@pytest.mark.parametrize("name", CASES)
def test_sima_in_every_attention(name: str) -> None:
    attention, args = create(name)
    with torch.no_grad():
        shape, before = first(attention(*args)).shape, first(attention(*args))
    report = swap_mixer(attention)
    assert isinstance(attention, Swapped)
    assert not report.added
    assert {n for n in report.dropped if n not in dict(attention.named_parameters())} == set(report.dropped)
    with Softmax() as mode:
        out = first(attention(*args))
    assert mode.calls == 0
    assert out.shape == shape
    assert not torch.allclose(out, before)
    out.square().sum().backward()
    gradients = {n: p.grad for n, p in attention.named_parameters()}
    assert not [n for n, g in gradients.items() if g is None or not g.isfinite().all()]
    with torch.no_grad():
        for twin in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
            assert type(twin) is type(attention)
            torch.testing.assert_close(first(twin(*args)), out)
