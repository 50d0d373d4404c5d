"""A feature pyramid from a columnar model: the neck that the papers use for detection with XCiT and SimA."""

from collections.abc import Sequence

import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.layers import FoldableSequential


def select_blocks(depth: int) -> tuple[int, ...]:
    """0-based indices of the four blocks whose outputs are used: 4, 6, 8 and 12 of 12, other depths in proportion."""
    if depth < 4:
        raise ValueError(f"four levels need a model of at least 4 blocks, got {depth}")
    after = [round(depth * part / 12) for part in (4, 6, 8, 12)]
    for i in range(2, -1, -1):  # shallow models too must give four different blocks
        after[i] = min(after[i], after[i + 1] - 1)
    return tuple(max(block, i + 1) - 1 for i, block in enumerate(after))


class VitPyramid(nn.Module):
    """Four maps of one stride -> strides 4, 8, 16 and 32.

    XCiT's detection code (facebookresearch/xcit), which SimA uses: two transposed convolutions with BatchNorm and GELU
    between them for x4, one for x2, identity for x1, max-pooling for x1/2. For patches of 8 pixels the levels are x2,
    x1, x1/2 and x1/4 in the same order. Maps of other strides, such as DINOv2's 14, are first resized to stride 16.

    Args:
        dim: channels of the model.
        stride: its patch size, from 8 to 32.
    """

    def __init__(self, dim: int, stride: int = 16) -> None:
        super().__init__()
        if not 8 <= stride <= 32:
            raise ValueError(f"a pyramid needs patches of 8 to 32 px, got {stride}")
        self.scale = 1.0 if stride in (8, 16) else stride / 16
        self.channels: tuple[int, ...] = (dim,) * 4
        self.strides: tuple[int, ...] = (4, 8, 16, 32)
        # the papers synchronise BatchNorm over processes; training converts the layers where there are several
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
        """Four maps (B, dim, h, w) -> maps of 4, 2, 1 and 1/2 times their size (patch 16)."""
        if self.scale != 1:
            size = [max(round(side * self.scale), 1) for side in maps[0].shape[-2:]]
            maps = [F.interpolate(x, size=size, mode="bilinear", align_corners=False) for x in maps]
        return [level(x) for level, x in zip(self.levels, maps, strict=True)]


class _Halve(nn.MaxPool2d):
    """Max-pooling that keeps a last, incomplete window, so that maps of one token work."""

    def __init__(self, factor: int) -> None:
        super().__init__(factor, stride=factor, ceil_mode=True)
