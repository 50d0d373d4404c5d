"""Base class of the segmenters, their loss, and the layers of their heads."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.dense.backbone import DenseBackbone, DenseModel
from tokamix.layers import FoldableSequential
from tokamix.models._backbone import check_tensor
from tokamix.tasks import IGNORE_INDEX

AUX_WEIGHT = 0.4  # of the auxiliary loss


class ConvNormAct(FoldableSequential):
    """A convolution, BatchNorm and ReLU.

    The papers synchronise BatchNorm over processes; training converts the layers where there are several.
    """

    def __init__(self, in_channels: int, channels: int, kernel_size: int = 3) -> None:
        conv = nn.Conv2d(in_channels, channels, kernel_size, padding=kernel_size // 2, bias=False)
        nn.init.kaiming_normal_(conv.weight, mode="fan_out", nonlinearity="relu")
        super().__init__(conv, nn.BatchNorm2d(channels), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        """(B, in_channels, H, W) -> (B, channels, H, W)."""
        if self.training and isinstance(self[1], nn.BatchNorm2d) and x.shape[0] * x.shape[2] * x.shape[3] == 1:
            raise ValueError(
                "BatchNorm cannot be trained on one value per channel, got one image with a 1x1 map; use at least 2"
                " images, larger images or evaluation mode"
            )
        return super().forward(x)


class Classifier(nn.Sequential):
    """Dropout of whole channels and a 1x1 convolution to logits."""

    def __init__(self, channels: int, num_classes: int, drop: float = 0.1) -> None:
        if num_classes < 1:
            raise ValueError(f"a segmenter needs at least one class, got num_classes={num_classes}")
        conv = nn.Conv2d(channels, num_classes, 1)
        nn.init.normal_(conv.weight, std=0.01)
        nn.init.zeros_(conv.bias)  # type: ignore[arg-type]
        super().__init__(nn.Dropout2d(drop), conv)


class AuxiliaryHead(nn.Sequential):
    """A head on one level, used only in training: a 3x3 convolution and a 1x1 convolution."""

    def __init__(self, channels: int, num_classes: int, width: int = 256, drop: float = 0.1) -> None:
        super().__init__(ConvNormAct(channels, width), Classifier(width, num_classes, drop))


class Segmenter(DenseModel):
    """A backbone, an optional neck and a head: images in, logits of the same size out.

    `segmenter(images)` returns logits (B, K, H, W). `segmenter(images, target)` with a target (B, H, W) of class
    indices, 255 for ignored pixels, returns the losses, whose sum is minimised. The loss is the mean over all pixels,
    with 0 for ignored ones, as in MMSegmentation: an image without labels gives 0, and processes whose images have more
    labelled pixels get a larger weight.

    Args:
        backbone: computes the maps.
        num_classes: number of classes.
        neck: list of maps -> list of maps, or None.
        head: list of maps -> logits (B, K, h, w).
        auxiliary: a head on one of the backbone's levels, or None.
        aux_level: index of that level.
    """

    def __init__(
        self,
        backbone: DenseBackbone,
        num_classes: int,
        neck: nn.Module | None,
        head: nn.Module,
        auxiliary: nn.Module | None = None,
        aux_level: int = 2,
    ) -> None:
        super().__init__()
        self.backbone, self.num_classes = backbone, num_classes
        self.neck = nn.Identity() if neck is None else neck
        self.head, self.auxiliary, self.aux_level = head, auxiliary, aux_level

    def forward(self, images: Tensor, target: Tensor | None = None) -> Tensor | dict[str, Tensor]:
        """Images (B, 3, H, W) -> logits (B, K, H, W); with a target (B, H, W), losses by name."""
        check_tensor(images, type(self).__name__)
        if target is not None and target.shape != (images.shape[0], *images.shape[-2:]):
            raise ValueError(
                f"images {tuple(images.shape)} need a target {(len(images), *images.shape[-2:])}, got"
                f" {tuple(target.shape)}"
            )
        padded = self.backbone.pad(images)
        maps = self.backbone(padded)
        height, width = images.shape[-2:]
        logits = self.decode(maps, padded.shape[-2:])[..., :height, :width]
        if target is None:
            return logits
        losses = {"loss_seg": segmentation_loss(logits, target)}
        if self.auxiliary is not None:
            aux = resize(self.auxiliary(maps[self.aux_level]), padded.shape[-2:])[..., :height, :width]
            losses["loss_aux"] = AUX_WEIGHT * segmentation_loss(aux, target)
        return losses

    def decode(self, maps: list[Tensor], size: tuple[int, int] | torch.Size) -> Tensor:
        """The backbone's maps -> logits (B, K, *size)."""
        return resize(self.head(self.neck(maps)), size)


def resize(x: Tensor, size: tuple[int, int] | torch.Size) -> Tensor:
    """Bilinear resizing of (B, C, h, w), corners not aligned.

    There is no shortcut for an unchanged size: an exported model would be specialised to it.
    """
    return F.interpolate(x, size=(size[0], size[1]), mode="bilinear", align_corners=False)


def segmentation_loss(logits: Tensor, target: Tensor) -> Tensor:
    """Cross entropy of logits (B, K, H, W) and classes (B, H, W), in float32, as a mean over all pixels."""
    total = F.cross_entropy(logits.float(), target, ignore_index=IGNORE_INDEX, reduction="sum")
    return total / max(target.numel(), 1)


def num_upsamplings(stride: int) -> int:
    """Number of x2 upsamplings from a stride to stride 4."""
    return max(round(math.log2(stride / 4)), 0)
