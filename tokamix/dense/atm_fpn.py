"""ATMFPN: a feature pyramid network whose convolutions are active token mixers."""

from collections.abc import Sequence

from torch import Tensor, nn

from tokamix.dense.fpn import FPN, ExtraLevels
from tokamix.layers import channels_first, channels_last, map_to_tokens, tokens_to_map
from tokamix.mixers.active_token import ActiveTokenMixer


class ActiveConv(nn.Module):
    """An active token mixer in place of a convolution: maps (B, C, H, W) -> (B, width, H, W).

    Args:
        channels: of the input.
        width: channels of the output.
        share: number of neighbouring channels that share an offset.
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
                # as the convolutions they replace: with ATMNet's 0.02 and no residual the signal would vanish
                nn.init.xavier_uniform_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the pixels of x (B, C, H, W)."""
        tokens, grid = map_to_tokens(channels_last(x).contiguous())
        return channels_first(tokens_to_map(self.mixer(tokens, grid), grid))


class AtmFPN(FPN):
    """ATMFPN of Active Token Mixer, arXiv 2203.06108, section 4.4: `FPN` with its convolutions replaced.

    The authors' code is not public and the text only states that ATM replaces the convolutions; the rest is derived
    from the FLOPs in table 7. The cost of ATMFPN above FPN depends on the backbone's channels C as 2 C^2 + 512 C per
    pixel, minus twice 256^2. That is an ATM for *both* convolutions of a level, the 1x1 one (three embeddings C -> 256
    instead of one, and a projection) and the 3x3 one, each with its own offset layer that gives every channel its own
    offsets (`share` 1). docs/guides/dense.md compares the numbers. Strided convolutions beyond the last level stay.

    Args:
        channels: of the backbone's levels, fine to coarse.
        width: channels of every output.
        num_outs: number of outputs.
        extra_levels: how outputs beyond the last level are computed; see `FPN`.
        start_level: the first level that is used.
        strides: of the backbone's levels.
        share: number of neighbouring channels that share an offset.
    """

    def __init__(
        self,
        channels: Sequence[int],
        width: int = 256,
        num_outs: int = 4,
        extra_levels: ExtraLevels = None,
        start_level: int = 0,
        strides: Sequence[int] = (4, 8, 16, 32),
        share: int = 1,
    ) -> None:
        self.share = share
        super().__init__(channels, width, num_outs, extra_levels, start_level, strides)

    def _create_lateral(self, channels: int, width: int) -> nn.Module:
        return ActiveConv(channels, width, self.share)

    def _create_output(self, width: int) -> nn.Module:
        return ActiveConv(width, width, self.share)
