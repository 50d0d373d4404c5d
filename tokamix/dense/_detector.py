"""What the detectors share: batches, anchors, assignment, box coding, RoIAlign over levels, the final choice, masks.

These are torchvision's parts, changed only where MMDetection, in which the papers' detectors were measured, does
something else; each change says what and why.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection._utils import BoxCoder, Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou, clip_boxes_to_image
from torchvision.ops.poolers import LevelMapper

from tokamix.dense.backbone import DenseBackbone, DenseModel
from tokamix.dense.fpn import FPN
from tokamix.ops.mask_paste.op import paste_masks
from tokamix.ops.nms.op import batched_nms
from tokamix.ops.roi_align.op import multiscale_roi_align

Sizes = Sequence[tuple[int, int]]
Target = dict[str, Tensor]


class Detector(DenseModel):
    """A backbone, a neck and heads; subclasses say what is learned (`losses`) and what is found (`detect`).

    `detector(images)` finds things; `detector(images, targets)` gives the losses, whose sum is minimised. Images are
    normalised, (B, 3, H, W) or a list of (3, h, w) of any sizes; targets have `boxes` (n, 4) as left, top, right,
    bottom in pixels, `labels` (n,) from 0, `masks` (n, h, w) where the method has masks, and may have `crowd` (n,).
    """

    has_masks = False
    least_score = 0.05  # a detection scores more
    overlap = 0.5  # IoU from which the better of two boxes of a class hides the other
    most = 100  # detections in an image

    def __init__(self, backbone: DenseBackbone, neck: FPN, num_classes: int) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"{self.method} needs at least one class, got {num_classes}; background is not counted")
        self.backbone = backbone.skip(neck.start) if neck.start else backbone
        self.neck: FPN = neck
        self.num_classes = num_classes

    def forward(
        self, images: Tensor | Sequence[Tensor], targets: Sequence[Target] | None = None, sizes: Sizes | None = None
    ) -> dict[str, Tensor] | list[Target]:
        """Losses if there are targets; else boxes, labels, scores and masks of each image, best first.

        Boxes and masks are in pixels of the images given, or of images of `sizes` (height, width) if these were resized
        from them: masks drawn at the size they are needed in are sharper than masks resized.
        """
        batch = collect(images, self.backbone.strides[-1])
        if targets is not None:
            targets = clean(targets, batch.image_sizes, self.num_classes, self.has_masks, batch.tensors.device)
            return self.losses(self.neck(self.backbone(batch.tensors)), batch, targets)
        return self.present(self.find(batch), batch.image_sizes, sizes)

    def parts_to_compile(self) -> list[nn.Module]:
        """The parts behind the backbone that hold weights."""
        raise NotImplementedError

    def find(self, batch: ImageList) -> Target:
        """What is found in all images, as `detect` gives it; on a GPU nothing waits for the device meanwhile."""
        return self.detect(self.neck(self.backbone(batch.tensors)), batch)

    def present(self, found: Target, given: Sizes, wanted: Sizes | None = None) -> list[Target]:
        """What `find` found in images of the sizes given, image by image, in pixels of those wanted."""
        if wanted is not None and len(wanted) != len(given):
            raise ValueError(f"{len(given)} images came with {len(wanted)} sizes; there must be one for each")
        counts = (found["scores"] > 0).sum(1).tolist()
        return [
            finish({name: value[i, :count].clone() for name, value in found.items()}, size, out)
            for i, (count, size, out) in enumerate(zip(counts, given, given if wanted is None else wanted, strict=True))
        ]

    def losses(self, features: list[Tensor], batch: ImageList, targets: list[Target]) -> dict[str, Tensor]:
        """Losses by name."""
        raise NotImplementedError

    def detect(self, features: list[Tensor], batch: ImageList) -> Target:
        """What is found: boxes (B, n, 4), labels and scores (B, n), best first, filled up with scores of zero.

        Masks (B, n, s, s) are as the head draws them, inside their boxes.
        """
        raise NotImplementedError

    def choose(self, boxes: Tensor, scores: Tensor, sizes: Sizes) -> Target:
        """The best of boxes (B, K, N, 4) with scores (B, K, N) for each class, none of which hides another of it."""
        boxes = clip(boxes, sizes)
        valid = (scores > self.least_score) & (boxes[..., 2:] - boxes[..., :2] >= 0.01).all(-1)
        scores, order = torch.where(valid, scores, 0).sort(-1, descending=True)
        count = leading(scores > 0)
        scores, boxes = scores[..., :count], pick(boxes, order[..., :count])
        scores = torch.where(batched_nms(boxes, scores > 0, self.overlap), scores, 0).flatten(1)
        best, index = scores.topk(min(self.most, scores.shape[1]), 1)
        found = leading(best > 0)
        best, index = best[:, :found], index[:, :found]
        return {"boxes": pick(boxes.flatten(1, 2), index), "labels": index // count, "scores": best}


def pick(boxes: Tensor, index: Tensor) -> Tensor:
    """Boxes (..., N, 4) at index (..., n) -> (..., n, 4)."""
    return boxes.gather(-2, index[..., None].expand(*index.shape, 4))


def clip(boxes: Tensor, sizes: Sizes) -> Tensor:
    """Boxes (B, ..., 4) cut at the borders of their images."""
    if len(set(sizes)) == 1:
        return clip_boxes_to_image(boxes, sizes[0])
    return torch.stack([clip_boxes_to_image(one, size) for one, size in zip(boxes, sizes, strict=True)])


def leading(valid: Tensor) -> int:
    """How many columns (..., n) one needs to have all that are valid, where those come first; at least one.

    On a GPU all of them: waiting for the number takes longer than computing a few for nothing.
    """
    if valid.is_cuda:
        return valid.shape[-1]
    return max(int(valid.sum(-1).amax()), 1)


def collect(images: Tensor | Sequence[Tensor], multiple: int) -> ImageList:
    """Images as one batch, padded at the right and bottom to multiples of the largest stride with zero, the mean."""
    shapes = [tuple(image.shape) for image in images]
    if not shapes or any(len(shape) != 3 for shape in shapes):
        raise ValueError(f"a detector needs images (B, 3, H, W) or a list of (3, h, w), got {shapes or 'no image'}")
    sizes = [shape[1:] for shape in shapes]
    height, width = (-(-max(sides) // multiple) * multiple for sides in zip(*sizes, strict=True))
    if isinstance(images, Tensor):
        grown = (0, width - images.shape[-1], 0, height - images.shape[-2])
        return ImageList(F.pad(images, grown) if any(grown) else images, sizes)
    batch = images[0].new_zeros(len(images), shapes[0][0], height, width)
    for row, image in zip(batch, images, strict=True):
        row[:, : image.shape[1], : image.shape[2]] = image
    return ImageList(batch, sizes)


def clean(targets: Sequence[Target], sizes: Sizes, num_classes: int, masks: bool, device: torch.device) -> list[Target]:
    """Targets whose boxes lie in their image: cut at its border, and left out if nothing remains or they are crowds."""
    if len(targets) != len(sizes):
        raise ValueError(f"{len(sizes)} images came with {len(targets)} targets; there must be one for each")
    cleaned = []
    for target, size in zip(targets, sizes, strict=True):
        boxes, labels = target["boxes"].to(device).float().reshape(-1, 4), target["labels"].to(device).long()
        if len(boxes) != len(labels):
            raise ValueError(f"a target has {len(boxes)} boxes and {len(labels)} labels; each box needs one label")
        if masks and "masks" not in target:
            raise ValueError("this detector learns masks and got a target without them; use method='retinanet'")
        if masks and tuple(target["masks"].shape) != (len(boxes), *size):
            shape = tuple(target["masks"].shape)
            raise ValueError(f"{len(boxes)} boxes in an image of {size} need masks {(len(boxes), *size)}, got {shape}")
        boxes = clip_boxes_to_image(boxes, size)
        keep = (boxes[:, 2:] > boxes[:, :2]).all(1)
        if "crowd" in target:
            keep &= ~target["crowd"].to(device).bool()
        one = {"boxes": boxes[keep], "labels": labels[keep]}
        if masks:
            one["masks"] = target["masks"].to(device)[keep]
        cleaned.append(one)
    labels = torch.cat([target["labels"] for target in cleaned])
    if ((labels < 0) | (labels >= num_classes)).any():
        low, high = labels.min().item(), labels.max().item()
        raise ValueError(f"labels run from {low} to {high} where 0 to {num_classes - 1} are possible")
    return cleaned


class Anchors(AnchorGenerator):
    """torchvision's anchors, but not rounded, at the levels' true strides, and always float32.

    torchvision rounds their corners to whole pixels, takes image // grid as the stride (800 px at stride 64 make 13
    cells, and 800 // 13 is 61), and gives anchors the precision of the features, in which bfloat16 has no pixels.
    """

    def __init__(self, strides: Sequence[int], scales: Sequence[float]) -> None:
        super().__init__(
            tuple(tuple(s * scale for scale in scales) for s in strides), ((0.5, 1.0, 2.0),) * len(strides)
        )
        self.strides = tuple(strides)

    def generate_anchors(
        self, scales: Any, aspect_ratios: Any, dtype: Any = torch.float32, device: Any = None
    ) -> Tensor:
        """Anchors (ratios * scales, 4) around the origin; a ratio is height / width."""
        sides = torch.tensor(scales, dtype=dtype, device=device)
        root = torch.tensor(aspect_ratios, dtype=dtype, device=device).sqrt()[:, None]
        half = torch.stack([sides / root, sides * root], -1).flatten(0, 1) / 2
        return torch.cat([-half, half], 1)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """The anchors (N, 4) of all levels, once for each image."""
        self.set_cell_anchors(torch.float32, feature_maps[0].device)
        levels = self.grid_anchors([x.shape[-2:] for x in feature_maps], [(s, s) for s in self.strides])
        return [torch.cat(levels)] * len(image_list.image_sizes)


class Coder(BoxCoder):
    """torchvision's box coder, in float32, with sizes bounded both ways.

    A box changes its size at most 1000 / 16 times; torchvision bounds growth and lets boxes shrink to nothing.

    Args:
        shift: standard deviation by which shifts of the centre are divided.
        size: the same for the logarithms of the size.
    """

    def __init__(self, shift: float = 1.0, size: float = 1.0) -> None:
        super().__init__((1 / shift, 1 / shift, 1 / size, 1 / size))
        self.shift, self.size = shift, size

    def decode_single(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        """Codes (N, 4k) relative to boxes (N, 4) -> boxes (N, 4k)."""
        codes, boxes = rel_codes.float().unflatten(1, (-1, 4)), boxes.float()[:, None]
        extent = boxes[..., 2:] - boxes[..., :2]
        centre = boxes[..., :2] + extent / 2 + codes[..., :2] * self.shift * extent
        half = (codes[..., 2:] * self.size).clamp(-self.bbox_xform_clip, self.bbox_xform_clip).exp() * extent / 2
        return torch.cat([centre - half, centre + half], -1).flatten(1)


class Assigner(Matcher):
    """torchvision's matcher with another rule for truths that no box overlaps enough.

    Such a truth claims the boxes that overlap it most, if that is at least `least` (torchvision: however little), and
    they become its own (torchvision: they go to whatever they overlap most). With `least=None` nothing is claimed.
    """

    def __init__(self, high: float, low: float, least: float | None) -> None:
        super().__init__(high, low, allow_low_quality_matches=least is not None)
        self.least = least or 0.0

    def set_low_quality_matches_(self, matches: Tensor, all_matches: Tensor, match_quality_matrix: Tensor) -> None:
        """Let truths (M) claim boxes (N) by their overlaps (M, N); of two claims the later truth's holds."""
        best = match_quality_matrix.amax(1, keepdim=True)
        claimed = (match_quality_matrix == best) & (best >= self.least) & (best > 0)
        order = torch.arange(1, len(best) + 1, dtype=torch.int32, device=best.device)
        claimant = (claimed * order[:, None]).amax(0).long()
        matches.copy_(torch.where(claimant > 0, claimant - 1, matches))

    def assign(self, truths: Tensor, boxes: Tensor) -> Tensor:
        """The truth of each box (N,): its index, -1 for background, -2 for neither."""
        if not len(truths) or not len(boxes):
            return torch.full((len(boxes),), self.BELOW_LOW_THRESHOLD, dtype=torch.int64, device=boxes.device)
        return self(box_iou(truths, boxes))


def assign_anchors(matcher: Assigner, anchors: Tensor, targets: list[Target], sizes: Sizes, multiple: int) -> Tensor:
    """The truth of each anchor in each image (B, N), as `Assigner.assign`.

    Anchors centred in what pads a smaller image to the batch's size, beyond its own padding, are neither truth nor
    background: torchvision would learn background from them.
    """
    rows = []
    centre = (anchors[:, :2] + anchors[:, 2:]) / 2
    for target, (height, width) in zip(targets, sizes, strict=True):
        outside = (centre[:, 0] >= -(-width // multiple) * multiple) | (
            centre[:, 1] >= -(-height // multiple) * multiple
        )
        matched = matcher.assign(target["boxes"], anchors)
        rows.append(matched.masked_fill(outside, Matcher.BETWEEN_THRESHOLDS))
    return torch.stack(rows)


class LevelAlign(nn.Module):
    """RoIAlign from the level that suits a box's size: floor(log2(sqrt(area) / 56)), levels at strides 4 to 32.

    torchvision's MultiScaleRoIAlign shifts samples by half a pixel (`aligned=False`) and guesses the strides from the
    first batch it sees. Samples per cell are adaptive.
    """

    def __init__(self, side: int, strides: Sequence[int]) -> None:
        super().__init__()
        self.side, self.strides = side, tuple(strides)
        self.level_of = LevelMapper(2, 1 + len(self.strides))

    def forward(self, features: list[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        """Maps (B, C, H_i, W_i) and boxes (n_b, 4) of each image -> (sum of n_b, C, side, side)."""
        image = torch.cat([torch.full_like(one[:, 0], i, dtype=torch.int64) for i, one in enumerate(boxes)])
        every = torch.cat(list(boxes)).nan_to_num()  # an image of NaN must not cost the others of its batch
        return multiscale_roi_align(features, every, image, self.level_of([every]), self.side, self.strides)


def finish(found: Target, size: tuple[int, int], wanted: tuple[int, int]) -> Target:
    """Detections in an image of `size` -> in one of size `wanted`, with masks of that size."""
    if tuple(wanted) != tuple(size):
        (height, width), (high, wide) = size, wanted
        boxes = found["boxes"].unflatten(1, (2, 2))
        found["boxes"] = torch.stack([boxes[..., 0] * (wide / width), boxes[..., 1] * (high / height)], -1).flatten(1)
    if "masks" in found:
        found["masks"] = paste_masks(found["masks"], found["boxes"], wanted)
    return found
