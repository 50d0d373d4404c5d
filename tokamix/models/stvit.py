"""STViT: pyramids of super token attention, convolutional position encoding and convolutional feed-forward layers.

Vision Transformer with Super Token Sampling, arXiv 2211.11167, https://github.com/hhb072/STViT. Maps stay channels-last
and 1x1 convolutions are Linear layers; the authors' checkpoints load through `checkpoint_filter_fn`.
"""

import math
import re
from typing import Any

import torch.nn.functional as F
from timm.layers import DropPath, LayerScale, calculate_drop_path_rates
from timm.models import build_model_with_cfg, generate_default_cfgs
from torch import Tensor, nn

from tokamix.layers import (
    GELU,
    DepthwiseConv,
    ImageConv,
    LayerNorm,
    MapConv,
    MapSequential,
    Mlp,
    PatchConv,
    apply_batch_norm,
    apply_linear,
    channels_first,
    channels_last,
    fold_into_next,
    fused_linear_gelu,
    is_bare,
    is_hooked,
    tokens_to_map,
)
from tokamix.mixers import SuperTokenAttention
from tokamix.models._backbone import Pyramid, PyramidStage, image_cfg, register_model
from tokamix.ops import cpu, dispatch

NATIVE_SIDE = 224  # the image side for which relative position tables have one entry per offset


class ConvFFN(nn.Module):
    """Linear -> GELU -> z + depthwise 3x3 of z -> Linear."""

    def __init__(self, dim: int, hidden_dim: int, device: Any = None, dtype: Any = None) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim, **dd)
        self.conv = DepthwiseConv(hidden_dim, residual=True, gelu=True, **dd)
        self.fc2 = nn.Linear(hidden_dim, dim, **dd)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tokens x (B, H*W, C) of grid (H, W) -> the same shape."""
        plain = type(self.conv) is DepthwiseConv and self.conv.gelu and not is_hooked(self.conv)
        z = fused_linear_gelu(self.fc1, x) if plain else None
        if z is None:
            z = self.conv(tokens_to_map(apply_linear(self.fc1, x), grid))
        else:
            z = self.conv(tokens_to_map(z, grid), activated=True)
        return apply_linear(self.fc2, z.flatten(1, 2))


class Block(nn.Module):
    """Convolutional position encoding, super token attention and a feed-forward layer, each with a residual connection.

    The second norm is a BatchNorm, as in the authors' code. Layer scales have one axis, so timm's rule does not decay
    them; the authors' have four axes and are decayed.
    """

    def __init__(
        self,
        dim: int,
        mlp_ratio: float,
        cpe: bool,
        conv_ffn: bool,
        layer_scale: float | None,
        drop_path: float,
        device: Any = None,
        dtype: Any = None,
        **mixer: Any,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        hidden_dim = int(dim * mlp_ratio)
        self.cpe = DepthwiseConv(dim, residual=True, **dd) if cpe else None
        self.norm1 = LayerNorm(dim, eps=1e-6, **dd)
        self.mixer = SuperTokenAttention(dim, **mixer, **dd)
        self.ls1 = nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale, **dd)
        self.norm2: nn.Module = nn.BatchNorm1d(dim, **dd)
        self.mlp = ConvFFN(dim, hidden_dim, **dd) if conv_ffn else Mlp(dim, hidden_dim, act_layer=GELU, **dd)
        self.ls2 = nn.Identity() if layer_scale is None else LayerScale(dim, layer_scale, **dd)
        self.drop_path = DropPath(drop_path)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Tokens x (B, H*W, C) of grid (H, W) -> the same shape."""
        if cpu.usable(x) and self._is_bare():
            return self._fused(x, grid)
        if dispatch.is_exporting_to("onnx", "openvino") and self._is_convolutional():
            return self._exported(x, grid)
        if self.cpe is not None:
            x = self.cpe(tokens_to_map(x, grid)).flatten(1, 2)
        x = x + self.drop_path(self.ls1(self.mixer(self.norm1(x), grid)))
        z = apply_batch_norm(self.norm2, x)
        z = self.mlp(z, grid) if isinstance(self.mlp, ConvFFN) else self.mlp(z)
        return x + self.drop_path(self.ls2(z))

    def _is_bare(self) -> bool:
        """Whether `_fused` computes what the layers do."""
        if self.training or self.cpe is None or type(self.mlp) is not ConvFFN or not is_bare(self.cpe, DepthwiseConv):
            return False
        mlp = self.mlp
        bare = is_bare(mlp.fc1, nn.Linear) and is_bare(mlp.conv, DepthwiseConv) and is_bare(mlp.fc2, nn.Linear)
        return bare and not is_hooked(mlp)

    def _fused(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """The same block for inference on a CPU, with fewer and larger kernels; see `tokamix.ops.cpu`."""
        cpe: Any = self.cpe
        image = channels_first(tokens_to_map(x, grid))
        image = cpu.conv(image, cpe.weight, cpe.bias, cpe.padding, groups=cpe.groups, residual=True)
        x = channels_last(image).flatten(1, 2)
        if type(self.mixer) is SuperTokenAttention and type(self.ls1) is nn.Identity:
            x = self.mixer(self.norm1(x), grid, x)
        else:
            x = x + self.ls1(self.mixer(self.norm1(x), grid))
        mlp: Any = self.mlp
        fc1, conv, fc2 = ((layer.weight, layer.bias) for layer in (mlp.fc1, mlp.conv, mlp.fc2))
        z = apply_batch_norm(self.norm2, x)
        if type(self.ls2) is nn.Identity:
            return cpu.conv_mlp(z, grid, fc1, conv, fc2, residual=x)
        return x + self.ls2(cpu.conv_mlp(z, grid, fc1, conv, fc2))

    def _is_convolutional(self) -> bool:
        """Whether `_exported` computes what the layers do."""
        mlp = self.mlp
        if self.training or self.cpe is None or type(mlp) is not ConvFFN or type(self.norm2) is not nn.Identity:
            return False
        plain = type(mlp.fc1) is nn.Linear and type(mlp.fc2) is nn.Linear
        return plain and not is_hooked(mlp, mlp.fc1, mlp.fc2, self.norm2, self.ls2)

    def _exported(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """The same block in convolutions (B, C, H, W), whose order of the axes runtimes choose themselves."""
        cpe, mlp, ls2, first = self.cpe, self.mlp, self.ls2, (0, 3, 1, 2)
        assert cpe is not None
        assert isinstance(mlp, ConvFFN)
        x = cpe(tokens_to_map(x, grid)).permute(first)
        z = self.ls1(self.mixer(self.norm1(x.permute(0, 2, 3, 1).flatten(1, 2)), grid))
        x = x + tokens_to_map(z, grid).permute(first)
        z = F.conv2d(x, mlp.fc1.weight[..., None, None], mlp.fc1.bias)
        z = mlp.conv(z.permute(0, 2, 3, 1)).permute(first)
        scale: Any = ls2.gamma if isinstance(ls2, LayerScale) else 1.0
        z = F.conv2d(z, (mlp.fc2.weight.mT * scale).mT[..., None, None], mlp.fc2.bias * scale)
        return (x + z).permute(0, 2, 3, 1).flatten(1, 2)

    def reparameterize(self) -> None:
        """Fold the BatchNorm into the layer after it, for inference; see `timm.utils.reparameterize_model`."""
        self.norm2 = fold_into_next(self.norm2, self.mlp.fc1)


class STViTStem(MapSequential):
    """Images (B, in_chans, H, W) -> a map of a quarter of their sides, by four times convolution, GELU, BatchNorm."""

    def __init__(self, in_chans: int, dim: int, device: Any = None, dtype: Any = None) -> None:
        dd = {"device": device, "dtype": dtype}
        widths = (in_chans, dim // 2, dim // 2, dim, dim)
        layers: list[nn.Module] = []
        for i in range(4):
            conv = MapConv if layers else ImageConv
            layers += [conv(widths[i], widths[i + 1], 3, stride=2 - i % 2, padding=1, **dd), GELU()]
            layers += [nn.BatchNorm1d(widths[i + 1], **dd)]
        super().__init__(*layers)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> (B, h, w, dim)."""
        first: Any
        first, *others = self
        if cpu.usable(x) and x.ndim == 4 and x.shape[1] == first.in_channels and self._is_bare():
            return self._fused(x)
        return self._call(others, channels_last(first(x)))

    def _is_bare(self) -> bool:
        """Whether `_fused` computes what the layers do."""
        convs = all(is_bare(conv, MapConv if i else ImageConv) for i, conv in enumerate(list(self)[::3]))
        return convs and all(type(layer) is GELU and not is_hooked(layer) for layer in list(self)[1::3])

    def _fused(self, x: Tensor) -> Tensor:
        """The same for inference on a CPU: GELU is part of the convolutions; see `tokamix.ops.cpu`."""
        layers: list[Any] = list(self)
        for conv, norm in zip(layers[::3], layers[2::3], strict=True):
            x = cpu.conv(x, conv.weight, conv.bias, conv.padding, conv.stride, gelu=True)
            x = channels_first(apply_batch_norm(norm, channels_last(x), inplace=True))
        return channels_last(x)


class STViTPatchStem(nn.Sequential):
    """Images (B, in_chans, H, W) -> a map of patches of 4x4 pixels; the sides are cropped to multiples of 4."""

    def __init__(self, in_chans: int, dim: int, device: Any = None, dtype: Any = None) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__(PatchConv(in_chans, dim, 4, **dd), nn.LayerNorm(dim, eps=1e-6, **dd))

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> (B, h, w, dim)."""
        conv, norm = self
        return norm(channels_last(conv(x)))


class STViT(Pyramid):
    """A pyramid of super token attention.

    Args:
        in_chans: channels of the images.
        num_classes: classes; 0 for no classifier.
        global_pool: "avg" or "" (no pooling).
        dims: channels of each stage.
        depths: blocks of each stage.
        num_heads: attention heads of each stage.
        stoken_sizes: cell of one super token in each stage, a side or (h, w); 1 is plain global attention. The authors
            use (8, 4, 1, 1) up to 384 px and count MACs with (16, 8, 2, 1) at 512.
        n_iter: iterations of super token sampling, one number or one for each stage.
        mlp_ratio: hidden channels of the feed-forward layers, as a multiple of the stage's.
        qkv_bias: whether the attention's first projection has a bias.
        projection: channels of the last projection; 0 replaces it by a LayerNorm.
        layer_scale: initial layer scale of each stage, None for none.
        conv_stem: four convolutions; False for non-overlapping 4x4 patches.
        cpe: convolutional position encoding in each block.
        conv_ffn: a depthwise convolution in each feed-forward layer.
        relative_position: learned relative position bias among super tokens. With or without it and without projection,
            conv_stem, cpe and conv_ffn, this is the isotropic form of the supplement's Table II.
        refine: operation on super tokens; see `SuperTokenAttention`.
        drop_rate: dropout before the classifier.
        drop_path_rate: stochastic depth of the last block, rising linearly from 0.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        dims: tuple[int, ...] = (64, 128, 320, 512),
        depths: tuple[int, ...] = (3, 5, 9, 3),
        num_heads: tuple[int, ...] = (1, 2, 5, 8),
        stoken_sizes: tuple[int | tuple[int, int], ...] = (8, 4, 1, 1),
        n_iter: int | tuple[int, ...] = 1,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        projection: int = 1024,
        layer_scale: tuple[float | None, ...] = (None, None, None, None),
        conv_stem: bool = True,
        cpe: bool = True,
        conv_ffn: bool = True,
        relative_position: bool = False,
        refine: str = "attention",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__()
        n_iters = (n_iter,) * len(dims) if isinstance(n_iter, int) else n_iter
        per_stage = {"depths": depths, "num_heads": num_heads, "stoken_sizes": stoken_sizes, "n_iter": n_iters}
        for name, values in (per_stage | {"layer_scale": layer_scale}).items():
            if len(values) != len(dims):
                raise ValueError(f"{name} must have one value for each of the {len(dims)} stages in dims, got {values}")
        self.in_chans = in_chans
        self.min_side = 1 if conv_stem else 4
        self.feature_info = [
            {"num_chs": dim, "reduction": 4 * 2**i, "module": f"stages.{i}"} for i, dim in enumerate(dims)
        ]
        self.stem: nn.Module = (
            STViTStem(in_chans, dims[0], **dd) if conv_stem else STViTPatchStem(in_chans, dims[0], **dd)
        )
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        stages = []
        for i, dim in enumerate(dims):
            cell = stoken_sizes[i]
            cell = (cell, cell) if isinstance(cell, int) else cell
            side = math.ceil(NATIVE_SIDE / self.feature_info[i]["reduction"])
            blocks: list[nn.Module] = [
                Block(
                    dim,
                    mlp_ratio,
                    cpe,
                    conv_ffn,
                    layer_scale[i],
                    rate,
                    num_heads=num_heads[i],
                    cell=cell,
                    n_iter=n_iters[i],
                    refine=refine,
                    qkv_bias=qkv_bias,
                    relative_grid=(math.ceil(side / cell[0]), math.ceil(side / cell[1])) if relative_position else None,
                    **dd,
                )
                for rate in rates[i]
            ]
            downsample = None
            if i > 0:
                downsample = MapSequential(
                    MapConv(dims[i - 1], dim, 3, stride=2, padding=1, **dd), nn.BatchNorm1d(dim, **dd)
                )
            stages.append(PyramidStage(blocks, downsample))
        self.stages = nn.ModuleList(stages)
        self.norm = nn.LayerNorm(dims[-1], eps=1e-6, **dd)
        if projection:
            self.norm = MapSequential(
                nn.Linear(dims[-1], projection, **dd), nn.BatchNorm1d(projection, **dd), nn.SiLU()
            )
        self._build_head(projection or dims[-1], num_classes, global_pool, drop_rate, **dd)
        self.init_weights(needs_reset=False)

    def no_weight_decay(self) -> set[str]:
        """The relative position tables."""
        return {name for name, _ in self.named_parameters() if name.endswith("position.table")}

    def _init_module(self, module: nn.Module, needs_reset: bool) -> None:
        # the authors initialise the classifier only; their 1x1 convolutions, Linear here, keep PyTorch's initialisation
        if isinstance(module, nn.Linear) and module is not self.head:
            if needs_reset:
                module.reset_parameters()
        else:
            super()._init_module(module, needs_reset)


def checkpoint_filter_fn(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Map the authors' names and shapes to ours; our own state dicts pass unchanged.

    The constant kernels of the authors' fold and unfold have no counterpart here and are left out.
    """
    if not any(name.startswith(("patch_embed.", "layers.")) for name in state_dict):
        return state_dict
    own = model.state_dict()
    renames = (
        (r"^patch_embed\.proj\.", "stem."),
        (r"^layers\.(\d+)\.downsample\.proj\.", lambda m: f"stages.{int(m[1]) + 1}.downsample."),
        (r"^layers\.", "stages."),
        (r"^proj\.", "norm.0."),
        (r"^norm\.(?!0)", "norm.1."),
        (r"\.pos_embed\.conv\.", ".cpe."),
        (r"\.norm1\.norm\.", ".norm1."),
        (r"\.attn\.stoken_refine\.", ".mixer.refine."),
        (r"\.mlp2\.conv\.conv\.", ".mlp.conv."),
        (r"\.mlp2\.", ".mlp."),
        (r"\.gamma_(\d)$", r".ls\1.gamma"),
    )
    out = {}
    for name, tensor in state_dict.items():
        if re.search(r"\.(un)?fold\.weights$", name):
            continue
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        if ".refine.qkv." in name:  # rows are (head, [q, k, v], head dim) there and ([q, k, v], head, head dim) here
            heads = model.get_submodule(name.rpartition(".qkv.")[0]).num_heads
            tensor = tensor.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        if name in own and tensor.numel() == own[name].numel():  # 1x1 convolutions and (1, C, 1, 1) scales
            tensor = tensor.reshape(own[name].shape)
        out[name] = tensor
    return out


def _cfg(top1: float) -> dict[str, Any]:
    return image_cfg(
        first_conv="stem.0",
        pool_size=(7, 7),
        paper_ids="arXiv:2211.11167",
        paper_name="Vision Transformer with Super Token Sampling",
        origin_url="https://github.com/hhb072/STViT",
        notes=(f"top1={top1}",),
    )


default_cfgs = generate_default_cfgs(
    {"stvit_small": _cfg(83.6), "stvit_base": _cfg(84.8), "stvit_large": _cfg(85.3)},
)

VARIANTS: dict[str, dict[str, Any]] = {
    "stvit_small": {},
    "stvit_base": {
        "dims": (96, 192, 384, 512),
        "depths": (4, 6, 14, 6),
        "num_heads": (2, 3, 6, 8),
        "layer_scale": (None, None, 1e-6, 1e-6),
    },
    "stvit_large": {
        "dims": (96, 192, 448, 640),
        "depths": (4, 7, 19, 8),
        "num_heads": (2, 3, 7, 10),
        "layer_scale": (None, None, 1e-6, 1e-6),
    },
}


def _create(variant: str, pretrained: bool, **kwargs: Any) -> STViT:
    return build_model_with_cfg(
        STViT,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": (0, 1, 2, 3), "feature_cls": "getter"},
        **(VARIANTS[variant] | kwargs),
    )


@register_model
def stvit_small(pretrained: bool = False, **kwargs: Any) -> STViT:
    """STViT-S, 25 M parameters."""
    return _create("stvit_small", pretrained, **kwargs)


@register_model
def stvit_base(pretrained: bool = False, **kwargs: Any) -> STViT:
    """STViT-B, 52 M parameters."""
    return _create("stvit_base", pretrained, **kwargs)


@register_model
def stvit_large(pretrained: bool = False, **kwargs: Any) -> STViT:
    """STViT-L, 95 M parameters."""
    return _create("stvit_large", pretrained, **kwargs)
