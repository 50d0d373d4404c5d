"""Semantic FPN: every level of a feature pyramid is upsampled to stride 4, and the levels are added."""

from collections.abc import Sequence

from torch import Tensor, nn

from tokamix.dense.backbone import DenseBackbone
from tokamix.dense.fpn import FPN
from tokamix.dense.mmseg import checkpoint_filter_fn  # noqa: F401  (load_checkpoint looks it up here)
from tokamix.dense.segmenter import Classifier, ConvNormAct, Segmenter, num_upsamplings, resize


class SemanticFPNHead(nn.Module):
    """Panoptic Feature Pyramid Networks, arXiv 1901.02446, section 3.1, with BatchNorm as in MMSegmentation.

    Each level has one convolution (two at stride 16, three at stride 32) with an upsampling after each, except at
    stride 4; the sum over the levels is classified. A map is resized to the size of the next finer level, which is
    twice its own if the sides are multiples of 32.

    Args:
        in_channels: channels of the neck's outputs.
        strides: their strides, fine to coarse.
        num_classes: number of classes.
        width: channels of the head.
        drop: dropout before the classifier.
    """

    def __init__(
        self, in_channels: int, strides: Sequence[int], num_classes: int, width: int = 128, drop: float = 0.1
    ) -> None:
        super().__init__()
        self.levels = nn.ModuleList(
            nn.ModuleList(
                ConvNormAct(width if i else in_channels, width) for i in range(max(1, num_upsamplings(stride)))
            )
            for stride in strides
        )
        self.classifier = Classifier(width, num_classes, drop)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Maps (B, C, H_i, W_i), finest first -> logits (B, K, H_0, W_0)."""
        sizes = [x.shape[-2:] for x in maps]
        total: Tensor | None = None
        for i, (convs, x) in enumerate(zip(self.levels, maps, strict=True)):
            for conv in convs.children():
                x = conv(x)
                if i > 0:
                    i -= 1
                    x = resize(x, sizes[i])
            if i > 0:
                x = resize(x, sizes[0])
            total = x if total is None else total + x
        return self.classifier(total)


class SemanticFPN(Segmenter):
    """A backbone, a feature pyramid and `SemanticFPNHead`; see `Segmenter`."""

    method = "semantic_fpn"

    def __init__(self, backbone: DenseBackbone, num_classes: int, neck: FPN, width: int = 128) -> None:
        head = SemanticFPNHead(neck.width, neck.strides, num_classes, width)
        super().__init__(backbone, num_classes, neck, head)
