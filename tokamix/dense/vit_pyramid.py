"""A pyramid out of a column: the simple neck with which the papers detect with XCiT and SimA."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.layers import FoldableSequential


def taps(depth: int) -> tuple[int, ...]:
    """The four blocks whose tokens are taken, 0-based: 4, 6, 8 and 12 of 12 blocks, and in proportion of others."""
    if depth < 4:
        raise ValueError(f"four levels need a column of at least 4 blocks, got {depth}")
    after = [round(depth * part / 12) for part in (4, 6, 8, 12)]
    for i in range(2, -1, -1):  # shallow columns: four different blocks all the same
        after[i] = min(after[i], after[i + 1] - 1)
    return tuple(max(block, i + 1) - 1 for i, block in enumerate(after))


class VitPyramid(nn.Module):
    """Four maps of one stride -> strides 4, 8, 16 and 32.

    XCiT's detection code (facebookresearch/xcit), which SimA uses: two transposed convolutions with BatchNorm and GELU
    between them for x4, one for x2, nothing for x1, max-pooling for x1/2. For patches of 8 pixels the levels are x2,
    x1, x1/2 and x1/4 in the same order. Maps of other strides, such as DINOv2's 14, are first resized to stride 16.

    Args:
        dim: channels of the column.
        stride: its patch size, from 8 to 32.
    """

    def __init__(self, dim: int, stride: int = 16) -> None:
        super().__init__()
        if not 8 <= stride <= 32:
            raise ValueError(f"a column becomes a pyramid from patches of 8 to 32 px, not of {stride}")
        self.scale = 1.0 if stride in (8, 16) else stride / 16
        self.channels: tuple[int, ...] = (dim,) * 4
        self.strides: tuple[int, ...] = (4, 8, 16, 32)
        # BatchNorm here and in the heads: the papers synchronise it over processes, which training does by conversion
        four = FoldableSequential(
            nn.ConvTranspose2d(dim, dim, 2, stride=2),
            nn.BatchNorm2d(dim),
            nn.GELU(),
            nn.ConvTranspose2d(dim, dim, 2, stride=2),
        )
        if stride != 8:
            levels: Sequence[nn.Module] = (four, nn.ConvTranspose2d(dim, dim, 2, stride=2), nn.Identity(), _Halve(2))
        else:
            levels = (nn.ConvTranspose2d(dim, dim, 2, stride=2), nn.Identity(), _Halve(2), _Halve(4))
        self.levels = nn.ModuleList(levels)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        """Four maps (B, dim, h, w) -> maps of four times, twice, once and half their sides (patch 16)."""
        if self.scale != 1:
            size = [max(round(side * self.scale), 1) for side in maps[0].shape[-2:]]
            maps = [F.interpolate(x, size=size, mode="bilinear", align_corners=False) for x in maps]
        return [level(x) for level, x in zip(self.levels, maps, strict=True)]


class _Halve(nn.MaxPool2d):
    """Max-pooling that keeps a last, incomplete window, so that maps of one token survive."""

    def __init__(self, factor: int) -> None:
        super().__init__(factor, stride=factor, ceil_mode=True)
