"""The feature pyramid network: coarse maps, which know what, added to fine ones, which know where."""

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

Extra = Literal["pool", "conv"] | None


class FPN(nn.Module):
    """Feature Pyramid Network, arXiv 1612.03144, as MMDetection and MMSegmentation have it: no norm, no activation.

    A 1x1 convolution brings each level to one width, coarser levels are added to finer ones (nearest neighbour), and a
    3x3 convolution makes each output.

    Args:
        channels: of the backbone's levels, fine to coarse.
        width: channels of every output.
        outs: outputs; those beyond the backbone's levels need `extra`.
        extra: how outputs beyond the last level are made: "pool" takes every second pixel of the output before (Mask
            R-CNN), "conv" is a 3x3 convolution of stride 2, the first on the backbone's last map (RetinaNet).
        start: the first level that is used.
        strides: of the backbone's levels.
    """

    def __init__(
        self,
        channels: Sequence[int],
        width: int = 256,
        outs: int = 4,
        extra: Extra = None,
        start: int = 0,
        strides: Sequence[int] = (4, 8, 16, 32),
    ) -> None:
        super().__init__()
        used = list(channels)[start:]
        beyond = outs - len(used)
        if not used or beyond < 0:
            raise ValueError(f"{outs} outputs cannot be made of {len(channels)} levels from level {start} on")
        if beyond and extra not in ("pool", "conv"):
            raise ValueError(f"{len(used)} levels give as many outputs, not {outs}: extra='pool' or 'conv' adds some")
        self.channels, self.width, self.outs, self.extra, self.start = tuple(channels), width, outs, extra, start
        kept = list(strides)[start : len(channels)]
        self.strides = tuple(kept + [kept[-1] * 2 ** (i + 1) for i in range(beyond)])
        self.lateral = nn.ModuleList(self._make_lateral(dim, width) for dim in used)
        self.output = nn.ModuleList(self._make_output(width) for _ in used)
        self.coarser = nn.ModuleList()
        if extra == "conv":
            self.coarser.extend(self._make_coarser(width if i else used[-1], width) for i in range(beyond))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)  # type: ignore[arg-type]

    def _make_lateral(self, channels: int, width: int) -> nn.Module:
        """What brings one level to the common width."""
        return nn.Conv2d(channels, width, 1)

    def _make_output(self, width: int) -> nn.Module:
        """What makes one level's output of its sum."""
        return nn.Conv2d(width, width, 3, padding=1)

    def _make_coarser(self, channels: int, width: int) -> nn.Module:
        """What makes an output of half the resolution."""
        return nn.Conv2d(channels, width, 3, stride=2, padding=1)

    def forward(self, levels: list[Tensor]) -> list[Tensor]:
        """The backbone's maps (B, C_i, H_i, W_i), finest first -> `outs` maps (B, width, ...), finest first."""
        if len(levels) != len(self.channels):
            raise ValueError(f"this neck was built for {len(self.channels)} levels and got {len(levels)}")
        sums = [lateral(x) for lateral, x in zip(self.lateral, levels[self.start :], strict=True)]
        for i in range(len(sums) - 1, 0, -1):
            # by size, not by factor: sides that are no multiple of 32 are halved with rounding
            sums[i - 1] = sums[i - 1] + F.interpolate(sums[i], size=sums[i - 1].shape[-2:], mode="nearest")
        maps = [output(x) for output, x in zip(self.output, sums, strict=True)]
        last = levels[-1]
        for conv in self.coarser:
            last = conv(last)
            maps.append(last)
        while len(maps) < self.outs:
            maps.append(maps[-1][..., ::2, ::2])
        return maps
