"""Mask R-CNN: proposals, then a class, a better box and a mask for each; and the stages that cascades repeat."""

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

from tokamix.dense._detector import (
    Anchors,
    Assigner,
    Coder,
    Detector,
    LevelAlign,
    Sizes,
    Target,
    assign_anchors,
    clip,
    leading,
    pick,
)
from tokamix.dense.backbone import DenseBackbone
from tokamix.dense.fpn import FPN
from tokamix.ops.nms.op import batched_nms

HIDDEN = 1024  # features of a box head
MASK_SIDE = 28  # pixels of a mask that is learned
BoxLoss = Callable[[Tensor, Tensor, Tensor, Coder], Tensor]


class ProposalNetwork(RegionProposalNetwork):
    """torchvision's region proposal network with the losses, assignment and precision of MMDetection.

    The box loss is L1, or smooth L1 from `beta` on. Proposals are decoded after the best of each level were taken, not
    before. An image always gets one, itself if there is no other, so that what follows has something to learn from.
    """

    def __init__(self, width: int, strides: tuple[int, ...], beta: float, kept: int) -> None:
        super().__init__(
            Anchors(strides, (8,)),
            RPNHead(width, 3),
            fg_iou_thresh=0.7,
            bg_iou_thresh=0.3,
            batch_size_per_image=256,
            positive_fraction=0.5,
            pre_nms_top_n={"training": 2000, "testing": 1000},
            post_nms_top_n={"training": kept, "testing": 1000},
            nms_thresh=0.7,
        )
        self.beta = beta
        self.box_coder, self.proposal_matcher = Coder(), Assigner(0.7, 0.3, least=0.3)

    def forward(
        self, images: ImageList, features: list[Tensor], targets: list[Target] | None = None, multiple: int = 32
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Proposals (B, n, 4), best first, which of them are real (B, n), and the losses if there are targets."""
        maps = self.head(features)
        levels = [[_rows(x, last) for x in part] for part, last in zip(maps, (1, 4), strict=True)]
        anchors = self.anchor_generator(images, features)[0]
        stage = "testing" if targets is None else "training"
        proposals = self._propose(levels[0], levels[1], anchors, images.image_sizes, stage)
        if targets is None:
            return *proposals, {}
        logits, codes = (torch.cat(part, 1).float() for part in levels)  # (B, N, 1), (B, N, 4)
        matched = assign_anchors(self.proposal_matcher, anchors, targets, images.image_sizes, multiple)
        return *proposals, self._losses(logits[..., 0], codes, anchors, matched, [t["boxes"] for t in targets])

    @torch.no_grad()
    def _propose(
        self, logits: list[Tensor], codes: list[Tensor], anchors: Tensor, sizes: Sizes, stage: str
    ) -> tuple[Tensor, Tensor]:
        counts = [x.shape[1] for x in logits]
        width = min(self._pre_nms_top_n[stage], max(counts))
        picked = []
        for score, code, place in zip(logits, codes, anchors.split(counts), strict=True):
            best, index = score[..., 0].topk(min(width, score.shape[1]), 1)  # (B, n)
            level = best.float().sigmoid()[..., None], pick(code, index).float(), place[index]
            picked.append(F.pad(torch.cat(level, -1), (0, 0, 0, width - index.shape[1])))
        scores, code, place = torch.stack(picked, 1).split((1, 4, 4), -1)  # (B, levels, width, ...)
        boxes = self.box_coder.decode_single(code.reshape(-1, 4), place.reshape(-1, 4)).view_as(code)
        boxes = clip(boxes, sizes)
        # what fills up a level is not, nor are scores of NaN
        valid = (boxes[..., 2:] - boxes[..., :2] >= self.min_size).all(-1) & (scores[..., 0] >= 0)
        scores = torch.where(batched_nms(boxes, valid, self.nms_thresh), scores[..., 0], -1).flatten(1)
        best, index = scores.topk(min(self._post_nms_top_n[stage], scores.shape[1]), 1)
        boxes, valid = pick(boxes.flatten(1, 2), index), best >= 0
        whole = clip(F.pad(torch.full_like(boxes[:, :1, :2], torch.inf), (2, 0)), sizes)
        boxes[:, :1] = torch.where(valid[:, :1, None], boxes[:, :1], whole)
        valid[:, 0] = True
        count = leading(valid)
        return boxes[:, :count], valid[:, :count]

    def _losses(
        self, logits: Tensor, codes: Tensor, anchors: Tensor, matched: Tensor, truths: list[Tensor]
    ) -> dict[str, Tensor]:
        """Over the sampled anchors of the batch: whether there is something, and where."""
        sampled = self.fg_bg_sampler(list(matched + 1))
        positive, negative = (torch.stack(part).bool() for part in sampled)  # (B, N)
        either = positive | negative
        image, anchor = positive.nonzero(as_tuple=True)
        count = either.sum().clamp(min=1)
        truth = torch.cat([boxes[row[chosen]] for boxes, row, chosen in zip(truths, matched, positive, strict=True)])
        wanted = self.box_coder.encode_single(truth, anchors[anchor])
        box = F.smooth_l1_loss(codes[image, anchor], wanted, beta=self.beta, reduction="sum")
        thing = F.binary_cross_entropy_with_logits(logits[either], positive[either].float(), reduction="sum")
        return {"rpn_class": thing / count, "rpn_box": box / count}


def _rows(x: Tensor, last: int) -> Tensor:
    """(B, A * last, H, W) -> (B, H * W * A, last), in the anchors' order."""
    return x.permute(0, 2, 3, 1).reshape(len(x), -1, last)


class Sample(NamedTuple):
    """The boxes a stage learns from, by image, and what they are."""

    boxes: list[Tensor]  # (n_b, 4)
    matched: list[Tensor]  # (n_b,) index of the truth, -1 for background
    given: list[Tensor]  # (n_b,) bool: the box is a truth itself, put in by the sampler
    labels: Tensor  # (N,) class of each, all images; the number of classes is background
    truths: Tensor  # (P, 4) the true boxes of those that are not background


def l1_box_loss(codes: Tensor, boxes: Tensor, truths: Tensor, coder: Coder) -> Tensor:
    """Sum of absolute differences between predicted and true codes."""
    return F.l1_loss(codes, coder.encode_single(truths, boxes), reduction="sum")


class Stage(nn.Module):
    """One round over regions: assign and sample them, classify and move them, draw their masks.

    Differs from torchvision's RoIHeads: regions are assigned before the truths are added; the class after the last is
    background, which has no box; the box loss is L1 on codes or what `box_loss` says; mask targets are binary.

    Args:
        head: pooled regions (N, width, 7, 7) -> (N, 1024).
        width: channels of the neck and of the convolutions in the heads, 256 in the papers.
        strides: of the neck's levels that regions are pooled from.
        iou: regions that overlap a truth so much are positive, all others are background.
        claim: a truth claims the positive regions that overlap it most from other truths.
        regions: of each image that are learned from, at most a quarter of them positive.
        coder: how boxes are coded.
        box_loss: sum over positive regions, of codes, boxes, truths and the coder.
    """

    def __init__(
        self,
        head: nn.Module,
        num_classes: int,
        width: int,
        strides: tuple[int, ...],
        *,
        regions: int = 512,
        iou: float = 0.5,
        claim: bool = True,
        coder: Coder,
        box_loss: BoxLoss = l1_box_loss,
    ) -> None:
        super().__init__()
        self.num_classes, self.coder, self.box_loss = num_classes, coder, box_loss
        self.matcher = Assigner(iou, iou, least=iou if claim else None)
        self.sampler = BalancedPositiveNegativeSampler(regions, 0.25)
        self.box_pool, self.mask_pool = LevelAlign(7, strides), LevelAlign(14, strides)
        self.head = head
        self.classify, self.regress = nn.Linear(HIDDEN, num_classes + 1), nn.Linear(HIDDEN, 4 * num_classes)
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
    def sample(self, proposals: list[Tensor], targets: list[Target]) -> Sample:
        """Some regions of each image, of which each is background or has a truth."""
        boxes, matched, given, labels, truths = [], [], [], [], []
        for proposal, target in zip(proposals, targets, strict=True):
            truth = target["boxes"]
            own = torch.arange(len(truth), device=truth.device)
            all_boxes = torch.cat([truth, proposal])
            index = torch.cat([own, self.matcher.assign(truth, proposal)])
            positive, negative = self.sampler([index + 1])
            chosen = (positive[0] | negative[0]).nonzero()[:, 0]
            index = index[chosen]
            background = target["labels"].new_full((1,), self.num_classes)
            boxes.append(all_boxes[chosen])
            matched.append(index)
            given.append(chosen < len(truth))
            labels.append(torch.cat([target["labels"], background])[index])  # index -1 is the last
            truths.append(truth[index[index >= 0]])
        return Sample(boxes, matched, given, torch.cat(labels), torch.cat(truths))

    def boxes(self, features: list[Tensor], boxes: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Logits (N, K + 1) and codes (N, K, 4) of regions."""
        hidden = self.head(self.box_pool(features, boxes).to(self.classify.weight.dtype))
        return self.classify(hidden).float(), self.regress(hidden).float().unflatten(1, (-1, 4))

    def masks(self, features: list[Tensor], boxes: list[Tensor], labels: Tensor) -> Tensor:
        """Logits (N, 28, 28) of regions' masks for their classes."""
        drawn = self.mask_predictor(self.mask_head(self.mask_pool(features, boxes).to(self.classify.weight.dtype)))
        return drawn[torch.arange(len(drawn), device=drawn.device), labels].float()

    def losses(
        self, features: list[Tensor], sample: Sample, logits: Tensor, codes: Tensor, targets: list[Target]
    ) -> dict[str, Tensor]:
        """The losses of class, box and mask; the box's is a sum over positives divided by all regions."""
        positive = (sample.labels < self.num_classes).nonzero()[:, 0]
        label = sample.labels[positive]
        regions = torch.cat(sample.boxes)[positive]
        box = self.box_loss(codes[positive, label], regions, sample.truths, self.coder) / len(sample.labels)
        picked = [boxes[matched >= 0] for boxes, matched in zip(sample.boxes, sample.matched, strict=True)]
        index = [matched[matched >= 0] for matched in sample.matched]
        masks = torch.cat([mask_targets(t["masks"], i, b) for t, i, b in zip(targets, index, picked, strict=True)])
        drawn = self.masks(features, picked, label)
        mask = F.binary_cross_entropy_with_logits(drawn, masks, reduction="sum") / max(masks.numel(), 1)
        return {"class": F.cross_entropy(logits, sample.labels), "box": box, "mask": mask}

    def move(self, boxes: list[Tensor], labels: Tensor, codes: Tensor, sizes: Sizes) -> list[Tensor]:
        """The regions where their classes' codes put them, cut at the border of their image."""
        rows = torch.arange(len(labels), device=labels.device)
        moved = self.coder.decode_single(codes.detach()[rows, labels], torch.cat(boxes))
        parts = moved.split([len(one) for one in boxes])
        return [clip_boxes_to_image(one, size) for one, size in zip(parts, sizes, strict=True)]


def mask_targets(masks: Tensor, index: Tensor, boxes: Tensor) -> Tensor:
    """What the masks (n, H, W) that `index` (P,) names look like inside boxes (P, 4): (P, 28, 28) of 0 and 1.

    torchvision leaves them grey, and samples half a pixel off.
    """
    rois = torch.cat([index[:, None].to(boxes), boxes], 1)
    return (roi_align(masks[:, None].float(), rois, MASK_SIDE, sampling_ratio=0, aligned=True)[:, 0] >= 0.5).float()


class MaskRCNN(Detector):
    """Mask R-CNN, arXiv 1703.06870, as MMDetection configures it: five levels, two hidden layers for boxes."""

    method = "mask_rcnn"
    has_masks = True
    weights: tuple[float, ...] = (1.0,)  # of the stages' losses
    beta = 0.0  # where the proposals' box loss turns from a parabola into L1
    kept = 1000  # proposals of an image in training

    def __init__(
        self,
        backbone: DenseBackbone,
        num_classes: int,
        neck: Callable[..., FPN] = FPN,
        width: int = 256,
        regions: int = 512,
    ) -> None:
        if regions < 1:
            raise ValueError(f"{self.method} learns from at least one region of an image, got regions={regions}")
        levels = len(backbone.channels)
        pyramid = neck(backbone.channels, width, outs=levels + 1, extra="pool", strides=backbone.strides)
        super().__init__(backbone, pyramid, num_classes)
        strides = self.neck.strides
        self.rpn = ProposalNetwork(width, strides, self.beta, self.kept)
        self.stages = nn.ModuleList(self.make_stages(num_classes, width, strides[:levels], regions))

    def make_stages(self, num_classes: int, width: int, strides: tuple[int, ...], regions: int) -> Iterable[Stage]:
        """The rounds that regions go through."""
        head = TwoMLPHead(width * 49, HIDDEN)
        yield Stage(head, num_classes, width, strides, regions=regions, coder=Coder(0.1, 0.2))

    def parts_to_compile(self) -> list[nn.Module]:
        """The neck, and the heads of proposals, boxes and masks."""
        heads = [head for stage in self._stages() for head in (stage.head, stage.mask_head, stage.mask_predictor)]
        return [self.neck, self.rpn.head, *heads]

    def losses(self, features: list[Tensor], batch: ImageList, targets: list[Target]) -> dict[str, Tensor]:
        """Losses of the proposals, and of each stage."""
        boxes, valid, losses = self.rpn(batch, features, targets, self.backbone.strides[-1])
        proposals = [row[real] for row, real in zip(boxes, valid, strict=True)]
        # as RoIAlign wants them, converted once for all stages
        maps = [x.to(torch.float32, memory_format=torch.contiguous_format) for x in self._pooled(features)]
        for i, (stage, weight) in enumerate(zip(self._stages(), self.weights, strict=True), 1):
            sample = stage.sample(proposals, targets)
            logits, codes = stage.boxes(maps, sample.boxes)
            name = f"_{i}" if len(self.stages) > 1 else ""
            for key, loss in stage.losses(maps, sample, logits, codes, targets).items():
                losses[key + name] = loss * weight
            if i < len(self.stages):
                labels = torch.where(sample.labels < self.num_classes, sample.labels, _likeliest(logits))
                moved = stage.move(sample.boxes, labels, codes, batch.image_sizes)
                proposals = [boxes[~given] for boxes, given in zip(moved, sample.given, strict=True)]
        return losses

    def detect(self, features: list[Tensor], batch: ImageList) -> Target:
        """Regions move from stage to stage; classes are decided, and masks drawn, by the average of the stages."""
        proposals, valid, _ = self.rpn(batch, features)
        regions = list(proposals)
        maps, votes = self._pooled(features), []
        for i, stage in enumerate(self._stages()):
            logits, codes = stage.boxes(maps, regions)
            votes.append(logits)
            if i + 1 < len(self.stages):
                regions = stage.move(regions, _likeliest(logits), codes, batch.image_sizes)
        scores = torch.stack(votes).mean(0).softmax(-1)[:, :-1]  # logits are averaged, as in MMDetection
        boxes = stage.coder.decode_single(codes.flatten(1), torch.cat(regions)).view_as(codes)
        shape = (*valid.shape, self.num_classes)
        scores = scores.view(shape) * valid[..., None]
        found = self.choose(boxes.view(*shape, 4).transpose(1, 2), scores.transpose(1, 2), batch.image_sizes)
        where, what = list(found["boxes"]), found["labels"].flatten()
        drawn = torch.stack([stage.masks(maps, where, what).sigmoid() for stage in self._stages()]).mean(0)
        return {**found, "masks": drawn.unflatten(0, found["labels"].shape)}

    def _stages(self) -> list[Stage]:
        return list(self.stages)  # type: ignore[arg-type]

    def _pooled(self, features: list[Tensor]) -> list[Tensor]:
        """The levels that regions are pooled from."""
        return features[: len(self.backbone.channels)]


def _likeliest(logits: Tensor) -> Tensor:
    """The class (N,) of logits (N, K + 1) that scores most, background aside."""
    return logits[:, :-1].argmax(1)
