"""The feature pyramid network: coarse maps are upsampled and added to fine ones."""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

ExtraLevels = Literal["pool", "conv"] | None


class FPN(nn.Module):
    """Feature Pyramid Network, arXiv 1612.03144, as MMDetection and MMSegmentation have it: no norm, no activation.

    A 1x1 convolution projects each level to one width, coarser levels are upsampled (nearest neighbour) and added to
    finer ones, and a 3x3 convolution computes each output. torchvision's FeaturePyramidNetwork lacks `start_level` and
    the first extra convolution on the backbone's map, and cannot have its convolutions replaced.

    Args:
        channels: of the backbone's levels, fine to coarse.
        width: channels of every output.
        num_outs: number of outputs; more than the backbone's levels need `extra_levels`.
        extra_levels: how outputs beyond the last level are computed: "pool" takes every second pixel of the output
            before (Mask R-CNN), "conv" is a 3x3 convolution of stride 2, the first on the backbone's last map
            (RetinaNet).
        start_level: the first level that is used.
        strides: of the backbone's levels.
    """

    def __init__(
        self,
        channels: Sequence[int],
        width: int = 256,
        num_outs: int = 4,
        extra_levels: ExtraLevels = None,
        start_level: int = 0,
        strides: Sequence[int] = (4, 8, 16, 32),
    ) -> None:
        super().__init__()
        used = list(channels)[start_level:]
        num_extra = num_outs - len(used)
        if not used or num_extra < 0:
            raise ValueError(
                f"num_outs={num_outs} does not fit the {len(used)} levels from start_level={start_level} on; use a"
                f" start_level below {len(channels)} and at least as many outputs as levels"
            )
        if num_extra and extra_levels not in ("pool", "conv"):
            raise ValueError(f"num_outs={num_outs} from {len(used)} levels needs extra_levels='pool' or 'conv'")
        self.channels, self.width = tuple(channels), width
        self.num_outs, self.extra_levels, self.start_level = num_outs, extra_levels, start_level
        used_strides = list(strides)[start_level : len(channels)]
        self.strides = tuple(used_strides + [used_strides[-1] * 2 ** (i + 1) for i in range(num_extra)])
        self.lateral = nn.ModuleList(self._create_lateral(dim, width) for dim in used)
        self.output = nn.ModuleList(self._create_output(width) for _ in used)
        self.coarser = nn.ModuleList()
        if extra_levels == "conv":
            self.coarser.extend(self._create_coarser(width if i else used[-1], width) for i in range(num_extra))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def _create_lateral(self, channels: int, width: int) -> nn.Module:
        """The layer that projects one level to the common width."""
        return nn.Conv2d(channels, width, 1)

    def _create_output(self, width: int) -> nn.Module:
        """The layer that computes the output of one level from its sum."""
        return nn.Conv2d(width, width, 3, padding=1)

    def _create_coarser(self, channels: int, width: int) -> nn.Module:
        """The layer that computes an output of half the resolution."""
        return nn.Conv2d(channels, width, 3, stride=2, padding=1)

    def forward(self, levels: list[Tensor]) -> list[Tensor]:
        """The backbone's maps (B, C_i, H_i, W_i), finest first -> `num_outs` maps (B, width, ...), finest first."""
        if len(levels) != len(self.channels):
            raise ValueError(f"this neck takes {len(self.channels)} levels, got {len(levels)}")
        sums = [lateral(x) for lateral, x in zip(self.lateral, levels[self.start_level :], strict=True)]
        for i in range(len(sums) - 1, 0, -1):
            # by size, not by factor: sides that are not multiples of 32 are rounded when halved
            sums[i - 1] = sums[i - 1] + F.interpolate(sums[i], size=sums[i - 1].shape[-2:], mode="nearest")
        maps = [output(x) for output, x in zip(self.output, sums, strict=True)]
        last = levels[-1]
        for conv in self.coarser:
            last = conv(last)
            maps.append(last)
        while len(maps) < self.num_outs:
            maps.append(maps[-1][..., ::2, ::2])
        return maps
