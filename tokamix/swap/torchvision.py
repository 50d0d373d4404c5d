"""torchvision's window attention; its ViT has nn.MultiheadAttention."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tokamix.layers import merge_heads
from tokamix.swap._host import BEFORE, Adapter, BlockLayout


def _shifted_windows(self: Any, x: Tensor) -> Tensor:
    """Swin's attention, version 1 or 2, in shifted windows of a map (B, H, W, C)."""
    height, width = x.shape[1:3]
    rows, columns = self.window_size
    padded = F.pad(x, (0, 0, 0, -width % columns, 0, -height % rows))
    grid = (padded.shape[1] // rows, padded.shape[2] // columns)
    shift = [0 if count == 1 else n for n, count in zip(self.shift_size, grid, strict=True)]
    padded = torch.roll(padded, (-shift[0], -shift[1]), (1, 2))
    windows = _partition(padded, grid)
    weight, bias = self.qkv.weight, self.qkv.bias
    cosine = hasattr(self, "logit_scale")
    if cosine and bias is not None:  # keys have no bias
        length = bias.numel() // 3
        bias = torch.cat([bias[:length], torch.zeros_like(bias[:length]), bias[2 * length :]])
    qkv = F.linear(windows, weight, bias).unflatten(-1, (3, self.num_heads, -1))
    q, k, v = qkv.transpose(1, 3).unbind(2)
    scale = None
    if cosine:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        if self.mixer.keeps_bias:
            q, scale = q * self.logit_scale.clamp(max=math.log(100.0)).exp(), 1.0
    position = self.get_relative_position_bias() if self.mixer.keeps_bias else None
    out = self.attend(q, k, v, None, _borders(padded, grid, shift), position, scale)
    out = F.dropout(self.proj(merge_heads(out)), self.dropout, self.training)
    out = out.unflatten(0, (-1, *grid)).unflatten(3, (rows, columns)).transpose(2, 3).flatten(3, 4).flatten(1, 2)
    return torch.roll(out, (shift[0], shift[1]), (1, 2))[:, :height, :width].contiguous()


def _partition(x: Tensor, grid: tuple[int, int]) -> Tensor:
    """(B, H, W, C) -> (B * windows, N, C)."""
    x = x.unflatten(2, (grid[1], -1)).unflatten(1, (grid[0], -1)).transpose(2, 3)
    return x.flatten(3, 4).flatten(0, 2)


def _borders(x: Tensor, grid: tuple[int, int], shift: list[int]) -> Tensor | None:
    """True at pairs of tokens that the shift brought from opposite borders: (B * windows, 1, N, N)."""
    if not any(shift):
        return None
    regions = []
    for size, count, n in zip(x.shape[1:3], grid, shift, strict=True):
        index = torch.arange(size, device=x.device)
        regions.append((index >= size - size // count).long() + (index >= size - n).long() if n else index * 0)
    region = (regions[0][:, None] * 3 + regions[1]).expand(1, -1, -1).unsqueeze(-1)
    ids = _partition(region, grid).squeeze(-1)
    return (ids[:, :, None] != ids[:, None, :]).repeat(x.shape[0], 1, 1).unsqueeze(1)


_WINDOWS = Adapter(
    _shifted_windows,
    layout="nhwc",
    position=("relative_position_bias_table", "relative_position_index", "cpb_mlp", "logit_scale"),
    window=True,
    note="mixers with the host's projections mix each window on its own, the others the whole map; the relative"
    " position bias is dropped, and in shifted windows SimA gives pairs across borders weight 0, other mixers mix them",
)
ADAPTERS: dict[str, Adapter] = {
    "torchvision.models.swin_transformer.ShiftedWindowAttention": _WINDOWS,
    "torchvision.models.swin_transformer.ShiftedWindowAttentionV2": _WINDOWS,
}
# here the attention itself makes the windows
BLOCKS = {
    f"torchvision.models.swin_transformer.{name}": BlockLayout(mid=("mlp.3", BEFORE))
    for name in ("SwinTransformerBlock", "SwinTransformerBlockV2")
}
