"""Convolution and normalisation on token layout: channels last, no copy on the way in or out."""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module, trunc_normal_
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tokamix.ops import depthwise_conv, dispatch
from tokamix.ops.precision import autocast_dtype

BatchNorm = nn.modules.batchnorm._BatchNorm  # of any number of axes, also nn.SyncBatchNorm


def channels_first(x: Tensor) -> Tensor:
    """(B, H, W, C) -> (B, C, H, W), a view whose memory is channels_last."""
    return x.permute(0, 3, 1, 2)


def channels_last(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B, H, W, C), a view (contiguous when the memory was channels_last)."""
    return x.permute(0, 2, 3, 1)


class MapConv(nn.Conv2d):
    """A convolution on maps (B, H, W, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (B, H, W, C)."""
        image = channels_first(x)
        return channels_last(self._as_product(image) if self._is_heavy(image) else super().forward(image))

    def _is_heavy(self, image: Tensor) -> bool:
        """Whether a CPU would spend its time on rearranging kernels, which a convolution does at each call."""
        plain = self.groups == 1 and not isinstance(self.padding, str) and self.padding_mode == "zeros"
        recorded = torch.compiler.is_compiling() or dispatch.is_exporting() or torch.jit.is_tracing()
        # in inference mode alone: a checkpoint's first pass has no gradients either, and must do what its second does
        if image.device.type != "cpu" or not plain or recorded or not torch.is_inference_mode_enabled():
            return False
        return self.weight[0].numel() > 4 * image[:, 0].numel()

    def _as_product(self, image: Tensor) -> Tensor:
        padding: Any = self.padding
        patches = F.unfold(image, self.kernel_size, self.dilation, padding, self.stride)
        sides = zip(image.shape[2:], self.kernel_size, self.dilation, padding, self.stride, strict=True)
        grid = [(n + 2 * pad - step * (k - 1) - 1) // stride + 1 for n, k, step, pad, stride in sides]
        product = F.linear(patches.mT, self.weight.flatten(1), self.bias)  # (B, h * w, C), as the next layer wants it
        return channels_first(product.unflatten(1, grid))


class ImageConv(nn.Conv2d):
    """A first convolution: images (B, C, H, W) in, channels_last memory out.

    cuDNN multiplies half precision on tensor cores only where channels come in eights, so on a GPU zeros fill them up.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Convolve images x."""
        x, weight = x.contiguous(memory_format=torch.channels_last), self.weight
        if x.is_cuda and autocast_dtype(x) in (torch.bfloat16, torch.float16) and not dispatch.is_exporting():
            missing = (0, 0, 0, 0, 0, -self.in_channels % 8)
            x, weight = F.pad(x, missing), F.pad(weight, missing)
        return self._conv_forward(x, weight, self.bias)


@register_notrace_module
class PatchConv(nn.Conv2d):
    """A first convolution whose patches do not overlap: images (B, C, H, W) in, channels_last memory out.

    A matrix product, as cuDNN has no good kernel for patches of three channels, nor a CPU for large ones.
    """

    def __init__(
        self, in_chans: int, dim: int, patch_size: int | tuple[int, int], device: Any = None, dtype: Any = None
    ) -> None:
        super().__init__(in_chans, dim, patch_size, patch_size, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Convolve images x."""
        height, width = self.kernel_size
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            return super().forward(x)  # which says what is wrong
        if x.device.type == "cpu" and height * width < 64:
            return super().forward(x.contiguous(memory_format=torch.channels_last))
        patches = x.unfold(2, height, height).unfold(3, width, width).permute(0, 2, 3, 1, 4, 5)  # (B, h, w, C, ...)
        return channels_first(F.linear(patches.flatten(3), self.weight.flatten(1), self.bias))


class DepthwiseConv(MapConv):
    """A depthwise convolution on maps (B, H, W, C); see `tokamix.ops.depthwise_conv` for `residual` and `gelu`."""

    def __init__(
        self,
        dim: int,
        kernel_size: int = 3,
        bias: bool = True,
        residual: bool = False,
        gelu: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(
            dim, dim, kernel_size, padding=kernel_size // 2, groups=dim, bias=bias, device=device, dtype=dtype
        )
        self.residual, self.gelu = residual, gelu

    def forward(self, x: Tensor) -> Tensor:
        """Convolve x (B, H, W, C)."""
        return depthwise_conv(x, self.weight, self.bias, self.residual, self.gelu)

    def extra_repr(self) -> str:
        """What torch.nn.Conv2d says, and the forms switched on."""
        return super().extra_repr() + ", residual=True" * self.residual + ", gelu=True" * self.gelu


class GELU(nn.GELU):
    """GELU; compiled in half precision on a GPU, `near_gelu`, `recomputed`."""

    def forward(self, x: Tensor) -> Tensor:
        """GELU of x."""
        fused = torch.compiler.is_compiling() and not dispatch.is_exporting()
        if fused and x.is_cuda and x.dtype in (torch.bfloat16, torch.float16):
            return recomputed(lambda x: near_gelu(x.float()).to(x.dtype), x)
        return super().forward(x)


class InputNorm(nn.LayerNorm):
    """A LayerNorm that feeds a layer: its output has the type this layer computes in, and is `recomputed`."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x (..., C)."""
        return recomputed(lambda x: nn.LayerNorm.forward(self, x).to(autocast_dtype(x)), x)


def recomputed(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """function(x), which the backward pass of a model compiled for a GPU computes again instead of keeping it.

    For what is cheap to compute and read by a matrix product: there the compiler would keep input and output.
    """
    if torch.compiler.is_compiling() and torch.is_grad_enabled() and x.is_cuda and not dispatch.is_exporting():
        return checkpoint(function, x, use_reentrant=False, preserve_rng_state=False)
    return function(x)


def near_gelu(x: Tensor) -> Tensor:
    """GELU to within 3e-5 by the sigmoid of an odd quintic: a fused kernel waits for erf longer than for memory."""
    square = (x * x).clamp(max=25.0)  # beyond 5 the quintic would turn
    return x * torch.sigmoid(x * (1.59501055 + square * (0.07401604 - 0.00070380 * square)))


def normed(norm: nn.Module, x: Tensor) -> Tensor:
    """The nn.BatchNorm1d of a map or of tokens x (..., C), per channel.

    Not a layer of its own: what converts a model to nn.SyncBatchNorm would put a plain one in its place.
    """
    return norm(x.reshape(-1, x.shape[-1])).view(x.shape)


class Layers(nn.Sequential):
    """Layers in a row; `timm.utils.reparameterize_model` gives a BatchNorm's work to the layer before it."""

    def reparameterize(self) -> None:
        """Fold each BatchNorm that follows a convolution or a Linear layer."""
        for i, (layer, norm) in enumerate(pairwise(list(self))):
            if isinstance(layer, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
                self[i + 1] = fold_back(layer, norm)


class MapLayers(Layers):
    """Layers on maps (B, H, W, C) or tokens (B, N, C)."""

    def forward(self, x: Tensor) -> Tensor:
        """Call one after another on x (..., C)."""
        return self._call(list(self), x)

    def _call(self, layers: list[nn.Module], x: Tensor) -> Tensor:
        for layer in layers:
            x = normed(layer, x) if isinstance(layer, BatchNorm) else layer(x)
        return x


def fold_back(layer: nn.Conv2d | nn.ConvTranspose2d | nn.Linear, norm: nn.Module) -> nn.Module:
    """Give the layer before a BatchNorm its work, and return what is left in its place."""
    if not isinstance(norm, BatchNorm):
        return norm
    scale, shift = _scale_and_shift(norm)
    axis = 1 if isinstance(layer, nn.ConvTranspose2d) else 0
    shape = [-1 if i == axis else 1 for i in range(layer.weight.ndim)]
    with torch.no_grad():
        layer.weight.mul_(scale.view(shape))
        _set_bias(layer, shift if layer.bias is None else layer.bias * scale + shift)
    return nn.Identity()


def fold_ahead(norm: nn.Module, layer: nn.Linear) -> nn.Module:
    """Give the layer after a BatchNorm its work, and return what is left in its place."""
    if not isinstance(norm, BatchNorm):
        return norm
    scale, shift = _scale_and_shift(norm)
    with torch.no_grad():
        shift = layer.weight.to(shift.dtype) @ shift
        _set_bias(layer, shift if layer.bias is None else layer.bias + shift)
        layer.weight.mul_(scale)
    return nn.Identity()


def _set_bias(layer: nn.Module, bias: Tensor) -> None:
    weight: Any = layer.weight
    layer.bias = nn.Parameter(bias.to(weight.dtype), requires_grad=weight.requires_grad)


@torch.no_grad()
def _scale_and_shift(norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """What a BatchNorm does to each channel in evaluation, at least in float32."""
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None
    assert variance is not None
    wide = torch.promote_types(variance.dtype, torch.float32)
    scale = norm.weight.to(wide) * (variance.to(wide) + norm.eps).rsqrt()
    return scale, norm.bias - mean * scale


class ConvEmbed(nn.Module):
    """A strided convolution and a LayerNorm: map (B, H, W, C) -> smaller map (B, h, w, dim)."""

    def __init__(
        self,
        in_chans: int,
        dim: int,
        kernel_size: int,
        stride: int,
        padding: int = 0,
        eps: float = 1e-5,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.proj = MapConv(in_chans, dim, kernel_size, stride, padding, **dd)
        self.norm = nn.LayerNorm(dim, eps=eps, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, in_chans) -> (B, h, w, dim)."""
        return self.norm(self.proj(x))


class PatchEmbed(nn.Module):
    """Non-overlapping patches and a LayerNorm: images (B, in_chans, H, W) -> map (B, h, w, dim)."""

    def __init__(
        self, in_chans: int, dim: int, patch_size: int, eps: float, device: Any = None, dtype: Any = None
    ) -> None:
        dd = {"device": device, "dtype": dtype}
        super().__init__()
        self.proj = PatchConv(in_chans, dim, patch_size, **dd)
        self.norm = nn.LayerNorm(dim, eps=eps, **dd)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, in_chans, H, W) -> (B, h, w, dim)."""
        return self.norm(channels_last(self.proj(x)))


class PositionTable(nn.Module):
    """A learned vector for each token of a grid and for the prefix tokens before it, added to the tokens.

    Other grids get the table resized. `grid` is the table's own.
    """

    def __init__(
        self,
        dim: int,
        grid: tuple[int, int],
        prefix: int = 0,
        mode: str = "bilinear",
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.grid, self.prefix, self.mode = grid, prefix, mode
        self.table = nn.Parameter(torch.empty(1, prefix + grid[0] * grid[1], dim, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the table."""
        trunc_normal_(self.table, std=0.02)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        """Add the positions of `grid` (H, W) to tokens x (B, prefix + H*W, C)."""
        # an exported graph serves all sizes: it must not compare them, and resizing to the same one changes nothing
        fits = not dispatch.is_exporting() and grid == self.grid
        return x + (self.table if fits else self._resized(self.table, self.grid, grid))

    def fit(self, table: Tensor) -> Tensor:
        """A checkpoint's table (1, prefix + N, C) of a square grid, resized to this one's."""
        if table.shape == self.table.shape:
            return table
        side = math.isqrt(table.shape[1] - self.prefix)
        if side**2 + self.prefix != table.shape[1]:
            raise ValueError(
                f"a table of {table.shape[1]} positions, {self.prefix} of them before the grid, has no square grid;"
                f" build the model for the checkpoint's image size and call set_input_size after loading"
            )
        return self._resized(table, (side, side), self.grid)

    def set_grid(self, grid: tuple[int, int]) -> None:
        """Resize the table itself."""
        if grid != self.grid:
            with torch.no_grad():
                self.table = nn.Parameter(self._resized(self.table, self.grid, grid))
            self.grid = grid

    def _resized(self, table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
        positions = table[:, self.prefix :].unflatten(1, old).permute(0, 3, 1, 2)
        wide = positions.to(torch.promote_types(table.dtype, torch.float32))
        positions = channels_last(F.interpolate(wide, size=new, mode=self.mode)).flatten(1, 2).to(table.dtype)
        return torch.cat([table[:, : self.prefix], positions], dim=1)


def fit_positions(state_dict: dict[str, Tensor], model: nn.Module) -> None:
    """Resize a checkpoint's tables of positions to those of `model`, in place."""
    for name, module in model.named_modules():
        if isinstance(module, PositionTable) and f"{name}.table" in state_dict:
            state_dict[f"{name}.table"] = module.fit(state_dict[f"{name}.table"])


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """(B, N, C) -> (B, num_heads, N, C / num_heads)."""
    return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """(B, H, N, D) -> (B, N, H * D)."""
    return x.transpose(1, 2).flatten(2)


class SoftmaxProduct(nn.Module):
    """softmax(scale q k^T) v: what stands between the projections of an attention, and what a mixer can replace."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, H, Nq, D), k and v (B, H, Nk, D) -> (B, H, Nq, D)."""
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale)

    def extra_repr(self) -> str:
        """The scale."""
        return f"scale={self.scale:.4g}"


def map_to_tokens(x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """(B, H, W, C) -> tokens (B, H*W, C) and the grid (H, W)."""
    return x.flatten(1, 2), (x.shape[1], x.shape[2])


def tokens_to_map(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """Tokens (B, H*W, C) -> (B, H, W, C)."""
    return x.unflatten(1, grid)
