"""Cascade Mask R-CNN: three stages, each trained on the boxes that the stage before refined, at a rising IoU."""

from collections.abc import Iterable

from torch import Tensor, nn
from torchvision.models.detection.faster_rcnn import FastRCNNConvFCHead
from torchvision.ops import generalized_box_iou_loss

from tokamix.dense.boxes import BoxCoder
from tokamix.dense.mask_rcnn import HIDDEN_DIM, MaskRCNN, RoIHead

GIOU_WEIGHT = 10.0
IOU_THRESHOLDS = (0.5, 0.6, 0.7)
BOX_CODER_STDS = ((0.1, 0.2), (0.05, 0.1), (0.033, 0.067))


def giou_box_loss(codes: Tensor, boxes: Tensor, gt_boxes: Tensor, box_coder: BoxCoder) -> Tensor:
    """Ten times the sum of 1 - GIoU between the decoded boxes and the ground truth."""
    decoded = box_coder.decode_single(codes, boxes)
    return GIOU_WEIGHT * generalized_box_iou_loss(decoded, gt_boxes, reduction="sum", eps=1e-6)


class CascadeMaskRCNN(MaskRCNN):
    """Cascade Mask R-CNN, arXiv 1712.00726, in the form that the papers took from Swin.

    Box heads have four convolutions with batch norm and one hidden layer, box codes are per class, the box loss is GIoU
    on decoded boxes, and every stage has a mask head.
    """

    method = "cascade_mask_rcnn"
    stage_weights = (1.0, 0.5, 0.25)
    rpn_beta = 1 / 9
    num_train_proposals = 2000

    def create_roi_heads(
        self, num_classes: int, width: int, strides: tuple[int, ...], rois_per_image: int
    ) -> Iterable[RoIHead]:
        """Three stages, without low-quality matches: boxes far from the ground truth would mislead a stage."""
        for iou_threshold, stds in zip(IOU_THRESHOLDS, BOX_CODER_STDS, strict=True):
            yield RoIHead(
                FastRCNNConvFCHead((width, 7, 7), [width] * 4, [HIDDEN_DIM], norm_layer=nn.BatchNorm2d),
                num_classes,
                width,
                strides,
                rois_per_image=rois_per_image,
                iou_threshold=iou_threshold,
                low_quality_matches=False,
                box_coder=BoxCoder(*stds),
                box_loss=giou_box_loss,
            )
