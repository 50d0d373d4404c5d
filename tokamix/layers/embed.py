"""Patch embeddings: a convolution and a LayerNorm."""

from typing import Any

from torch import Tensor, nn

from tokamix.layers.conv import MapConv, PatchConv
from tokamix.layers.layout import channels_last


class ConvEmbed(nn.Module):
    """A strided convolution and a LayerNorm: map (B, H, W, in_chans) -> smaller map (B, h, w, dim)."""

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
