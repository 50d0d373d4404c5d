"""UperNet: pyramid pooling on the coarsest level, then a feature pyramid whose levels are fused."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.dense.backbone import DenseBackbone
from tokamix.dense.mmseg import checkpoint_filter_fn  # noqa: F401  (load_checkpoint looks it up here)
from tokamix.dense.segmenter import AuxiliaryHead, Classifier, ConvNormAct, Segmenter, resize
from tokamix.ops import dispatch

POOL_SIZES = (1, 2, 3, 6)  # sides of the pooled grids


def average_pool(x: Tensor, side: int) -> Tensor:
    """`F.adaptive_avg_pool2d` to (B, C, side, side); while exporting as two products, right at every size.

    ONNX export computes the windows of symbolic sizes wrongly.
    """
    if not dispatch.is_exporting():
        return F.adaptive_avg_pool2d(x, side)
    rows, columns = (_pool_weights(size, side, x) for size in x.shape[-2:])
    return rows @ x @ columns.mT


def _pool_weights(size: int, side: int, x: Tensor) -> Tensor:
    """Weights (side, size) of each position in each window's mean; windows as in `F.adaptive_avg_pool2d`."""
    window, position = torch.arange(side, device=x.device)[:, None], torch.arange(size, device=x.device)
    inside = (position >= window * size // side) & (position < ((window + 1) * size + side - 1) // side)
    weights = inside.to(x.dtype)
    return weights / weights.sum(1, keepdim=True)


class PyramidPooling(nn.Module):
    """Concatenate a map with its averages over grids of several sizes and fuse them.

    Args:
        channels: of the input.
        width: channels of each average and of the output.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList(ConvNormAct(channels, width, 1) for _ in POOL_SIZES)
        self.join = ConvNormAct(channels + len(POOL_SIZES) * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, width, H, W)."""
        parts = [x]
        for pool, branch in zip(POOL_SIZES, self.branches, strict=True):
            parts.append(resize(branch(average_pool(x, pool)), x.shape[-2:]))
        return self.join(torch.cat(parts, dim=1))


class UperHead(nn.Module):
    """Unified Perceptual Parsing, arXiv 1807.10221, as in MMSegmentation.

    Args:
        channels: of the backbone's levels, fine to coarse.
        num_classes: number of classes.
        width: channels of the head.
        drop: dropout before the classifier.
    """

    def __init__(self, channels: Sequence[int], num_classes: int, width: int = 512, drop: float = 0.1) -> None:
        super().__init__()
        finer = list(channels)[:-1]
        self.pooling = PyramidPooling(channels[-1], width)
        self.lateral = nn.ModuleList(ConvNormAct(dim, width, 1) for dim in finer)
        self.output = nn.ModuleList(ConvNormAct(width, width) for _ in finer)
        self.join = ConvNormAct(len(channels) * width, width)
        self.classifier = Classifier(width, num_classes, drop)

    def forward(self, maps: list[Tensor]) -> Tensor:
        """Maps (B, C_i, H_i, W_i), finest first -> logits (B, K, H_0, W_0)."""
        sums = [lateral(x) for lateral, x in zip(self.lateral, maps[:-1], strict=True)]
        sums.append(self.pooling(maps[-1]))
        for i in range(len(sums) - 1, 0, -1):
            sums[i - 1] = sums[i - 1] + resize(sums[i], sums[i - 1].shape[-2:])
        outputs = [output(x) for output, x in zip(self.output, sums[:-1], strict=True)] + [sums[-1]]
        resized = [resize(x, sums[0].shape[-2:]) for x in outputs[1:]]
        return self.classifier(self.join(torch.cat([outputs[0], *resized], dim=1)))


class UperNet(Segmenter):
    """A backbone and `UperHead`, with an auxiliary head on the second-to-last level; see `Segmenter`."""

    method = "upernet"

    def __init__(self, backbone: DenseBackbone, num_classes: int, width: int = 512, aux: bool = True) -> None:
        head = UperHead(backbone.channels, num_classes, width)
        level = len(backbone.channels) - 2
        auxiliary = AuxiliaryHead(backbone.channels[level], num_classes) if aux else None
        super().__init__(backbone, num_classes, None, head, auxiliary, level)
