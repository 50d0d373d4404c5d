"""RetinaNet: a one-stage detector that classifies every anchor with the focal loss."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import sigmoid_focal_loss

from tokamix.dense.backbone import DenseBackbone
from tokamix.dense.boxes import AnchorGenerator, BoxCoder, Matcher, Target, gather_boxes, match_anchors, num_valid
from tokamix.dense.detector import Detector
from tokamix.dense.fpn import FPN


class RetinaNet(Detector):
    """RetinaNet, arXiv 1708.02002, as MMDetection configures it.

    Levels P3 to P7, the last two by convolutions on the backbone's last map; nine anchors per position, positive from
    an IoU of 0.5 and negative below 0.4; each ground truth is also matched to the anchor with its highest IoU. Both
    losses are sums over the batch divided by its number of positive anchors (torchvision divides per image and averages
    over the images, so the class is not torchvision's; its head is).
    """

    method = "retinanet"
    pre_nms_topk = 1000  # (anchor, class) pairs per level

    def __init__(
        self, backbone: DenseBackbone, num_classes: int, neck: Callable[..., FPN] = FPN, width: int = 256
    ) -> None:
        pyramid = neck(
            backbone.channels, width, num_outs=5, extra_levels="conv", start_level=1, strides=backbone.strides
        )
        super().__init__(backbone, pyramid, num_classes)
        self.anchors = AnchorGenerator(self.neck.strides, [4 * 2 ** (i / 3) for i in range(3)])
        self.head = RetinaNetHead(width, 9, num_classes)
        self.box_coder, self.matcher = BoxCoder(), Matcher(0.5, 0.4, low_quality_iou=0.0)

    def parts_to_compile(self) -> list[nn.Module]:
        """The neck and the head."""
        return [self.neck, self.head]

    def compute_losses(self, features: list[Tensor], batch: ImageList, targets: list[Target]) -> dict[str, Tensor]:
        """The focal loss of the classes and the L1 loss of the box codes."""
        outputs = self.head(features)
        logits, codes = outputs["cls_logits"].float(), outputs["bbox_regression"].float()  # (B, N, K), (B, N, 4)
        anchors = self.anchors(batch, features)[0]
        matched = match_anchors(self.matcher, anchors, targets, batch.image_sizes, self.backbone.strides[-1])
        count = (matched >= 0).sum(1).clamp(min=1).sum()  # an image without positives counts as one

        image, anchor = (matched >= 0).nonzero(as_tuple=True)
        first = torch.tensor([0, *(len(t["labels"]) for t in targets[:-1])], device=anchors.device).cumsum(0)
        gt_index = matched[image, anchor] + first[image]  # into the ground truth of all images
        gt_classes = torch.zeros_like(logits)
        gt_classes[image, anchor, torch.cat([t["labels"] for t in targets])[gt_index]] = 1
        valid = matched > Matcher.BETWEEN_THRESHOLDS
        class_loss = sigmoid_focal_loss(logits[valid], gt_classes[valid], alpha=0.25, gamma=2, reduction="sum")
        gt_boxes = torch.cat([t["boxes"] for t in targets])[gt_index]
        gt_codes = self.box_coder.encode_single(gt_boxes, anchors[anchor])
        box_loss = F.l1_loss(codes[image, anchor], gt_codes, reduction="sum")
        return {"class": class_loss / count, "box": box_loss / count}

    def predict(self, features: list[Tensor], batch: ImageList) -> Target:
        """The top (anchor, class) pairs of each level, then NMS within each class."""
        outputs = self.head(features)
        anchors = self.anchors(batch, features)[0]
        counts = [9 * x.shape[-2] * x.shape[-1] for x in features]
        levels = [x.split(counts, -2) for x in (outputs["cls_logits"], outputs["bbox_regression"], anchors)]
        candidates = []
        for logits, codes, level_anchors in zip(*levels, strict=True):
            pairs = logits.flatten(1)
            best, index = pairs.topk(min(self.pre_nms_topk, pairs.shape[1]), 1)  # (B, n)
            anchor = index // self.num_classes
            top_codes = gather_boxes(codes, anchor)
            boxes = self.box_coder.decode_single(top_codes.flatten(0, 1), level_anchors[anchor.flatten()])
            candidates.append((boxes.view_as(top_codes), best.float().sigmoid(), index % self.num_classes))
        boxes, scores, labels = (torch.cat(parts, 1) for parts in zip(*candidates, strict=True))
        scores, order = torch.where(scores > self.score_threshold, scores, 0).sort(1, descending=True)
        count = num_valid(scores > 0)
        scores, order = scores[:, :count], order[:, :count]
        boxes, labels = gather_boxes(boxes, order), labels.gather(1, order)
        classes = torch.arange(self.num_classes, device=labels.device)[:, None]
        class_scores = torch.where(labels[:, None] == classes, scores[:, None], 0)  # (B, K, n)
        return self.select_detections(boxes[:, None].expand(*class_scores.shape, 4), class_scores, batch.image_sizes)
