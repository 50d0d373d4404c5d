"""RetinaNet: one stage, every anchor classified, the focal loss against the many that are background."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.retinanet import RetinaNetHead
from torchvision.ops import sigmoid_focal_loss

from tokamix.dense._detector import Anchors, Assigner, Coder, Detector, Target, assign_anchors, leading, pick
from tokamix.dense.backbone import DenseBackbone
from tokamix.dense.fpn import FPN


class RetinaNet(Detector):
    """RetinaNet, arXiv 1708.02002, as MMDetection configures it.

    Levels P3 to P7, the last two by convolutions on the backbone's last map; nine anchors to a place, positive from an
    IoU of 0.5 and negative below 0.4; a truth always gets the anchor that overlaps it most. Both losses are sums over
    the batch, divided by its number of positive anchors (torchvision divides by image, then averages the images).
    """

    method = "retinanet"
    candidates = 1000  # (anchor, class) pairs of each level that enter the suppression

    def __init__(
        self, backbone: DenseBackbone, num_classes: int, neck: Callable[..., FPN] = FPN, width: int = 256
    ) -> None:
        pyramid = neck(backbone.channels, width, outs=5, extra="conv", start=1, strides=backbone.strides)
        super().__init__(backbone, pyramid, num_classes)
        self.anchors = Anchors(self.neck.strides, [4 * 2 ** (i / 3) for i in range(3)])
        self.head = RetinaNetHead(width, 9, num_classes)
        self.coder, self.matcher = Coder(), Assigner(0.5, 0.4, least=0.0)

    def parts_to_compile(self) -> list[nn.Module]:
        """Neck and head."""
        return [self.neck, self.head]

    def losses(self, features: list[Tensor], batch: ImageList, targets: list[Target]) -> dict[str, Tensor]:
        """The focal loss of the classes and the L1 loss of the boxes."""
        out = self.head(features)
        logits, codes = out["cls_logits"].float(), out["bbox_regression"].float()  # (B, N, K), (B, N, 4)
        anchors = self.anchors(batch, features)[0]
        matched = assign_anchors(self.matcher, anchors, targets, batch.image_sizes, self.backbone.strides[-1])
        count = (matched >= 0).sum(1).clamp(min=1).sum()  # an image without positives counts as one

        image, anchor = (matched >= 0).nonzero(as_tuple=True)
        first = torch.tensor([0, *(len(t["labels"]) for t in targets[:-1])], device=anchors.device).cumsum(0)
        truth = matched[image, anchor] + first[image]  # in all images' truths
        classes = torch.zeros_like(logits)
        classes[image, anchor, torch.cat([t["labels"] for t in targets])[truth]] = 1
        valid = matched > Assigner.BETWEEN_THRESHOLDS
        focal = sigmoid_focal_loss(logits[valid], classes[valid], alpha=0.25, gamma=2, reduction="sum")
        wanted = self.coder.encode_single(torch.cat([t["boxes"] for t in targets])[truth], anchors[anchor])
        box = F.l1_loss(codes[image, anchor], wanted, reduction="sum")
        return {"class": focal / count, "box": box / count}

    def detect(self, features: list[Tensor], batch: ImageList) -> Target:
        """The best pairs of anchor and class of each level, then suppression within each class."""
        out = self.head(features)
        anchors = self.anchors(batch, features)[0]
        counts = [9 * x.shape[-2] * x.shape[-1] for x in features]
        levels = [x.split(counts, -2) for x in (out["cls_logits"], out["bbox_regression"], anchors)]
        found = []
        for logits, codes, places in zip(*levels, strict=True):
            pairs = logits.flatten(1)
            best, index = pairs.topk(min(self.candidates, pairs.shape[1]), 1)  # (B, n)
            anchor = index // self.num_classes
            picked = codes.gather(1, anchor[..., None].expand(-1, -1, 4))
            boxes = self.coder.decode_single(picked.flatten(0, 1), places[anchor.flatten()]).view_as(picked)
            found.append((boxes, best.float().sigmoid(), index % self.num_classes))
        boxes, scores, labels = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
        scores, order = torch.where(scores > self.least_score, scores, 0).sort(1, descending=True)
        count = leading(scores > 0)
        scores, order = scores[:, :count], order[:, :count]
        boxes, labels = pick(boxes, order), labels.gather(1, order)
        classes = torch.arange(self.num_classes, device=labels.device)[:, None]
        by_class = torch.where(labels[:, None] == classes, scores[:, None], 0)  # (B, K, n)
        return self.choose(boxes[:, None].expand(*by_class.shape, 4), by_class, batch.image_sizes)
