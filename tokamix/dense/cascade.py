"""Cascade Mask R-CNN: three stages, each trained on the boxes the one before moved, each asking for more overlap."""

from collections.abc import Iterable

from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead
from torchvision.ops import generalized_box_iou_loss

from tokamix.dense._detector import Coder
from tokamix.dense.mask_rcnn import HIDDEN, MaskRCNN, Stage

GIOU_WEIGHT = 10.0
IOUS = (0.5, 0.6, 0.7)
CODERS = ((0.1, 0.2), (0.05, 0.1), (0.033, 0.067))


def giou_box_loss(codes: Tensor, boxes: Tensor, truths: Tensor, coder: Coder) -> Tensor:
    """Ten times the sum of 1 - GIoU between the decoded boxes and the truths."""
    return GIOU_WEIGHT * generalized_box_iou_loss(coder.decode_single(codes, boxes), truths, reduction="sum", eps=1e-6)


class CascadeMaskRCNN(MaskRCNN):
    """Cascade Mask R-CNN, arXiv 1712.00726, in the form the papers took from Swin.

    Box heads are four convolutions with batch norm and one hidden layer, boxes are moved by class, the box loss is GIoU
    on decoded boxes, and every stage has a mask head.
    """

    method = "cascade_mask_rcnn"
    weights = (1.0, 0.5, 0.25)
    beta = 1 / 9
    kept = 2000

    def make_stages(self, num_classes: int, width: int, strides: tuple[int, ...], regions: int) -> Iterable[Stage]:
        """Three stages; a truth claims nothing here, for a box too far off would teach the wrong thing."""
        for iou, (shift, size) in zip(IOUS, CODERS, strict=True):
            yield Stage(
                FastRCNNConvFCHead((width, 7, 7), [width] * 4, [HIDDEN], norm_layer=nn.BatchNorm2d),
                num_classes,
                width,
                strides,
                regions=regions,
                iou=iou,
                claim=False,
                coder=Coder(shift, size),
                box_loss=giou_box_loss,
            )
