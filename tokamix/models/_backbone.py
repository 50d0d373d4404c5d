"""Base classes that implement timm's contract for the two shapes of network in this library.

A `Pyramid` has a stem and stages on maps (B, H, W, C) of decreasing resolution; a `Column` has a stem and blocks on
tokens (B, N, C) of one resolution. Class tokens are added before the first block, in the last stage, or after the
blocks. The base classes have classifier, features, gradient checkpointing and initialisation; a family adds its stem,
its stages or blocks, and its table of variants.
"""

import copy
import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import timm.models
import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.layers import get_device_dtype, register_notrace_module, trunc_normal_
from timm.models import checkpoint
from torch import Tensor, nn

from tokamix._construction import record_creation
from tokamix.layers import cast_weights, casts_weights, channels_first, map_to_tokens, tokens_to_map

Indices = int | list[int] | tuple[int, ...] | None


def register_model(entry: Callable[..., Any]) -> Callable[..., Any]:
    """Register an entry function with timm; its models record their name and arguments, also if timm creates them."""

    @functools.wraps(entry)
    def create(pretrained: bool = False, **kwargs: Any) -> Any:
        model = entry(pretrained, **kwargs)
        record_creation(model, entry.__name__, kwargs)
        return model

    return timm.models.register_model(create)


def image_cfg(**kwargs: Any) -> dict[str, Any]:
    """A timm pretrained cfg with the defaults shared by all models of this library."""
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "fixed_input_size": False,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "classifier": "head",
        "license": "apache-2.0",
        **kwargs,
    }


def rename(state_dict: dict[str, Tensor], rules: Sequence[tuple[str, Any]]) -> dict[str, Tensor]:
    """Rename the entries of a checkpoint; each rule is a pattern and a replacement for `re.sub`, applied in order."""
    renamed = {}
    for name, tensor in state_dict.items():
        for pattern, replacement in rules:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


def take_indices(levels: int, indices: Indices) -> tuple[list[int], int]:
    """The levels selected by `indices` (None: all; n: the last n; a list: these), and the last of them."""
    if indices is None:
        indices = levels
    if isinstance(indices, int):
        if not 0 < indices <= levels:
            raise ValueError(f"cannot return the last {indices} features: the model has {levels}")
        indices = list(range(levels - indices, levels))
    if not indices:
        raise ValueError(f"indices is empty; choose from 0 to {levels - 1}, or None for all {levels} features")
    taken = [i + levels if i < 0 else i for i in indices]
    for i in taken:
        if not 0 <= i < levels:
            raise ValueError(f"feature index {i} is out of range: the model has {levels}, 0 to {levels - 1}")
    return taken, max(taken)


def check_tensor(x: Any, model: str) -> None:
    """Raise TypeError for arrays and images that are not tensors."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"{model} needs normalised images as a torch.Tensor, got {type(x).__name__}; convert an array with"
            " torch.from_numpy(x).float(), or use tokamix.predict, which takes files and arrays"
        )


def check_images(x: Tensor, model: str, in_chans: int, min_side: int) -> None:
    """Raise ValueError for images that a model cannot process.

    Sizes are not checked while compiling or exporting, which would specialise them; values are checked on the CPU only,
    where this needs no synchronisation: on an accelerator NaN inputs give NaN outputs.
    """
    if isinstance(x, torch.fx.Proxy):  # torch.fx traces for feature extraction, without values
        return
    check_tensor(x, model)
    if x.ndim != 4 or x.shape[1] != in_chans:
        raise ValueError(f"{model} needs images of shape (B, {in_chans}, H, W), got {tuple(x.shape)}")
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return
    height, width = x.shape[-2:]
    if min(height, width) < min_side:
        raise ValueError(f"{model} needs sides of at least {min_side} px, got {height}x{width}; resize the image")
    if x.device.type == "cpu" and not torch.isfinite(x).all():
        raise ValueError(f"{model} got an image with NaN or infinite values; check the loading and normalisation")


class Backbone(nn.Module):
    """Base class of pyramids and columns: classifier and initialisation.

    Subclasses set `in_chans` and `feature_info`, build their layers, call `_build_head` and end their constructor with
    `self.init_weights(needs_reset=False)`.
    """

    in_chans: int
    feature_info: list[dict[str, Any]]
    head: nn.Module
    min_side = 1
    pools: tuple[str, ...] = ("avg", "")

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Copy the model as it is between two forward passes, also in the middle of one."""
        copied = memo[id(self)] = type(self).__new__(type(self))
        with cast_weights(self, None):
            copied.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return copied

    def _build_head(
        self, num_features: int, num_classes: int, global_pool: str, drop_rate: float, device: Any, dtype: Any
    ) -> None:
        self.num_features = self.head_hidden_size = num_features
        self.grad_checkpointing = False
        self.head_drop = nn.Dropout(drop_rate)
        self._set_classifier(num_classes, global_pool, {"device": device, "dtype": dtype})

    def _set_classifier(self, num_classes: int, global_pool: str | None, dd: dict[str, Any]) -> None:
        if num_classes < 0:
            raise ValueError(f"num_classes is {num_classes}, but must be at least 0; 0 leaves the classifier out")
        if global_pool is not None:
            if global_pool not in self.pools:
                possible = ", ".join(map(repr, self.pools))
                raise ValueError(
                    f"{type(self).__name__} does not support global_pool={global_pool!r}: choose one of {possible}"
                )
            self.global_pool = global_pool
        elif num_classes > 0 and not self.global_pool:
            self.global_pool = self.pools[0]  # a new classifier restores the default pooling
        if not self.global_pool and num_classes > 0:
            raise ValueError("a classifier needs pooled features: pass num_classes=0 together with global_pool=''")
        self.num_classes = num_classes
        self.head = nn.Linear(self.head_hidden_size, num_classes, **dd) if num_classes > 0 else nn.Identity()

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace the classifier; device, dtype and training mode are kept."""
        self._set_classifier(num_classes, global_pool, get_device_dtype(self))
        if num_classes > 0:
            self._init_module(self.head, needs_reset=False)
        self.head.train(self.training)

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The classifier layer."""
        return self.head

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute blocks in the backward pass instead of keeping their activations."""
        self.grad_checkpointing = enable
        for module in self.modules():
            if isinstance(module, PyramidStage):
                module.grad_checkpointing = enable

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """Names of the parameters that are not decayed (1-D parameters and biases never are)."""
        return set()

    @torch.jit.ignore
    def init_weights(self, needs_reset: bool = True) -> None:
        """Initialise every parameter and derived buffer (after `to_empty` too)."""
        for module in self.modules():
            self._init_module(module, needs_reset)

    def _init_module(self, module: nn.Module, needs_reset: bool) -> None:
        if isinstance(module, nn.Linear):
            trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif needs_reset and callable(reset := getattr(module, "reset_parameters", None)):
            reset()

    def forward_features(self, x: Tensor) -> Tensor:
        """The features before pooling."""
        raise NotImplementedError

    def pool(self, x: Tensor) -> Tensor:
        """Pool the output of forward_features to (B, C)."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool and classify the output of forward_features."""
        x = self.head_drop(self.pool(x)) if self.global_pool else x
        return x if pre_logits else self.head(x)

    @casts_weights
    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> logits (B, num_classes)."""
        return self.forward_head(self.forward_features(x))

    def _check(self, x: Tensor) -> None:
        check_images(x, type(self).__name__, self.in_chans, self.min_side)


@register_notrace_module
class PyramidStage(nn.Module):
    """A stage of a pyramid: optional downsampling of the map, optional position embedding, then blocks on its tokens.

    Blocks and position embedding are called with (x, grid).
    """

    def __init__(
        self, blocks: Sequence[nn.Module], downsample: nn.Module | None = None, pos_embed: nn.Module | None = None
    ) -> None:
        super().__init__()
        self.downsample = downsample or nn.Identity()
        self.pos_embed = pos_embed
        self.blocks = nn.ModuleList(blocks)
        self.grad_checkpointing = False

    def run(self, block: nn.Module, *args: Any) -> Any:
        """Call a block, with gradient checkpointing if it is enabled."""
        if self.grad_checkpointing and self.training and not torch.jit.is_scripting():
            return checkpoint(block, *args)
        return block(*args)

    def embed(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Add the position embedding to the tokens."""
        return x if self.pos_embed is None else self.pos_embed(x, grid)

    def tokens(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Map (B, H, W, C) -> the tokens after the last block, and their grid."""
        x, grid = map_to_tokens(self.downsample(x))
        x = self.embed(x, grid)
        for block in self.blocks:
            x = self.run(block, x, grid)
        return x, grid

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H', W', C')."""
        return tokens_to_map(*self.tokens(x))


class ClassTokenStage(PyramidStage):
    """A last stage that puts a class token in front of the other tokens."""

    def __init__(
        self,
        dim: int,
        blocks: Sequence[nn.Module],
        downsample: nn.Module | None = None,
        pos_embed: nn.Module | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(blocks, downsample, pos_embed)
        self.cls_token = nn.Parameter(torch.empty(1, 1, dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the class token."""
        trunc_normal_(self.cls_token, std=0.02)

    def embed(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Put the class token in front, then add the positions."""
        return super().embed(torch.cat([self.cls_token.expand(x.shape[0], -1, -1), x], dim=1), grid)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:  # type: ignore[override]
        """(B, H, W, C) -> tokens (B, 1 + H' * W', C') and their grid."""
        return self.tokens(x)


class Pyramid(Backbone):
    """A stem (images -> map), `stages` (map -> map) and `norm` (the last map); maps are (B, H, W, C)."""

    output_fmt = "NHWC"
    stem: nn.Module
    stages: nn.ModuleList
    norm: nn.Module

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's layer groups, for layer-wise learning rates."""
        before = r"^stages\.(\d+)\.(?:downsample|pos_embed|cls_token)"
        blocks = [(r"^stages\.(\d+)\.blocks\.(\d+)", None), (before, (0,)), (r"^norm", (99999,))]
        return {"stem": r"^stem", "blocks": r"^stages\.(\d+)" if coarse else blocks}

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> the last, normalised map (B, h, w, num_features)."""
        self._check(x)
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.finish(x)

    def finish(self, x: Any) -> Tensor:
        """Process the output of the last stage."""
        return self.norm(x)

    def as_map(self, x: Any) -> Tensor:
        """A stage's output as a map."""
        return x

    def pool(self, x: Tensor) -> Tensor:
        """Average over the map."""
        return x.mean((1, 2))

    @casts_weights
    def forward_intermediates(
        self,
        x: Tensor,
        indices: Indices = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Each stage's map; see timm. `norm` applies the final norm to the last stage's map only."""
        _check_output_fmt(output_fmt, ("NCHW", "NHWC"))
        self._check(x)
        taken, last = take_indices(len(self.stages), indices)
        maps = []
        x = self.stem(x)
        for i, stage in enumerate(self.stages[: last + 1] if stop_early else self.stages):
            x = stage(x)
            if i in taken:
                final = norm and i == len(self.feature_info) - 1
                maps.append(self.norm(self.as_map(x)) if final else self.as_map(x))
        if output_fmt == "NCHW":
            maps = [channels_first(m) for m in maps]
        return maps if intermediates_only else (self.finish(x) if i == len(self.feature_info) - 1 else x, maps)

    def prune_intermediate_layers(
        self, indices: Indices = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages after the last one in `indices`, and optionally the norm and the classifier."""
        taken, last = take_indices(len(self.stages), indices)
        self.stages = self.stages[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken


class ClassTokenPyramid(Pyramid):
    """A pyramid whose last stage is a `ClassTokenStage`; its features are tokens, the class token first."""

    output_fmt = "NLC"
    pools = ("token", "avg", "")
    num_prefix_tokens = 1

    @torch.jit.ignore
    def no_weight_decay(self) -> set[str]:
        """The class token is not decayed."""
        return {name for name, _ in self.named_parameters() if name.endswith("cls_token")}

    def finish(self, x: Any) -> Tensor:
        """Tokens and grid of the last stage -> normalised tokens (B, 1 + N, num_features)."""
        return self.norm(x[0])

    def as_map(self, x: Any) -> Tensor:
        """A stage's output as a map, without the class token."""
        return tokens_to_map(x[0][:, 1:], x[1]) if isinstance(x, tuple) else x

    def pool(self, x: Tensor) -> Tensor:
        """The class token, or the average over the patch tokens."""
        return x[:, 0] if self.global_pool == "token" else x[:, 1:].mean(1)


class Column(Backbone):
    """A stem (images -> map), `blocks` called `block(x, grid)` on its tokens (B, N, C), and `finish` after them."""

    output_fmt = "NLC"
    stem: nn.Module
    blocks: nn.ModuleList
    norm: nn.Module
    num_prefix_tokens = 0
    prefix_in_blocks = False  # whether `embed` adds the prefix tokens, so that all blocks process them

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's layer groups, for layer-wise learning rates."""
        return {"stem": r"^stem|^pos_embed|^cls_token", "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))]}

    def embed(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        """Images -> the tokens for the first block, and their grid."""
        return map_to_tokens(self.stem(x))

    def finish(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Process the output of the last block; (B, N, C) -> (B, num_prefix_tokens + N, C)."""
        return self.norm(x)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> tokens (B, num_prefix_tokens + N, num_features)."""
        self._check(x)
        x, grid = self.embed(x)
        for block in self.blocks:
            x = self._run(block, x, grid)
        return self.finish(x, grid)

    def pool(self, x: Tensor) -> Tensor:
        """The class token, or the average over the patch tokens."""
        return x[:, 0] if self.global_pool == "token" else x[:, self.num_prefix_tokens :].mean(1)

    def _run(self, block: nn.Module, *args: Any) -> Tensor:
        if self.grad_checkpointing and self.training and not torch.jit.is_scripting():
            return checkpoint(block, *args)
        return block(*args)

    @casts_weights
    def forward_intermediates(
        self,
        x: Tensor,
        indices: Indices = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        return_prefix_tokens: bool = False,
    ) -> list[Any] | tuple[Tensor, list[Any]]:
        """Each block's tokens as a map or as tokens; see timm. `norm` applies the final norm to each."""
        _check_output_fmt(output_fmt, ("NCHW", "NHWC", "NLC"))
        self._check(x)
        taken, last = take_indices(len(self.blocks), indices)
        maps = []
        x, grid = self.embed(x)
        for i, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._run(block, x, grid)
            if i in taken:
                maps.append(self.norm(x) if norm else x)
        prefix = self.num_prefix_tokens if self.prefix_in_blocks else 0
        prefixes, maps = [m[:, :prefix] for m in maps], [m[:, prefix:] for m in maps]
        if output_fmt != "NLC":
            maps = [tokens_to_map(m, grid) for m in maps]
        if output_fmt == "NCHW":
            maps = [channels_first(m) for m in maps]
        features: list[Any] = list(zip(maps, prefixes, strict=True)) if return_prefix_tokens and prefix else maps
        return features if intermediates_only else (self.finish(x, grid), features)

    def prune_intermediate_layers(
        self, indices: Indices = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the blocks after the last one in `indices`, and optionally the norm and the classifier."""
        taken, last = take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken


def _check_output_fmt(given: str, possible: tuple[str, ...]) -> None:
    if given not in possible:
        raise ValueError(f"output_fmt {given!r} is not possible: choose one of {', '.join(possible)}")
