"""AMixer: transformers whose attention is replaced by adaptive weight mixing, as a pyramid of windows and as a column.

AMixer: Adaptive Weight Mixing for Self-Attention Free Vision Transformers, ECCV 2022,
https://github.com/raoyongming/AMixer. The registered pyramids have the sizes of the supplement's Table 1, with MLPs of
ratio 3 and the stage-3 bank of AMixer-B at 48: 1.5 times the heads as everywhere else, which gives the printed
parameters; the table prints 64. The authors' released code has different sizes, `RELEASED` here, and does not mask
shifted windows: `timm.create_model("amixer_tiny", **RELEASED["amixer_t"], shift_mask=False)`. Its checkpoints load
through `checkpoint_filter_fn`.
"""

import logging
import math
import re
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import (
    DropPath,
    LayerScale,
    calculate_drop_path_rates,
    register_notrace_function,
    register_notrace_module,
    to_2tuple,
    trunc_normal_,
)
from timm.models import build_model_with_cfg, generate_default_cfgs
from torch import Tensor, nn
from torch.fx.experimental.symbolic_shapes import statically_known_true

from tokamix.layers import GELU, LayerNorm, Mlp, PatchEmbed, add_scaled, apply_linear, map_to_tokens, tokens_to_map
from tokamix.mixers import WeightMixing
from tokamix.models._backbone import Column, Pyramid, PyramidStage, image_cfg, register_model, rename
from tokamix.ops import dispatch, resize_bank

Pair = tuple[int, int]
_log = logging.getLogger("tokamix")


@register_notrace_module
class AMixerStem(PatchEmbed):
    """Patch embedding; incomplete patches at the right and bottom are padded with zeros."""

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> (B, h, w, dim)."""
        return super().forward(_pad(x, 2, self.proj.kernel_size[0]))


class PatchMerging(nn.Module):
    """Concatenates 2x2 neighbours row by row (column by column in Swin), normalises and projects them."""

    def __init__(self, dim: int, out_dim: int, device: Any = None, dtype: Any = None) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, **dd)
        self.proj = nn.Linear(4 * dim, out_dim, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, ceil(H/2), ceil(W/2), out_dim)."""
        x = _pad(x, 1, 2)
        if dispatch.is_exporting_fixed(*x.shape[1:3]):  # one gather of tokens instead of a transpose between reshapes
            rows, columns = (torch.arange(n, device=x.device).unflatten(0, (-1, 2)) for n in x.shape[1:3])
            order = rows[:, None, :, None] * x.shape[2] + columns[:, None, :]  # (H/2, W/2, 2, 2)
            x = x.flatten(1, 2).index_select(1, order.flatten()).unflatten(1, order.shape)
        else:
            x = x.unflatten(2, (x.shape[2] // 2, 2)).unflatten(1, (x.shape[1] // 2, 2)).transpose(2, 3)
        return apply_linear(self.proj, self.norm(x.flatten(3)))


@register_notrace_module
class Block(nn.Module):
    """A pre-norm block: weight mixing and an MLP, each with layer scale and a residual connection."""

    def __init__(
        self,
        dim: int,
        mlp_ratio: float,
        layer_scale: float,
        drop_path: float,
        eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
        **mixer: Any,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        self.norm1 = LayerNorm(dim, eps=eps, **dd)
        self.mixer = WeightMixing(dim, **mixer, **dd)
        self.ls1 = LayerScale(dim, layer_scale, **dd)
        self.norm2 = LayerNorm(dim, eps=eps, **dd)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), act_layer=GELU, **dd)
        self.ls2 = LayerScale(dim, layer_scale, **dd)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, grid: Pair, policy_embed: Tensor | None = None) -> Tensor:
        """Tokens x (B, H*W, C) of grid (H, W) -> the same shape."""
        x = add_scaled(x, self.mixer(self.norm1(x), grid, policy_embed), self.ls1.gamma, self.drop_path)
        return add_scaled(x, self.mlp(self.norm2(x)), self.ls2.gamma, self.drop_path)


class WindowStage(PyramidStage):
    """A stage whose blocks share a window and, optionally, an embedding of positions in it for their policies."""

    def __init__(
        self,
        blocks: list[nn.Module],
        downsample: nn.Module | None,
        policy_ape: Pair | None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(blocks, downsample)
        self.policy_ape: nn.Parameter | None = None
        if policy_ape is not None:
            self.policy_ape = nn.Parameter(torch.empty(policy_ape, device=device, dtype=dtype))
            self.reset_parameters()

    @property
    def window(self) -> Pair:
        """The window of the stage's blocks."""
        return next(m.window for m in self.modules() if isinstance(m, WeightMixing))

    def reset_parameters(self) -> None:
        """Initialise near zero."""
        if self.policy_ape is not None:
            nn.init.normal_(self.policy_ape, std=0.02)

    def set_window(self, window: Pair, shift: Pair) -> None:
        """Resize banks and embedding to another window; odd blocks are shifted."""
        if self.policy_ape is not None:
            ape = _resize_ape(self.policy_ape.detach(), self.window, window)
            self.policy_ape = nn.Parameter(ape, requires_grad=self.policy_ape.requires_grad)
        for j, mixer in enumerate(m for m in self.modules() if isinstance(m, WeightMixing)):
            mixer.set_window(window, shift if j % 2 else (0, 0))

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) -> (B, H', W', C')."""
        x, grid = map_to_tokens(self.downsample(x))
        for block in self.blocks:
            x = self.run(block, x, grid, self.policy_ape)
        return tokens_to_map(x, grid)


class AMixer(Pyramid):
    """A pyramid of adaptive weight mixing in windows; every second block is shifted unless the window is the whole map.

    Windows, shifts and banks are sized for `img_size`, where no window is larger than the map. For images of other
    sizes, maps are padded to multiples of the window. `set_input_size` refits the model to another size.

    Args:
        img_size: side or (H, W) of the images for which the windows are sized.
        in_chans: channels of the images.
        num_classes: classes; 0 for no classifier.
        global_pool: "avg" or "" (no pooling).
        dims: channels of each stage.
        depths: blocks of each stage.
        num_heads: heads of each stage.
        bank_sizes: bank entries of each stage; None for 1.5 times the heads.
        window_sizes: largest side of the (square) window of each stage.
        mlp_ratio: hidden channels of the MLPs, as a multiple of the stage's.
        activation: normalisation of the weights over sources; see `WeightMixing`.
        policy_activation: normalisation of the policies over the bank.
        policy_ape: add a learned embedding of the positions in a window to the inputs of the policies.
        shift_mask: do not mix tokens from opposite borders in shifted windows; the authors' code mixes them.
        layer_scale: initial scale of each branch.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    patch_size = 4

    def __init__(
        self,
        img_size: int | Pair = 224,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        dims: tuple[int, ...] = (96, 192, 384, 768),
        depths: tuple[int, ...] = (2, 2, 9, 2),
        num_heads: tuple[int, ...] = (6, 12, 24, 48),
        bank_sizes: tuple[int, ...] | None = None,
        window_sizes: tuple[int, ...] = (7, 7, 14, 7),
        mlp_ratio: float = 3.0,
        activation: str = "softmax",
        policy_activation: str = "identity",
        policy_ape: bool = False,
        shift_mask: bool = True,
        layer_scale: float = 1e-3,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        bank_sizes = bank_sizes or tuple(int(1.5 * heads) for heads in num_heads)
        per_stage = {"depths": depths, "num_heads": num_heads, "bank_sizes": bank_sizes, "window_sizes": window_sizes}
        for name, values in per_stage.items():
            if len(values) != len(dims):
                raise ValueError(f"{name} must have one value for each of the {len(dims)} stages in dims, got {values}")
        self.in_chans = in_chans
        self.feature_info = [
            {"num_chs": dim, "reduction": self.patch_size * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(dims)
        ]
        self.window_sizes = window_sizes
        self.stem = AMixerStem(in_chans, dims[0], self.patch_size, eps=1e-5, **dd)
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        stages = []
        for i, (dim, (window, shift)) in enumerate(zip(dims, self._windows(img_size), strict=True)):
            blocks: list[nn.Module] = [
                Block(
                    dim,
                    mlp_ratio,
                    layer_scale,
                    rate,
                    window=window,
                    num_heads=num_heads[i],
                    bank_size=bank_sizes[i],
                    activation=activation,
                    policy_activation=policy_activation,
                    partition=True,
                    shift=shift if j % 2 else (0, 0),
                    shift_mask=shift_mask,
                    **dd,
                )
                for j, rate in enumerate(rates[i])
            ]
            downsample = PatchMerging(dims[i - 1], dim, **dd) if i > 0 else None
            stages.append(WindowStage(blocks, downsample, (math.prod(window), dim) if policy_ape else None, **dd))
        self.stages = nn.ModuleList(stages)
        self.norm = nn.LayerNorm(dims[-1], **dd)
        self._build_head(dims[-1], num_classes, global_pool, drop_rate, **dd)
        self.init_weights(needs_reset=False)

    def _windows(self, img_size: int | Pair) -> list[tuple[Pair, Pair]]:
        """Window and shift of odd blocks of each stage, for an image size."""
        windows = []
        for info, largest in zip(self.feature_info, self.window_sizes, strict=True):
            side = min(math.ceil(n / info["reduction"]) for n in to_2tuple(img_size))
            window = min(largest, side)
            shift = window // 2 if side > window else 0
            windows.append(((window, window), (shift, shift)))
        return windows

    @torch.jit.ignore
    def set_input_size(self, img_size: int | Pair, window_sizes: tuple[int, ...] | None = None) -> None:
        """Adapt windows, shifts and banks to another image size; the banks are resized (bicubic).

        Args:
            img_size: side or (H, W) of the images.
            window_sizes: new largest window of each stage: without it, a map that is one window at 224 px is split into
                several windows at 448 px.
        """
        if window_sizes is not None:
            if len(window_sizes) != len(self.window_sizes):
                raise ValueError(
                    f"window_sizes must have {len(self.window_sizes)} values, one per stage, got {window_sizes}"
                )
            self.window_sizes = window_sizes
        for stage, (window, shift) in zip(self.stages, self._windows(img_size), strict=False):
            assert isinstance(stage, WindowStage)
            stage.set_window(window, shift)


class AMixerColumn(Column):
    """A column of blocks that mix over the whole image, like DeiT without class token.

    For image sizes other than `img_size`, position embedding (bilinear, corners aligned, as in the authors' code) and
    banks (bicubic) are resized on the fly; `set_input_size` resizes them permanently. The authors' code keeps the
    relative positions of the original grid at any size, which gives tokens the wrong neighbours.

    Args:
        img_size: side or (H, W) of the images for position embedding and banks.
        patch_size: side of a patch.
        in_chans: channels of the images.
        num_classes: classes; 0 for no classifier.
        global_pool: "avg" or "" (no pooling).
        dim: channels.
        depth: blocks.
        num_heads: heads.
        bank_size: bank entries; None for 1.5 times the heads.
        mlp_ratio: hidden channels of the MLPs, as a multiple of `dim`.
        activation: normalisation of the weights over sources; see `WeightMixing`.
        policy_activation: normalisation of the policies over the bank.
        layer_scale: initial scale of each branch.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        img_size: int | Pair = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        dim: int = 384,
        depth: int = 17,
        num_heads: int = 8,
        bank_size: int | None = 16,
        mlp_ratio: float = 3.0,
        activation: str = "softmax",
        policy_activation: str = "identity",
        layer_scale: float = 1e-4,
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        self.in_chans, self.patch_size = in_chans, patch_size
        self.feature_info = [{"num_chs": dim, "reduction": patch_size, "module": f"blocks.{i}"} for i in range(depth)]
        grid = self._grid(img_size)
        self.stem = AMixerStem(in_chans, dim, patch_size, eps=1e-6, **dd)
        self.pos_embed = nn.Parameter(torch.empty(1, *grid, dim, **dd))
        self.blocks = nn.ModuleList(
            Block(
                dim,
                mlp_ratio,
                layer_scale,
                rate,
                eps=1e-6,
                window=grid,
                num_heads=num_heads,
                bank_size=bank_size,
                activation=activation,
                policy_activation=policy_activation,
                **dd,
            )
            for rate in calculate_drop_path_rates(drop_path_rate, depth)
        )
        self.norm = nn.LayerNorm(dim, eps=1e-6, **dd)
        self._build_head(dim, num_classes, global_pool, drop_rate, **dd)
        self.reset_parameters()
        self.init_weights(needs_reset=False)

    def reset_parameters(self) -> None:
        """Initialise the position embedding."""
        trunc_normal_(self.pos_embed, std=0.02)

    def _grid(self, img_size: int | Pair) -> Pair:
        height, width = to_2tuple(img_size)
        return math.ceil(height / self.patch_size), math.ceil(width / self.patch_size)

    def no_weight_decay(self) -> set[str]:
        """The position embedding."""
        return {"pos_embed"}

    @torch.jit.ignore
    def set_input_size(self, img_size: int | Pair) -> None:
        """Resize position embedding and banks to another image size."""
        grid = self._grid(img_size)
        table = resize_positions(self.pos_embed.detach(), grid)
        self.pos_embed = nn.Parameter(table, requires_grad=self.pos_embed.requires_grad)
        for module in self.modules():
            if isinstance(module, WeightMixing):
                module.set_window(grid)

    def embed(self, x: Tensor) -> tuple[Tensor, Pair]:
        """Images -> tokens with their positions added, and their grid."""
        x = self.stem(x)
        return map_to_tokens(x + resize_positions(self.pos_embed, (x.shape[1], x.shape[2])))


def _pad(x: Tensor, dim: int, multiple: int) -> Tensor:
    """Pad dims `dim` and `dim + 1` of x with zeros at the end to multiples; no copy if they are known to be."""
    # ONNX export mistranslates -(-n // multiple) with symbolic sizes
    sides = [(x.shape[i] + multiple - 1) // multiple * multiple for i in (dim, dim + 1)]
    missing = [side - x.shape[i] for side, i in zip(sides, (dim, dim + 1), strict=True)]
    if statically_known_true(missing[0] == 0) and statically_known_true(missing[1] == 0):
        return x
    return F.pad(x, [0, 0] * (x.ndim - dim - 2) + [0, missing[1], 0, missing[0]])


@register_notrace_function
def resize_positions(table: Tensor, grid: Pair) -> Tensor:
    """Resize a position embedding (1, h, w, C) to another grid as the authors do: bilinear, corners aligned."""
    if statically_known_true(table.shape[1] == grid[0]) and statically_known_true(table.shape[2] == grid[1]):
        return table
    return F.interpolate(table.permute(0, 3, 1, 2), grid, mode="bilinear", align_corners=True).permute(0, 2, 3, 1)


def _resize_ape(ape: Tensor, window: Pair, new_window: Pair) -> Tensor:
    """Resize an embedding (h*w, C) of the positions in a window to another window: bicubic."""
    if window == new_window:
        return ape
    table = ape.unflatten(0, window).permute(2, 0, 1)[None]
    return F.interpolate(table, new_window, mode="bicubic")[0].flatten(1).T.contiguous()


# the authors' names, and ours
RENAMES: tuple[tuple[str, Any], ...] = (
    (r"^patch_embed\.", "stem."),
    (r"^layers\.(\d+)\.downsample\.", lambda m: f"stages.{int(m[1]) + 1}.downsample."),
    (r"^layers\.(\d+)\.ape$", r"stages.\1.policy_ape"),
    (r"^layers\.", "stages."),
    (r"\.(spatial_mixer|spatil_mlp)\.", ".mixer."),
    (r"\.mixer\.weight_bank$", ".mixer.bank"),
    (r"\.mixer\.pre_proj\.", ".mixer.v."),
    (r"\.mixer\.post_proj\.", ".mixer.proj."),
    (r"\.gamma([12])$", r".ls\1.gamma"),
)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Map the authors' names to ours, and resize banks and position embeddings to the model's windows.

    The authors' index tables and masks follow from the sizes and are left out. A bank belongs to the grid of the
    checkpoint's position embedding or, without one, to a square window.
    """
    state = {n: t for n, t in state_dict.items() if not n.endswith(("relative_position_index", "attn_mask"))}
    masked = any(isinstance(m, WeightMixing) and m.shift_mask and m.shift != (0, 0) for m in model.modules())
    if masked and any(n.startswith("layers.") for n in state):
        _log.warning("the authors' code does not mask shifted windows: create the model with shift_mask=False")
    state = rename(state, RENAMES)
    positions = state.get("pos_embed")
    if positions is not None and isinstance(model, AMixerColumn):
        state["pos_embed"] = resize_positions(positions, (model.pos_embed.shape[1], model.pos_embed.shape[2]))
    for path, module in model.named_modules():
        if isinstance(module, WeightMixing) and (bank := state.get(f"{path}.bank")) is not None and bank.ndim == 2:
            side = (math.isqrt(bank.shape[1]) + 1) // 2
            window = (side, side) if positions is None else (positions.shape[1], positions.shape[2])
            if window != module.window:
                state[f"{path}.bank"] = resize_bank(bank, window, module.window)
        if isinstance(module, WindowStage) and (ape := state.get(f"{path}.policy_ape")) is not None:
            side = math.isqrt(ape.shape[0])
            state[f"{path}.policy_ape"] = _resize_ape(ape, (side, side), module.window)
    return state


def checkpoint_hint(state_dict: dict[str, Tensor]) -> str | None:
    """The arguments of a model for a checkpoint of the authors' released pyramids; None for other checkpoints."""
    depths: Counter[int] = Counter()
    heads: dict[int, int] = {}
    for name, bank in state_dict.items():
        if match := re.fullmatch(r"layers\.(\d+)\.blocks\.\d+\.spatial_mixer\.weight_bank", name):
            adapter = state_dict[name.replace("weight_bank", "adapter.2.weight")]
            depths[int(match[1])] += 1
            heads[int(match[1])] = adapter.shape[0] // bank.shape[0]
    sizes = {"depths": tuple(depths[i] for i in sorted(depths)), "num_heads": tuple(heads[i] for i in sorted(heads))}
    names = {"amixer_t": "amixer_tiny", "amixer_s": "amixer_small", "amixer_b": "amixer_base"}
    for released, arguments in RELEASED.items():
        if arguments == sizes:
            text = ", ".join(f"{key}={value}" for key, value in arguments.items())
            return (
                f"it is the authors' released {released}, which needs create_model({names[released]!r}, {text},"
                " shift_mask=False)"
            )
    return None


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return image_cfg(
        first_conv="stem.proj",
        paper_ids="doi:10.1007/978-3-031-19803-8_4",
        paper_name="AMixer: Adaptive Weight Mixing for Self-Attention Free Vision Transformers",
        origin_url="https://github.com/raoyongming/AMixer",
        **kwargs,
    )


default_cfgs = generate_default_cfgs(
    {
        "amixer_tiny": _cfg(pool_size=(7, 7)),
        "amixer_small": _cfg(pool_size=(7, 7)),
        "amixer_base": _cfg(pool_size=(7, 7)),
        "amixer_deit_small": _cfg(notes=("top1=80.3",)),
    }
)

# the sizes in the authors' code, as keyword arguments of the variant of the same size
RELEASED: dict[str, dict[str, Any]] = {
    "amixer_t": {"depths": (2, 2, 10, 2), "num_heads": (3, 6, 12, 24)},
    "amixer_s": {"depths": (2, 2, 26, 2), "num_heads": (3, 6, 12, 24)},
    "amixer_b": {"depths": (2, 2, 26, 2), "num_heads": (4, 8, 16, 32)},
}

VARIANTS: dict[str, dict[str, Any]] = {
    "amixer_tiny": {},
    "amixer_small": {"depths": (2, 2, 24, 2)},
    "amixer_base": {"depths": (2, 2, 24, 2), "dims": (128, 256, 512, 1024), "num_heads": (8, 16, 32, 64)},
    "amixer_deit_small": {},
}


def _create(model: type[AMixer | AMixerColumn], variant: str, pretrained: bool, **kwargs: Any) -> Any:
    indices = (0, 1, 2, 3) if issubclass(model, Pyramid) else min(3, kwargs.get("depth", 3))
    return build_model_with_cfg(
        model,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": indices, "feature_cls": "getter"},
        **(VARIANTS[variant] | kwargs),
    )


@register_model
def amixer_tiny(pretrained: bool = False, **kwargs: Any) -> AMixer:
    """AMixer-T, 26 M parameters."""
    return _create(AMixer, "amixer_tiny", pretrained, **kwargs)


@register_model
def amixer_small(pretrained: bool = False, **kwargs: Any) -> AMixer:
    """AMixer-S, 46 M parameters."""
    return _create(AMixer, "amixer_small", pretrained, **kwargs)


@register_model
def amixer_base(pretrained: bool = False, **kwargs: Any) -> AMixer:
    """AMixer-B, 83 M parameters."""
    return _create(AMixer, "amixer_base", pretrained, **kwargs)


@register_model
def amixer_deit_small(pretrained: bool = False, **kwargs: Any) -> AMixerColumn:
    """AMixer-DeiT-S, 22 M parameters."""
    return _create(AMixerColumn, "amixer_deit_small", pretrained, **kwargs)
