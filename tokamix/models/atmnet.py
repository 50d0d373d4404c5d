"""ATMNet: pyramids of active token mixers.

Active Token Mixer, arXiv 2203.06108, https://github.com/microsoft/ActiveMLP. Sizes follow the authors' code: the last
stages that the paper's table 10 prints for S, B and L do not give the parameters and FLOPs it prints elsewhere. Maps
stay channels-last; a stage begins with its own downsampling, which the authors put into the last block of the previous
stage. Their checkpoints load through `checkpoint_filter_fn`.
"""

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import DropPath, calculate_drop_path_rates
from timm.models import build_model_with_cfg, generate_default_cfgs
from torch import Tensor, nn

from tokamix.layers import GELU, DepthwiseConv, LayerNorm, MapConv, Mlp, channels_last, map_to_tokens, tokens_to_map
from tokamix.mixers.active_token import ActiveOffset, ActiveTokenMixer
from tokamix.models._backbone import Pyramid, PyramidStage, image_cfg, register_model
from tokamix.ops.active_token.op import GatherPlan


class ActiveBlock(nn.Module):
    """A pre-norm block: active token mixer and MLP; optionally with a layer that predicts offsets."""

    def __init__(
        self,
        dim: int,
        share: int,
        contexts: int,
        offsets: str,
        predict: bool,
        mlp_ratio: float,
        drop_path: float,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.offset = ActiveOffset(dim, share, contexts, **dd) if predict else None
        self.norm1 = LayerNorm(dim, **dd)
        self.mixer = ActiveTokenMixer(dim, share, contexts, offsets, predict=False, **dd)
        self.norm2 = LayerNorm(dim, **dd)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=GELU, **dd)
        self.drop_path = DropPath(drop_path)

    def forward(
        self, x: Tensor, grid: tuple[int, int], offset: Tensor | GatherPlan | None
    ) -> tuple[Tensor, Tensor | GatherPlan | None]:
        """Tokens (B, H*W, C) and the latest offsets -> new tokens, and new offsets if the block predicts them."""
        if self.offset is not None:
            offset = self.mixer.plan(x, grid, self.offset(x))  # for the following blocks, too
        x = x + self.drop_path(self.mixer(self.norm1(x), grid, offset))
        return x + self.drop_path(self.mlp(self.norm2(x))), offset


class PositionEncoder(nn.Module):
    """x + depthwise 3x3 convolution of x: the zero padding of the map encodes positions."""

    def __init__(self, dim: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.conv = DepthwiseConv(dim, residual=True, device=device, dtype=dtype)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Encode positions into tokens (B, H*W, C)."""
        return self.conv(tokens_to_map(x, grid)).flatten(1, 2)


class ActiveStage(PyramidStage):
    """A stage whose blocks share offsets until one of them predicts new ones.

    The stage has one position encoder; as in the authors' code it runs before every block in `renewals`, not once
    as in the paper.
    """

    def __init__(
        self, blocks: list[nn.Module], renewals: set[int], peg: nn.Module | None, downsample: nn.Module | None
    ) -> None:
        super().__init__(blocks, downsample)
        self.renewals = renewals
        self.peg = peg

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H', W', C')."""
        x, grid = map_to_tokens(self.downsample(x))
        offset = None
        for i, block in enumerate(self.blocks):
            if self.peg is not None and i in self.renewals:
                x = self.peg(x, grid)
            x, offset = self.run(block, x, grid, offset)
        return tokens_to_map(x, grid)


class ATMStem(MapConv):
    """Images (B, in_chans, H, W) -> a map of overlapping 7x7 patches, four pixels apart."""

    def __init__(self, in_chans: int, dim: int, device: Any = None, dtype: Any = None) -> None:
        super().__init__(in_chans, dim, 7, stride=4, padding=2, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> (B, h, w, dim)."""
        return super().forward(channels_last(x).contiguous()).contiguous()


class ATMNet(Pyramid):
    """A pyramid of active token mixers.

    Args:
        in_chans: channels of the images.
        num_classes: classes; 0 for no classifier.
        global_pool: "avg" or "" (no pooling).
        dims: channels of each stage.
        depths: blocks of each stage.
        mlp_ratios: hidden channels of each stage's MLPs, as a multiple of the stage's.
        shares: neighbouring channels that share an offset, for each stage.
        offset_interval: number of blocks that share offsets: the first of them predicts new ones (but never the last
            block of a stage, unless it is the only one).
        offsets: "axial", or the paper's ablations "joint" and "zero"; see `ActiveTokenMixer`.
        contexts: samples for each channel and direction; 3 in the paper's ablation.
        peg: encode positions before offsets are predicted.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0.
    """

    min_side = 3

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        dims: Sequence[int] = (64, 128, 320, 512),
        depths: Sequence[int] = (2, 3, 10, 3),
        mlp_ratios: Sequence[float] = (4, 4, 4, 4),
        shares: Sequence[int] = (2, 4, 4, 8),
        offset_interval: int = 2,
        offsets: str = "axial",
        contexts: int = 1,
        peg: bool = True,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.in_chans = in_chans
        self.stem = ATMStem(in_chans, dims[0], **dd)
        drop_paths = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        self.stages = nn.ModuleList()
        self.feature_info = []
        for i, (dim, depth) in enumerate(zip(dims, depths, strict=True)):
            renewals = set(range(0, max(depth - 1, 1), offset_interval))
            blocks: list[nn.Module] = [
                ActiveBlock(
                    dim,
                    shares[i],
                    contexts,
                    offsets,
                    predict=j in renewals and offsets != "zero",
                    mlp_ratio=mlp_ratios[i],
                    drop_path=drop_paths[i][j],
                    **dd,
                )
                for j in range(depth)
            ]
            downsample = MapConv(dims[i - 1], dim, 3, stride=2, padding=1, **dd) if i > 0 else None
            encoder = PositionEncoder(dim, **dd) if peg else None
            self.stages.append(ActiveStage(blocks, renewals, encoder, downsample))
            self.feature_info.append({"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"})
        self.norm = nn.LayerNorm(dims[-1], **dd)
        self._build_head(dims[-1], num_classes, global_pool, drop_rate, **dd)
        self.init_weights(needs_reset=False)

    def _init_module(self, module: nn.Module, needs_reset: bool) -> None:
        if isinstance(module, nn.Conv2d):
            fan_out = math.prod(module.kernel_size) * module.out_channels // module.groups
            nn.init.normal_(module.weight, std=math.sqrt(2 / fan_out))
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        else:
            super()._init_module(module, needs_reset)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The position encoders' kernels, as in the authors' training."""
        return {name for name, _ in self.named_parameters() if ".peg." in name}

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's layer groups; a stage's position encoder belongs to the group of its downsampling."""
        groups = super().group_matcher(coarse)
        if not coarse:
            groups["blocks"].insert(2, (r"^stages\.(\d+)\.peg", (0,)))
        return groups


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Map the authors' names and shapes to ours; our own state dicts pass unchanged."""
    if "patch_embed.proj.weight" not in state_dict:
        return state_dict
    renamed = {}
    for name, value in state_dict.items():
        name = re.sub(r"^blocks\.(\d+)\.\d+\.downsample\.proj", lambda m: f"stages.{int(m[1]) + 1}.downsample", name)
        for pattern, ours in _AUTHORS_NAMES.items():
            name = re.sub(pattern, ours, name)
        # a 1x1 convolution is a Linear here
        renamed[name] = value.flatten(1) if re.search(r"\.embed\.\d\.weight$", name) else value
    return renamed


_AUTHORS_NAMES = {
    r"^patch_embed\.proj": "stem",
    r"^blocks\.(\d+)\.(\d+)": r"stages.\1.blocks.\2",
    r"^pos_blocks\.(\d+)\.proj": r"stages.\1.peg.conv",
    r"\.atm\.atm_w": ".mixer.embed.0",
    r"\.atm\.atm_h": ".mixer.embed.1",
    r"\.atm\.atm_c": ".mixer.embed_query",
    r"\.atm\.": ".mixer.",
    r"\.offset_layer\.": ".offset.",
}


def _cfg(top1: float) -> dict[str, Any]:
    return image_cfg(
        first_conv="stem",
        pool_size=(7, 7),
        paper_ids="arXiv:2203.06108",
        paper_name="Active Token Mixer",
        origin_url="https://github.com/microsoft/ActiveMLP",
        notes=(f"top1={top1}",),
    )


default_cfgs = generate_default_cfgs(
    {
        "atmnet_xtiny": _cfg(79.7),
        "atmnet_tiny": _cfg(82.0),
        "atmnet_small": _cfg(83.1),
        "atmnet_base": _cfg(83.5),
        "atmnet_large": _cfg(83.8),
    }
)

_VARIANTS: dict[str, dict[str, Any]] = {
    "atmnet_xtiny": {"depths": (2, 2, 4, 2)},
    "atmnet_tiny": {"depths": (2, 3, 10, 3)},
    "atmnet_small": {"depths": (3, 4, 18, 3), "mlp_ratios": (8, 8, 4, 4), "offset_interval": 6},
    "atmnet_base": {"depths": (3, 8, 27, 3), "mlp_ratios": (8, 8, 4, 4), "offset_interval": 6},
    "atmnet_large": {"depths": (3, 4, 24, 3), "dims": (96, 192, 384, 768), "offset_interval": 6},
}


def _create_atmnet(name: str, pretrained: bool, **kwargs: Any) -> ATMNet:
    return build_model_with_cfg(
        ATMNet,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": (0, 1, 2, 3), "feature_cls": "getter"},
        **(_VARIANTS[name] | kwargs),
    )


@register_model
def atmnet_xtiny(pretrained: bool = False, **kwargs: Any) -> ATMNet:
    """ATMNet-xT: 15.3 M parameters, 2.2 GMACs."""
    return _create_atmnet("atmnet_xtiny", pretrained, **kwargs)


@register_model
def atmnet_tiny(pretrained: bool = False, **kwargs: Any) -> ATMNet:
    """ATMNet-T: 27.2 M parameters, 4.0 GMACs."""
    return _create_atmnet("atmnet_tiny", pretrained, **kwargs)


@register_model
def atmnet_small(pretrained: bool = False, **kwargs: Any) -> ATMNet:
    """ATMNet-S: 38.6 M parameters, 6.9 GMACs."""
    return _create_atmnet("atmnet_small", pretrained, **kwargs)


@register_model
def atmnet_base(pretrained: bool = False, **kwargs: Any) -> ATMNet:
    """ATMNet-B: 52.2 M parameters, 10.1 GMACs."""
    return _create_atmnet("atmnet_base", pretrained, **kwargs)


@register_model
def atmnet_large(pretrained: bool = False, **kwargs: Any) -> ATMNet:
    """ATMNet-L: 76.2 M parameters, 12.3 GMACs."""
    return _create_atmnet("atmnet_large", pretrained, **kwargs)
