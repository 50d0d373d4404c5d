"""Any timm model as a backbone for dense prediction: feature maps, fine to coarse, of images of any size."""

import copy
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple
from torch import Tensor, nn

from tokamix.checkpoint import load_checkpoint, read_checkpoint, unwrap
from tokamix.dense.vit_pyramid import VitPyramid, select_blocks
from tokamix.layers import channels_first, channels_last
from tokamix.models._backbone import Pyramid
from tokamix.models._registry import create_model

# arguments that make timm models take images of any size; the first set that a model accepts is used
ANY_SIZE_KWARGS: tuple[dict[str, Any], ...] = (
    {"strict_img_size": False, "always_partition": True},  # Swin: shifted windows in the last stage too
    {"strict_img_size": False},
    {"dynamic_img_size": True},
    {},
)
LEVEL_NORM = re.compile(r"norm_?(\d)\.(weight|bias)")  # a level norm in ATMNet's and Swin's segmentation code


class LevelNorms(nn.ModuleList):
    """A LayerNorm over the channels of each level (B, C, H, W)."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__(nn.LayerNorm(dim) for dim in channels)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Normalise each level; the maps stay channels-last in memory."""
        return [channels_first(norm(channels_last(x))) for norm, x in zip(self, maps, strict=True)]


class DenseBackbone(nn.Module):
    """A model's feature maps at strides 4 to 32, normalised or rescaled for a neck; see `create_backbone`.

    Args:
        body: a timm model.
        indices: of the features that are used; None if the body returns the list of maps itself.
        levels: applied to the maps, list -> list.
        channels: of the levels, fine to coarse.
        strides: of the levels relative to the image.
        divisor: images are padded to multiples of it (and at least to the largest stride) at the right and bottom.
        in_chans: channels of the images, if known.
        fixed_size: (height, width) of the only images the body takes; smaller ones are padded to it. None: any size.
    """

    def __init__(
        self,
        body: nn.Module,
        indices: Sequence[int] | None,
        levels: nn.Module,
        channels: Sequence[int],
        strides: Sequence[int],
        divisor: int,
        in_chans: int | None = None,
        fixed_size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.body, self.levels, self.divisor = body, levels, divisor
        self.in_chans, self.fixed_size = in_chans, fixed_size
        self.indices = None if indices is None else list(indices)
        self.channels, self.strides = tuple(channels), tuple(strides)

    def pad(self, images: Tensor) -> Tensor:
        """Pad images at the right and bottom with zero, the mean colour, to a size that the body takes."""
        height, width = images.shape[-2:]
        if self.in_chans not in (None, images.shape[1]):
            raise ValueError(
                f"this backbone takes images of {self.in_chans} channels, got {images.shape[1]}; create it with"
                f" in_chans={images.shape[1]}"
            )
        if self.fixed_size is None:
            right, bottom = (_padded(side, self.divisor, self.strides[-1]) - side for side in (width, height))
        else:
            bottom, right = self.fixed_size[0] - height, self.fixed_size[1] - width
            if min(bottom, right) < 0:
                raise ValueError(
                    f"{type(self.body).__name__} takes images of at most {self.fixed_size[0]}x{self.fixed_size[1]} px,"
                    f" got {height}x{width}; create it with img_size=({height}, {width}) (model_kwargs.img_size in a"
                    " recipe), use smaller images, or choose another model"
                )
        # always with symbolic sizes: a branch would specialise an exported graph to sizes that need no padding
        symbolic = isinstance(right, torch.SymInt) or isinstance(bottom, torch.SymInt)
        return F.pad(images, (0, right, 0, bottom)) if symbolic or right or bottom else images

    def forward(self, images: Tensor) -> list[Tensor]:
        """Images (B, in_chans, H, W) -> maps (B, channels[i], H_i, W_i) of the padded images."""
        return self.levels(self._maps(self.pad(images)))

    def _maps(self, images: Tensor) -> list[Tensor]:
        if self.indices is None:
            return list(self.body(images))
        return self.body.forward_intermediates(  # type: ignore[operator]
            images, indices=self.indices, output_fmt="NCHW", intermediates_only=True
        )

    @torch.jit.ignore
    def skip_levels(self, count: int) -> "DenseBackbone":
        """A backbone on the same body without layers on the first `count` levels, for necks that do not use them.

        Layers there would cost time and get no gradient, which DistributedDataParallel does not allow.
        """
        levels = copy.deepcopy(self.levels)  # this backbone stays unchanged
        layers = levels.levels if isinstance(levels, VitPyramid) else levels
        if isinstance(layers, nn.ModuleList):
            for i in range(count):
                layers[i] = nn.Identity()
        rest = (self.channels, self.strides, self.divisor, self.in_chans, self.fixed_size)
        return DenseBackbone(self.body, self.indices, levels, *rest)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the body's blocks in the backward pass."""
        self.body.set_grad_checkpointing(enable)  # type: ignore[operator]

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay."""
        names_of_body = getattr(self.body, "no_weight_decay", None)
        own = {name for name, _ in self.named_parameters()}
        return {f"body.{name}" for name in names_of_body()} & own if callable(names_of_body) else set()


class DenseModel(nn.Module):
    """Base class of segmenters and detectors."""

    method = ""
    backbone: DenseBackbone

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the activations of the backbone's blocks in the backward pass."""
        self.backbone.set_grad_checkpointing(enable)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters without weight decay."""
        return {f"backbone.{name}" for name in self.backbone.no_weight_decay()}


def create_backbone(
    model: str | nn.Module,
    *,
    level_norm: bool = True,
    pretrained: bool = False,
    checkpoint: str | Path | Mapping[str, Any] | None = None,
    drop_path: float | None = None,
    **kwargs: Any,
) -> DenseBackbone:
    """Create a dense backbone from a timm model.

    Pyramids give their levels from stride 4 on; columnar models (DeiT, XCiT and similar) give four levels through
    `VitPyramid`. If a model takes images of one size only, smaller ones are padded to it; many of these models take
    another `img_size`.

    Args:
        model: name of a timm model, or a model; a `DenseBackbone` is returned unchanged.
        level_norm: add a LayerNorm on each level of pyramids with channels-last maps (ATMNet, STViT, AMixer, Swin),
            whose features are unnormalised residual sums.
        pretrained: load timm's weights.
        checkpoint: load weights from a file, folder, hub name or state dict, without those of a classifier and with
            those of the level norms if there are any.
        drop_path: stochastic depth rate; None: the model's default.
        kwargs: arguments of the model.
    """
    if isinstance(model, DenseBackbone):
        return model
    if isinstance(model, str):
        if drop_path is not None:
            kwargs["drop_path_rate"] = drop_path
        body = _create(model, pretrained, kwargs)
    else:
        if drop_path is not None or kwargs:
            names = ", ".join([*kwargs, *(["drop_path"] if drop_path is not None else [])])
            raise ValueError(f"a model object takes no further arguments, got {names}; pass the model's name instead")
        body = model
    info = [dict(part) for part in getattr(body, "feature_info", [])]
    if not info:
        raise ValueError(f"{type(body).__name__} has no feature_info; choose a timm model that supports features_only")
    if not hasattr(body, "forward_intermediates"):
        if isinstance(model, str) and checkpoint is None:
            return _from_feature_list(model, pretrained, kwargs)
        raise ValueError(
            f"{type(body).__name__} has no forward_intermediates; pass its name and no checkpoint to use features_only"
        )
    state = None if checkpoint is None else _read(checkpoint)
    saved = {} if state is None else split_levels(state)
    reductions = [part["reduction"] for part in info]
    is_column = len(set(reductions)) == 1 and len(info) > 1
    indices = select_blocks(len(info)) if is_column else [i for i, stride in enumerate(reductions) if stride >= 4]
    # resolved before pruning, which drops everything after the last of them
    _prune(body, indices)
    channels, strides = ([info[i][key] for i in indices] for key in ("num_chs", "reduction"))
    # the classifier is gone, so its weights are not needed
    fresh = [] if state is None else load_checkpoint(body, state, strict=False).fresh
    missing = sorted(set(fresh) & {name for name, _ in body.named_parameters()})
    if missing:
        raise ValueError(
            f"the checkpoint lacks {len(missing)} parameters of {type(body).__name__}, for example {missing[0]}"
        )
    _freeze_unused(body)
    levels: nn.Module = nn.Identity()
    if is_column:
        levels = VitPyramid(channels[0], strides[0])
        divisor = strides[0] if strides[0] in (8, 16) else math.lcm(strides[0], 16)
        channels, strides = list(levels.channels), list(levels.strides)
    else:
        if level_norm and getattr(body, "output_fmt", "") == "NHWC":
            levels = LevelNorms(channels)
        # our pyramids round up when they halve; others may drop the last odd row
        exact = isinstance(body, Pyramid) and body.output_fmt == "NHWC"
        divisor = strides[0] if exact else strides[-1] * _block_size(body)
    if saved and levels.state_dict():
        levels.load_state_dict(saved)
    in_chans = kwargs.get("in_chans", 3) if isinstance(model, str) else None
    backbone = DenseBackbone(body, indices, levels, channels, strides, divisor, in_chans)
    return _set_fixed_size(backbone, kwargs, reductions[-1])


def _padded(side: int, divisor: int, least: int) -> int:
    """The next multiple of `divisor` from `side` on, at least `least`."""
    multiple = (side + divisor - 1) // divisor * divisor
    # `max` of symbolic sizes would specialise an exported graph to the larger one
    return torch.sym_max(multiple, least) if isinstance(side, torch.SymInt) else max(multiple, least)


def _block_size(body: nn.Module) -> int:
    """Side of the blocks into which timm's bilinear and halo attention divide a map; 1 for other models."""
    sizes = (getattr(module, "block_size", 1) for module in body.modules())
    return max(size for size in sizes if isinstance(size, int))


def _create(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    for i, extra in enumerate(ANY_SIZE_KWARGS):
        try:
            return create_model(name, pretrained=pretrained, **{**extra, **kwargs})
        except TypeError as error:  # an argument that the model does not have
            if i == len(ANY_SIZE_KWARGS) - 1 or not any(key in str(error) for key in extra):
                raise
    raise AssertionError("the last attempt returns or raises")


def _read(checkpoint: str | Path | Mapping[str, Any]) -> dict[str, Tensor]:
    """The state dict of a classifier or backbone, or the backbone's part of a segmenter's or detector's."""
    state = unwrap(checkpoint if isinstance(checkpoint, Mapping) else read_checkpoint(checkpoint))
    if any(name.startswith("backbone.") for name in state):
        state = {n.removeprefix("backbone."): v for n, v in state.items() if n.startswith("backbone.")}
    return {name.removeprefix("body."): value for name, value in state.items()}


def split_levels(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Remove the entries of `DenseBackbone.levels`, under our names or the papers', from a state dict; return them."""
    levels = {n.removeprefix("levels."): state.pop(n) for n in list(state) if n.startswith("levels.")}
    norms = {name: match for name in state if (match := LEVEL_NORM.fullmatch(name))}
    if any(match[1] == "0" for match in norms.values()):  # norms numbered from 1 belong to blocks
        levels |= {f"{match[1]}.{match[2]}": state.pop(name) for name, match in norms.items()}
    return levels


def _from_feature_list(name: str, pretrained: bool, kwargs: dict[str, Any]) -> DenseBackbone:
    """A backbone from an older timm model, which supports only `features_only`."""
    info = create_model(name, features_only=True, device="meta").feature_info
    indices = [i for i, stride in zip(info.out_indices, info.reduction(), strict=True) if stride >= 4]
    body = create_model(name, pretrained=pretrained, features_only=True, out_indices=indices, **kwargs)
    strides = body.feature_info.reduction()
    channels = body.feature_info.channels()
    in_chans = kwargs.get("in_chans", 3)
    backbone = DenseBackbone(body, None, nn.Identity(), channels, strides, strides[-1], in_chans)
    return _set_fixed_size(backbone, kwargs, strides[-1])


@torch.no_grad()
def _set_fixed_size(backbone: DenseBackbone, kwargs: dict[str, Any], stride: int) -> DenseBackbone:
    """Set `fixed_size` if the body, of this stride, takes images of one size only."""
    cfg = getattr(backbone.body, "pretrained_cfg", None) or {}
    size = (cfg.get("input_size") or (3, 224, 224))[1:]
    if cfg.get("fixed_input_size"):  # timm sets it also for models created to take any size, so try
        weight, training = next(backbone.body.parameters()), backbone.body.training
        first = next((m.in_channels for m in backbone.body.modules() if isinstance(m, nn.Conv2d)), 3)
        try:
            backbone.body.eval()
            backbone._maps(weight.new_zeros(1, backbone.in_chans or first, 2 * stride, 3 * stride))
        except (AssertionError, RuntimeError, ValueError):
            height, width = to_2tuple(kwargs.get("img_size") or size)
            backbone.fixed_size = (height, width)
        finally:
            backbone.body.train(training)
    return backbone


def _prune(body: nn.Module, indices: Sequence[int]) -> None:
    """Remove the layers after the last feature."""
    prune = getattr(body, "prune_intermediate_layers", None)
    try:
        if prune is not None:
            prune(list(indices), prune_norm=True, prune_head=True)
            return
    except AssertionError:  # the head needs its pooling; the blocks are removed by then
        pass
    for name in ("norm", "head"):
        if isinstance(getattr(body, name, None), nn.Module):
            setattr(body, name, nn.Identity())


def _freeze_unused(body: nn.Module) -> None:
    """Freeze layers after the maps: they get no gradient, which DistributedDataParallel does not allow."""
    for name in ("head", "fc_norm", "attn_pool", "conv_head", "final_conv", "pre_classifier"):
        part = getattr(body, name, None)
        if isinstance(part, nn.Module):
            part.requires_grad_(False)
    late = ("class_blocks", "cls_attn_blocks", "blocks_token_only")
    # the class token is added after the blocks; timm 1.0.31 prunes it
    if any(hasattr(body, name) for name in late) and body.cls_token is not None:
        body.cls_token.requires_grad_(False)
