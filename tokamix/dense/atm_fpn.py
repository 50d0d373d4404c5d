"""ATMFPN: a feature pyramid network whose convolutions are active token mixers."""

from collections.abc import Sequence

from torch import Tensor, nn

from tokamix.dense.fpn import FPN, Extra
from tokamix.layers import channels_first, channels_last, map_to_tokens, tokens_to_map
from tokamix.mixers.active_token import ActiveTokenMixer


class ActiveConv(nn.Module):
    """An active token mixer in the place of a convolution: maps (B, C, H, W) -> (B, width, H, W).

    Args:
        channels: of the map.
        width: of the result.
        share: neighbouring channels that share an offset.
    """

    def __init__(self, channels: int, width: int, share: int = 1) -> None:
        super().__init__()
        self.mixer = ActiveTokenMixer(channels, share, out_dim=width)
        for name, parameter in self.mixer.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.startswith(("offset.1", "fusion")):
                nn.init.trunc_normal_(parameter, std=0.02)
            elif parameter.ndim == 2:
                # as the convolutions they replace: ATMNet's own 0.02 would let the signal fade, with no residual around
                nn.init.xavier_uniform_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the pixels of x (B, C, H, W)."""
        tokens, grid = map_to_tokens(channels_last(x).contiguous())
        return channels_first(tokens_to_map(self.mixer(tokens, grid), grid))


class AtmFPN(FPN):
    """ATMFPN of Active Token Mixer, arXiv 2203.06108, section 4.4: `FPN` with its convolutions replaced.

    The authors' code is not public and the text says no more than that ATM replaces the convolutions; the FLOPs of
    table 7 say the rest. What ATMFPN costs more than FPN depends on the backbone's channels C as 2 C^2 + 512 C per
    pixel, less twice 256^2. That is an ATM for *both* convolutions of a level, the 1x1 one (three embeddings C -> 256
    instead of one, and a projection) and the 3x3 one, each with an offset layer of its own that gives every channel its
    own offsets (`share` 1). docs/guides/dense.md compares the numbers. Strided convolutions beyond the last level stay.

    Args:
        channels: of the backbone's levels, fine to coarse.
        width: channels of every output.
        outs: outputs.
        extra: how outputs beyond the last level are made; see `FPN`.
        start: the first level that is used.
        strides: of the backbone's levels.
        share: neighbouring channels that share an offset.
    """

    def __init__(
        self,
        channels: Sequence[int],
        width: int = 256,
        outs: int = 4,
        extra: Extra = None,
        start: int = 0,
        strides: Sequence[int] = (4, 8, 16, 32),
        share: int = 1,
    ) -> None:
        self.share = share
        super().__init__(channels, width, outs, extra, start, strides)

    def _make_lateral(self, channels: int, width: int) -> nn.Module:
        return ActiveConv(channels, width, self.share)

    def _make_output(self, width: int) -> nn.Module:
        return ActiveConv(width, width, self.share)
