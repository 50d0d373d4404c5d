"""Mask R-CNN: region proposals, then class, box and mask of each; its RoI heads also serve Cascade Mask R-CNN."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler
from torchvision.models.detection.faster_rcnn import TwoMLPHead
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RegionProposalNetwork, RPNHead
from torchvision.ops import clip_boxes_to_image, roi_align

from tokamix.dense.backbone import DenseBackbone
from tokamix.dense.boxes import (
    AnchorGenerator,
    BoxCoder,
    Matcher,
    MultiScaleRoIAlign,
    Sizes,
    Target,
    clip_boxes,
    gather_boxes,
    match_anchors,
    num_valid,
)
from tokamix.dense.detector import Detector
from tokamix.dense.fpn import FPN
from tokamix.ops.nms.op import batched_nms

HIDDEN_DIM = 1024  # features of a box head
MASK_SIZE = 28  # side of the masks that the mask head is trained on
BoxLoss = Callable[[Tensor, Tensor, Tensor, BoxCoder], Tensor]


class ProposalNetwork(RegionProposalNetwork):
    """torchvision's region proposal network with the losses, matching and precision of MMDetection.

    The box loss is smooth L1 with `beta`, or L1 if it is 0. Proposals are decoded after the top-k of each level, not
    before. Each image gets at least one proposal, if need be the whole image, so that the RoI heads always have input.
    All shapes are fixed: proposals are padded and come with a mask of the valid ones.
    """

    def __init__(self, width: int, strides: tuple[int, ...], beta: float, num_train_proposals: int) -> None:
        super().__init__(
            AnchorGenerator(strides, (8,)),
            RPNHead(width, 3),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n={"training": 2000, "testing": 1000},
            post_nms_top_n={"training": num_train_proposals, "testing": 1000},
            nms_thresh=0.7,
        )
        self.beta = beta
        self.box_coder, self.proposal_matcher = BoxCoder(), Matcher(0.7, 0.3, low_quality_iou=0.3)

    def forward(
        self, images: ImageList, features: list[Tensor], targets: list[Target] | None = None, divisor: int = 32
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Proposals (B, n, 4), best first, which of them are valid (B, n), and the losses if there are targets."""
        outputs = self.head(features)
        logits, codes = ([_flatten(x, dim) for x in maps] for maps, dim in zip(outputs, (1, 4), strict=True))
        anchors = self.anchor_generator(images, features)[0]
        mode = "testing" if targets is None else "training"
        proposals, valid = self._propose(logits, codes, anchors, images.image_sizes, mode)
        if targets is None:
            return proposals, valid, {}
        matched = match_anchors(self.proposal_matcher, anchors, targets, images.image_sizes, divisor)
        all_logits, all_codes = torch.cat(logits, 1).float(), torch.cat(codes, 1).float()  # (B, N, 1), (B, N, 4)
        gt_boxes = [target["boxes"] for target in targets]
        return proposals, valid, self._losses(all_logits[..., 0], all_codes, anchors, matched, gt_boxes)

    @torch.no_grad()
    def _propose(
        self, logits: list[Tensor], codes: list[Tensor], anchors: Tensor, sizes: Sizes, mode: str
    ) -> tuple[Tensor, Tensor]:
        counts = [x.shape[1] for x in logits]
        width = min(self._pre_nms_top_n[mode], max(counts))
        levels = []
        for level_logits, level_codes, level_anchors in zip(logits, codes, anchors.split(counts), strict=True):
            best, index = level_logits[..., 0].topk(min(width, level_logits.shape[1]), 1)  # (B, n)
            top = best.float().sigmoid()[..., None], gather_boxes(level_codes, index).float(), level_anchors[index]
            levels.append(F.pad(torch.cat(top, -1), (0, 0, 0, width - index.shape[1])))
        scores, top_codes, top_anchors = torch.stack(levels, 1).split((1, 4, 4), -1)  # (B, levels, width, ...)
        boxes = self.box_coder.decode_single(top_codes.reshape(-1, 4), top_anchors.reshape(-1, 4)).view_as(top_codes)
        boxes = clip_boxes(boxes, sizes)
        # the padding of a level and scores of NaN are invalid
        valid = (boxes[..., 2:] - boxes[..., :2] >= self.min_size).all(-1) & (scores[..., 0] >= 0)
        scores = torch.where(batched_nms(boxes, valid, self.nms_thresh), scores[..., 0], -1).flatten(1)
        best, index = scores.topk(min(self._post_nms_top_n[mode], scores.shape[1]), 1)
        boxes, valid = gather_boxes(boxes.flatten(1, 2), index), best >= 0
        whole_image = clip_boxes(F.pad(torch.full_like(boxes[:, :1, :2], torch.inf), (2, 0)), sizes)
        boxes[:, :1] = torch.where(valid[:, :1, None], boxes[:, :1], whole_image)
        valid[:, 0] = True
        count = num_valid(valid)
        return boxes[:, :count], valid[:, :count]

    def _losses(
        self, logits: Tensor, codes: Tensor, anchors: Tensor, matched: Tensor, gt_boxes: list[Tensor]
    ) -> dict[str, Tensor]:
        """Objectness and box losses over the sampled anchors of the batch."""
        sampled = self.fg_bg_sampler(list(matched + 1))
        positive, negative = (torch.stack(masks).bool() for masks in sampled)  # (B, N)
        either = positive | negative
        image, anchor = positive.nonzero(as_tuple=True)
        count = either.sum().clamp(min=1)
        matched_boxes = [boxes[row[mask]] for boxes, row, mask in zip(gt_boxes, matched, positive, strict=True)]
        gt_codes = self.box_coder.encode_single(torch.cat(matched_boxes), anchors[anchor])
        box_loss = F.smooth_l1_loss(codes[image, anchor], gt_codes, beta=self.beta, reduction="sum")
        class_loss = F.binary_cross_entropy_with_logits(logits[either], positive[either].float(), reduction="sum")
        return {"rpn_class": class_loss / count, "rpn_box": box_loss / count}


def _flatten(x: Tensor, dim: int) -> Tensor:
    """(B, A * dim, H, W) -> (B, H * W * A, dim), in the order of the anchors."""
    return x.permute(0, 2, 3, 1).reshape(len(x), -1, dim)


class SampledRoIs(NamedTuple):
    """The RoIs that a head is trained on, by image, and their targets."""

    boxes: list[Tensor]  # (n_b, 4)
    matched: list[Tensor]  # (n_b,) index of the ground truth, -1 for background
    is_ground_truth: list[Tensor]  # (n_b,) bool: the RoI is a ground-truth box itself, added by the sampler
    labels: Tensor  # (N,) class of each RoI of all images; the number of classes means background
    gt_boxes: Tensor  # (P, 4) ground-truth boxes of the positive RoIs


def l1_box_loss(codes: Tensor, boxes: Tensor, gt_boxes: Tensor, box_coder: BoxCoder) -> Tensor:
    """Sum of absolute differences between predicted codes and those of the ground truth."""
    return F.l1_loss(codes, box_coder.encode_single(gt_boxes, boxes), reduction="sum")


class RoIHead(nn.Module):
    """One stage on RoIs: match and sample them, classify and refine their boxes, predict their masks.

    Differs from torchvision's RoIHeads: RoIs are matched before the ground-truth boxes are added; the class after the
    last is background, which has no box; the box loss is L1 on codes or `box_loss`; mask targets are binary.

    Args:
        head: pooled RoIs (N, width, 7, 7) -> (N, 1024).
        num_classes: number of classes, background not counted.
        width: channels of the neck and of the convolutions in the heads; 256 in the papers.
        strides: of the neck's levels from which RoIs are pooled.
        rois_per_image: sampled for training, at most a quarter of them positive.
        iou_threshold: RoIs with at least this IoU with a ground truth are positive, all others are background.
        low_quality_matches: match each ground truth to its best positive RoIs, even if they overlap another one more.
        box_coder: encodes boxes relative to RoIs.
        box_loss: sum over positive RoIs, from codes, boxes, ground-truth boxes and the box coder.
    """

    def __init__(
        self,
        head: nn.Module,
        num_classes: int,
        width: int,
        strides: tuple[int, ...],
        *,
        rois_per_image: int = 512,
        iou_threshold: float = 0.5,
        low_quality_matches: bool = True,
        box_coder: BoxCoder,
        box_loss: BoxLoss = l1_box_loss,
    ) -> None:
        super().__init__()
        self.num_classes, self.box_coder, self.box_loss = num_classes, box_coder, box_loss
        self.matcher = Matcher(iou_threshold, iou_threshold, iou_threshold if low_quality_matches else None)
        self.sampler = BalancedPositiveNegativeSampler(rois_per_image, 0.25)
        self.box_pool, self.mask_pool = MultiScaleRoIAlign(7, strides), MultiScaleRoIAlign(14, strides)
        self.head = head
        self.classify, self.regress = nn.Linear(HIDDEN_DIM, num_classes + 1), nn.Linear(HIDDEN_DIM, 4 * num_classes)
        self.mask_head = MaskRCNNHeads(width, (width,) * 4, 1)
        self.mask_predictor = MaskRCNNPredictor(width, width, num_classes)
        for part in head.modules():
            if isinstance(part, nn.Linear):
                nn.init.xavier_uniform_(part.weight)
                nn.init.zeros_(part.bias)
        for part, std in ((self.classify, 0.01), (self.regress, 0.001)):
            nn.init.normal_(part.weight, std=std)
            nn.init.zeros_(part.bias)
        nn.init.zeros_(self.mask_predictor.conv5_mask.bias)
        nn.init.zeros_(self.mask_predictor.mask_fcn_logits.bias)

    @torch.no_grad()
    def sample_rois(self, proposals: list[Tensor], targets: list[Target]) -> SampledRoIs:
        """Match the proposals of each image to its ground truth and sample RoIs to train on."""
        boxes, matched, is_ground_truth, labels, gt_boxes = [], [], [], [], []
        for proposal, target in zip(proposals, targets, strict=True):
            gt = target["boxes"]
            all_boxes = torch.cat([gt, proposal])
            index = torch.cat([torch.arange(len(gt), device=gt.device), self.matcher.match(gt, proposal)])
            positive, negative = self.sampler([index + 1])
            chosen = (positive[0] | negative[0]).nonzero()[:, 0]
            index = index[chosen]
            background = target["labels"].new_full((1,), self.num_classes)
            boxes.append(all_boxes[chosen])
            matched.append(index)
            is_ground_truth.append(chosen < len(gt))
            labels.append(torch.cat([target["labels"], background])[index])  # index -1 is the last
            gt_boxes.append(gt[index[index >= 0]])
        return SampledRoIs(boxes, matched, is_ground_truth, torch.cat(labels), torch.cat(gt_boxes))

    def predict_boxes(self, features: list[Tensor], boxes: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Class logits (N, K + 1) and box codes (N, K, 4) of RoIs."""
        hidden = self.head(self.box_pool(features, boxes).to(self.classify.weight.dtype))
        return self.classify(hidden).float(), self.regress(hidden).float().unflatten(1, (-1, 4))

    def predict_masks(self, features: list[Tensor], boxes: list[Tensor], labels: Tensor) -> Tensor:
        """Mask logits (N, 28, 28) of RoIs for their classes."""
        logits = self.mask_predictor(self.mask_head(self.mask_pool(features, boxes).to(self.classify.weight.dtype)))
        return logits[torch.arange(len(logits), device=logits.device), labels].float()

    def compute_losses(
        self, features: list[Tensor], rois: SampledRoIs, logits: Tensor, codes: Tensor, targets: list[Target]
    ) -> dict[str, Tensor]:
        """Losses of class, box and mask; the box loss is a sum over positives divided by the number of all RoIs."""
        positive = (rois.labels < self.num_classes).nonzero()[:, 0]
        labels = rois.labels[positive]
        boxes = torch.cat(rois.boxes)[positive]
        box_loss = self.box_loss(codes[positive, labels], boxes, rois.gt_boxes, self.box_coder) / len(rois.labels)
        positive_boxes = [boxes[matched >= 0] for boxes, matched in zip(rois.boxes, rois.matched, strict=True)]
        index = [matched[matched >= 0] for matched in rois.matched]
        gt_masks = torch.cat(
            [crop_masks(t["masks"], i, b) for t, i, b in zip(targets, index, positive_boxes, strict=True)]
        )
        mask_logits = self.predict_masks(features, positive_boxes, labels)
        mask_loss = F.binary_cross_entropy_with_logits(mask_logits, gt_masks, reduction="sum")
        return {
            "class": F.cross_entropy(logits, rois.labels),
            "box": box_loss,
            "mask": mask_loss / max(gt_masks.numel(), 1),
        }

    def refine(self, boxes: list[Tensor], labels: Tensor, codes: Tensor, sizes: Sizes) -> list[Tensor]:
        """Apply the codes of their classes to the RoIs and clip them to their images."""
        rows = torch.arange(len(labels), device=labels.device)
        refined = self.box_coder.decode_single(codes.detach()[rows, labels], torch.cat(boxes))
        by_image = refined.split([len(image_boxes) for image_boxes in boxes])
        return [clip_boxes_to_image(part, size) for part, size in zip(by_image, sizes, strict=True)]


def crop_masks(masks: Tensor, index: Tensor, boxes: Tensor) -> Tensor:
    """Crop the masks (n, H, W) at `index` (P,) to boxes (P, 4): binary targets (P, 28, 28).

    torchvision's are not binary and are sampled half a pixel off.
    """
    rois = torch.cat([index[:, None].to(boxes), boxes], 1)
    return (roi_align(masks[:, None].float(), rois, MASK_SIZE, sampling_ratio=0, aligned=True)[:, 0] >= 0.5).float()


class MaskRCNN(Detector):
    """Mask R-CNN, arXiv 1703.06870, as MMDetection configures it: five levels, two hidden layers for boxes."""

    method = "mask_rcnn"
    has_masks = True
    stage_weights: tuple[float, ...] = (1.0,)  # factors of the losses of the stages
    rpn_beta = 0.0  # of the smooth L1 loss of the proposals; 0: L1
    num_train_proposals = 1000  # per image

    def __init__(
        self,
        backbone: DenseBackbone,
        num_classes: int,
        neck: Callable[..., FPN] = FPN,
        width: int = 256,
        rois_per_image: int = 512,
    ) -> None:
        if rois_per_image < 1:
            raise ValueError(f"{self.method} needs rois_per_image of at least 1, got {rois_per_image}")
        levels = len(backbone.channels)
        pyramid = neck(backbone.channels, width, num_outs=levels + 1, extra_levels="pool", strides=backbone.strides)
        super().__init__(backbone, pyramid, num_classes)
        strides = self.neck.strides
        self.rpn = ProposalNetwork(width, strides, self.rpn_beta, self.num_train_proposals)
        self.stages = nn.ModuleList(self.create_roi_heads(num_classes, width, strides[:levels], rois_per_image))

    def create_roi_heads(
        self, num_classes: int, width: int, strides: tuple[int, ...], rois_per_image: int
    ) -> Iterable[RoIHead]:
        """The RoI heads of all stages."""
        head = TwoMLPHead(width * 49, HIDDEN_DIM)
        yield RoIHead(head, num_classes, width, strides, rois_per_image=rois_per_image, box_coder=BoxCoder(0.1, 0.2))

    def parts_to_compile(self) -> list[nn.Module]:
        """The neck, and the heads of proposals, boxes and masks."""
        heads = [head for stage in self._stages() for head in (stage.head, stage.mask_head, stage.mask_predictor)]
        return [self.neck, self.rpn.head, *heads]

    def compute_losses(self, features: list[Tensor], batch: ImageList, targets: list[Target]) -> dict[str, Tensor]:
        """Losses of the proposals and of each stage."""
        boxes, valid, losses = self.rpn(batch, features, targets, self.backbone.strides[-1])
        proposals = [row[mask] for row, mask in zip(boxes, valid, strict=True)]
        # RoIAlign needs contiguous float32 maps; converted once for all stages
        maps = [x.to(torch.float32, memory_format=torch.contiguous_format) for x in self._pooled(features)]
        for i, (stage, weight) in enumerate(zip(self._stages(), self.stage_weights, strict=True), 1):
            rois = stage.sample_rois(proposals, targets)
            logits, codes = stage.predict_boxes(maps, rois.boxes)
            suffix = f"_{i}" if len(self.stages) > 1 else ""
            for name, loss in stage.compute_losses(maps, rois, logits, codes, targets).items():
                losses[name + suffix] = loss * weight
            if i < len(self.stages):
                labels = torch.where(rois.labels < self.num_classes, rois.labels, _top_class(logits))
                refined = stage.refine(rois.boxes, labels, codes, batch.image_sizes)
                proposals = [boxes[~is_gt] for boxes, is_gt in zip(refined, rois.is_ground_truth, strict=True)]
        return losses

    def predict(self, features: list[Tensor], batch: ImageList) -> Target:
        """Each stage refines the boxes; class logits and mask probabilities are averaged over the stages."""
        proposals, valid, _ = self.rpn(batch, features)
        rois = list(proposals)
        maps, all_logits = self._pooled(features), []
        for i, stage in enumerate(self._stages()):
            logits, codes = stage.predict_boxes(maps, rois)
            all_logits.append(logits)
            if i + 1 < len(self.stages):
                rois = stage.refine(rois, _top_class(logits), codes, batch.image_sizes)
        scores = torch.stack(all_logits).mean(0).softmax(-1)[:, :-1]  # the mean of logits, as in MMDetection
        boxes = stage.box_coder.decode_single(codes.flatten(1), torch.cat(rois)).view_as(codes)
        shape = (*valid.shape, self.num_classes)
        scores = scores.view(shape) * valid[..., None]
        detections = self.select_detections(
            boxes.view(*shape, 4).transpose(1, 2), scores.transpose(1, 2), batch.image_sizes
        )
        boxes_by_image, labels = list(detections["boxes"]), detections["labels"]
        masks = [stage.predict_masks(maps, boxes_by_image, labels.flatten()).sigmoid() for stage in self._stages()]
        return {**detections, "masks": torch.stack(masks).mean(0).unflatten(0, labels.shape)}

    def _stages(self) -> list[RoIHead]:
        return list(self.stages)  # type: ignore[arg-type]

    def _pooled(self, features: list[Tensor]) -> list[Tensor]:
        """The levels from which RoIs are pooled."""
        return features[: len(self.backbone.channels)]


def _top_class(logits: Tensor) -> Tensor:
    """The class (N,) with the highest of the logits (N, K + 1), background excluded."""
    return logits[:, :-1].argmax(1)
