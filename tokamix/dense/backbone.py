"""Any timm model as a backbone for dense prediction: a few maps, fine to coarse, of images of any size."""

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
from tokamix.dense.vit_pyramid import VitPyramid, taps
from tokamix.layers import channels_first, channels_last
from tokamix.models._backbone import Pyramid
from tokamix.models._registry import create_model

# what some of timm's models must be told before they take images of any size; the first that a model knows is used
ANY_SIZE: tuple[dict[str, Any], ...] = (
    {"strict_img_size": False, "always_partition": True},  # Swin: windows shift in the last stage too
    {"strict_img_size": False},
    {"dynamic_img_size": True},
    {},
)
LEVEL_NORM = re.compile(r"norm_?(\d)\.(weight|bias)")  # a level's norm in ATMNet's and Swin's code for segmentation


class LevelNorms(nn.ModuleList):
    """A LayerNorm over the channels of each level (B, C, H, W)."""

    def __init__(self, channels: Sequence[int]) -> None:
        super().__init__(nn.LayerNorm(dim) for dim in channels)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Normalise each level; the maps stay channels-last in memory."""
        return [channels_first(norm(channels_last(x))) for norm, x in zip(self, maps, strict=True)]


class DenseBackbone(nn.Module):
    """A model's maps at strides 4 to 32, normalised or scaled for the necks that follow; see `create_backbone`.

    Args:
        body: a timm model.
        indices: the features that are taken of it; None if the body returns the list of maps itself.
        levels: what is done with them, list -> list.
        channels: of the levels, fine to coarse.
        strides: pixels of the image for each pixel of the levels.
        multiple: images are padded to multiples of it (and at least to the largest stride) at the right and bottom.
        in_chans: channels of the images, where they are known.
        fixed: (height, width) of the only images the body takes; smaller ones are padded to it. None for any size.
    """

    def __init__(
        self,
        body: nn.Module,
        indices: Sequence[int] | None,
        levels: nn.Module,
        channels: Sequence[int],
        strides: Sequence[int],
        multiple: int,
        in_chans: int | None = None,
        fixed: tuple[int, int] | None = None,
    ) -> None:
        super().__init__()
        self.body, self.levels, self.multiple = body, levels, multiple
        self.in_chans, self.fixed = in_chans, fixed
        self.indices = None if indices is None else list(indices)
        self.channels, self.strides = tuple(channels), tuple(strides)

    def pad(self, images: Tensor) -> Tensor:
        """The images with zeros at the right and bottom, to sides the body takes; zero is the mean colour."""
        height, width = images.shape[-2:]
        if self.in_chans not in (None, images.shape[1]):
            raise ValueError(
                f"this backbone was made for images of {self.in_chans} channels, got {images.shape[1]}; set in_chans to"
                " the images' number of channels or leave it out"
            )
        if self.fixed is None:
            least = self.strides[-1]
            right, below = (max(-side % self.multiple, least - side) for side in (width, height))
        else:
            below, right = self.fixed[0] - height, self.fixed[1] - width
            if min(below, right) < 0:
                raise ValueError(
                    f"{type(self.body).__name__} takes images of at most {self.fixed[0]}x{self.fixed[1]} px, got"
                    f" {height}x{width}; make it with img_size=({height}, {width}) (model_kwargs.img_size in a recipe),"
                    " use smaller images, or choose another model"
                )
        return F.pad(images, (0, right, 0, below)) if right or below else images

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
    def skip(self, count: int) -> "DenseBackbone":
        """The same body, with nothing done to the first `count` levels, for necks that do not look at them.

        Layers there would get no gradient, which several processes cannot train with, and cost time.
        """
        levels = copy.deepcopy(self.levels)  # this backbone stays as it is
        layers = levels.levels if isinstance(levels, VitPyramid) else levels
        if isinstance(layers, nn.ModuleList):
            for i in range(count):
                layers[i] = nn.Identity()
        rest = (self.channels, self.strides, self.multiple, self.in_chans, self.fixed)
        return DenseBackbone(self.body, self.indices, levels, *rest)

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the body's blocks in the backward pass instead of keeping their activations."""
        self.body.set_grad_checkpointing(enable)  # type: ignore[operator]

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that are not decayed."""
        own = getattr(self.body, "no_weight_decay", None)
        kept = {name for name, _ in self.named_parameters()}
        return {f"body.{name}" for name in own()} & kept if callable(own) else set()


class DenseModel(nn.Module):
    """A network on a backbone: a segmenter or a detector."""

    method = ""
    backbone: DenseBackbone

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute the backbone's blocks in the backward pass instead of keeping their activations."""
        self.backbone.set_grad_checkpointing(enable)

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that are not decayed."""
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
    """A backbone out of a timm model.

    Pyramids give their levels from stride 4 on; columns (DeiT, XCiT and their relatives) give four through
    `VitPyramid`. Where a model takes images of one size alone, smaller ones are padded to it; `img_size` changes it
    in many of them.

    Args:
        model: its name, or the model itself; a `DenseBackbone` is returned as it is.
        level_norm: put a LayerNorm on each level of pyramids that carry channels-last maps (ATMNet, STViT, AMixer,
            Swin), whose features are a sum nobody normalised.
        pretrained: load timm's weights.
        checkpoint: load weights from a file, folder, hub name or state dict; a classifier's are left out, and those of
            level norms are taken where there are any.
        drop_path: stochastic depth; None leaves it as the model has it.
        kwargs: for the model.
    """
    if isinstance(model, DenseBackbone):
        return model
    if isinstance(model, str):
        if drop_path is not None:
            kwargs["drop_path_rate"] = drop_path
        body = _create(model, pretrained, kwargs)
    else:
        if drop_path is not None or kwargs:
            given = ", ".join([*kwargs, *(["drop_path"] if drop_path is not None else [])])
            raise ValueError(f"a finished model takes no arguments, got {given}; pass the model's name instead")
        body = model
    info = [dict(part) for part in getattr(body, "feature_info", [])]
    if not info:
        raise ValueError(f"{type(body).__name__} says nothing of its features: choose a timm model with features_only")
    if not hasattr(body, "forward_intermediates"):
        if isinstance(model, str) and checkpoint is None:
            return _from_feature_list(model, pretrained, kwargs)
        raise ValueError(
            f"{type(body).__name__} has no forward_intermediates; pass its name and no checkpoint to use features_only"
        )
    state = None if checkpoint is None else _read(checkpoint)
    saved = {} if state is None else split_levels(state)
    reductions = [part["reduction"] for part in info]
    column = len(set(reductions)) == 1 and len(info) > 1
    indices = taps(len(info)) if column else [i for i, stride in enumerate(reductions) if stride >= 4]
    # resolved before pruning, which drops what lies behind the last of them
    _prune(body, indices)
    channels, strides = ([info[i][key] for i in indices] for key in ("num_chs", "reduction"))
    # without the classifier, whose weights nobody misses
    fresh = [] if state is None else load_checkpoint(body, state, strict=False).fresh
    lost = sorted(set(fresh) & {name for name, _ in body.named_parameters()})
    if lost:
        raise ValueError(
            f"the checkpoint holds nothing for {len(lost)} parameters of {type(body).__name__}, for one {lost[0]}"
        )
    _freeze_idle(body)
    levels: nn.Module = nn.Identity()
    if column:
        levels = VitPyramid(channels[0], strides[0])
        multiple = strides[0] if strides[0] in (8, 16) else math.lcm(strides[0], 16)
        channels, strides = list(levels.channels), list(levels.strides)
    else:
        if level_norm and getattr(body, "output_fmt", "") == "NHWC":
            levels = LevelNorms(channels)
        # our pyramids halve with rounding up; others may drop a last odd row
        exact = isinstance(body, Pyramid) and body.output_fmt == "NHWC"
        multiple = strides[0] if exact else strides[-1]
    if saved and levels.state_dict():
        levels.load_state_dict(saved)
    in_chans = kwargs.get("in_chans", 3) if isinstance(model, str) else None
    return _sized(DenseBackbone(body, indices, levels, channels, strides, multiple, in_chans), kwargs, reductions[-1])


def _create(name: str, pretrained: bool, kwargs: dict[str, Any]) -> nn.Module:
    for i, extra in enumerate(ANY_SIZE):
        try:
            return create_model(name, pretrained=pretrained, **{**extra, **kwargs})
        except TypeError as error:  # an argument the model does not know
            if i == len(ANY_SIZE) - 1 or not any(key in str(error) for key in extra):
                raise
    raise AssertionError("the last try returns or raises")


def _read(checkpoint: str | Path | Mapping[str, Any]) -> dict[str, Tensor]:
    """A classifier's, a backbone's or a whole segmenter's or detector's state dict; of the latter the backbone's."""
    state = unwrap(checkpoint if isinstance(checkpoint, Mapping) else read_checkpoint(checkpoint))
    if any(name.startswith("backbone.") for name in state):
        state = {n.removeprefix("backbone."): v for n, v in state.items() if n.startswith("backbone.")}
    return {name.removeprefix("body."): value for name, value in state.items()}


def split_levels(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Take out of a state dict what belongs to `DenseBackbone.levels`, under our names or the papers'."""
    levels = {n.removeprefix("levels."): state.pop(n) for n in list(state) if n.startswith("levels.")}
    norms = {name: found for name in state if (found := LEVEL_NORM.fullmatch(name))}
    if any(found[1] == "0" for found in norms.values()):  # counted from 1 they are something else
        levels |= {f"{found[1]}.{found[2]}": state.pop(name) for name, found in norms.items()}
    return levels


def _from_feature_list(name: str, pretrained: bool, kwargs: dict[str, Any]) -> DenseBackbone:
    """A backbone out of one of timm's older models, which only `features_only` takes apart."""
    info = create_model(name, features_only=True, device="meta").feature_info
    indices = [i for i, stride in zip(info.out_indices, info.reduction(), strict=True) if stride >= 4]
    body = create_model(name, pretrained=pretrained, features_only=True, out_indices=indices, **kwargs)
    strides = body.feature_info.reduction()
    channels = body.feature_info.channels()
    chans = kwargs.get("in_chans", 3)
    return _sized(DenseBackbone(body, None, nn.Identity(), channels, strides, strides[-1], chans), kwargs, strides[-1])


@torch.no_grad()
def _sized(backbone: DenseBackbone, kwargs: dict[str, Any], stride: int) -> DenseBackbone:
    """The backbone, which now knows the size of images that its body, of this stride, takes."""
    cfg = getattr(backbone.body, "pretrained_cfg", None) or {}
    size = (cfg.get("input_size") or (3, 224, 224))[1:]
    if cfg.get("fixed_input_size"):  # which timm also says of models that were told to take any
        weight, training = next(backbone.body.parameters()), backbone.body.training
        first = next((m.in_channels for m in backbone.body.modules() if isinstance(m, nn.Conv2d)), 3)
        try:
            backbone.body.eval()
            backbone._maps(weight.new_zeros(1, backbone.in_chans or first, 2 * stride, 3 * stride))
        except (AssertionError, RuntimeError, ValueError):
            height, width = to_2tuple(kwargs.get("img_size") or size)
            backbone.fixed = (height, width)
        finally:
            backbone.body.train(training)
    return backbone


def _prune(body: nn.Module, indices: Sequence[int]) -> None:
    """Drop what lies behind the last of the features."""
    prune = getattr(body, "prune_intermediate_layers", None)
    try:
        if prune is not None:
            prune(list(indices), prune_norm=True, prune_head=True)
            return
    except AssertionError:  # a head that cannot do without its pooling; the blocks are gone by then
        pass
    for name in ("norm", "head"):
        if isinstance(getattr(body, name, None), nn.Module):
            setattr(body, name, nn.Identity())


def _freeze_idle(body: nn.Module) -> None:
    """Freeze what stands behind the maps and would get no gradient, which several processes cannot train with."""
    for name in ("head", "fc_norm", "attn_pool", "conv_head", "final_conv", "pre_classifier"):
        part = getattr(body, name, None)
        if isinstance(part, nn.Module):
            part.requires_grad_(False)
    late = ("class_blocks", "cls_attn_blocks", "blocks_token_only")
    if any(hasattr(body, name) for name in late):  # its class token joins after the blocks
        body.cls_token.requires_grad_(False)
