"""Base class of the detectors: batching, validation of targets, selection of detections, post-processing."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import clip_boxes_to_image

from tokamix.dense.backbone import DenseBackbone, DenseModel
from tokamix.dense.boxes import Sizes, Target, clip_boxes, gather_boxes, num_valid
from tokamix.dense.fpn import FPN
from tokamix.models._backbone import check_tensor
from tokamix.ops import dispatch
from tokamix.ops.mask_paste.op import paste_masks
from tokamix.ops.nms.op import batched_nms


class Detector(DenseModel):
    """A backbone, a neck and heads; subclasses define `compute_losses` and `predict`.

    `detector(images)` returns detections; `detector(images, targets)` returns the losses, whose sum is minimised.
    Images are normalised, (B, 3, H, W) or a list of (3, h, w) of any sizes. Targets have `boxes` (n, 4) as (x1, y1, x2,
    y2) in pixels, `labels` (n,) from 0, `masks` (n, h, w) if the method has masks, and optionally `crowd` (n,).
    """

    has_masks = False
    score_threshold = 0.05  # detections must score higher
    iou_threshold = 0.5  # of the NMS within each class
    max_detections = 100  # per image

    def __init__(self, backbone: DenseBackbone, neck: FPN, num_classes: int) -> None:
        super().__init__()
        if num_classes < 1:
            raise ValueError(f"{self.method} needs at least one class, got {num_classes}; background is not counted")
        self.backbone = backbone.skip_levels(neck.start_level) if neck.start_level else backbone
        self.neck: FPN = neck
        self.num_classes = num_classes

    def forward(
        self, images: Tensor | Sequence[Tensor], targets: Sequence[Target] | None = None, sizes: Sizes | None = None
    ) -> dict[str, Tensor] | list[Target]:
        """Losses if there are targets; otherwise boxes, labels, scores and masks of each image, best first.

        Boxes and masks are in pixels of the input images, or of images of `sizes` (height, width) if the inputs were
        resized from them: pasting masks at their final size is sharper than resizing them.
        """
        batch = batch_images(images, self.backbone.strides[-1])
        if targets is not None:
            targets = validate_targets(
                targets, batch.image_sizes, self.num_classes, self.has_masks, batch.tensors.device
            )
            return self.compute_losses(self.neck(self.backbone(batch.tensors)), batch, targets)
        return self.postprocess(self.detect(batch), batch.image_sizes, sizes)

    def parts_to_compile(self) -> list[nn.Module]:
        """The modules with weights after the backbone."""
        raise NotImplementedError

    def detect(self, batch: ImageList) -> Target:
        """Detections of all images as fixed-size tensors (see `predict`), without synchronising with a GPU."""
        return self.predict(self.neck(self.backbone(batch.tensors)), batch)

    def postprocess(self, detections: Target, sizes: Sizes, output_sizes: Sizes | None = None) -> list[Target]:
        """Split the result of `detect` by image and scale it from the images' `sizes` to `output_sizes`."""
        return split_detections(detections, sizes, output_sizes)

    def compute_losses(self, features: list[Tensor], batch: ImageList, targets: list[Target]) -> dict[str, Tensor]:
        """Losses by name."""
        raise NotImplementedError

    def predict(self, features: list[Tensor], batch: ImageList) -> Target:
        """Boxes (B, n, 4), labels and scores (B, n), best first, padded with scores of zero.

        Masks (B, n, s, s) are probabilities inside their boxes.
        """
        raise NotImplementedError

    def select_detections(self, boxes: Tensor, scores: Tensor, sizes: Sizes) -> Target:
        """Score threshold, NMS per class and top-k, on boxes (B, K, N, 4) with scores (B, K, N) for each class."""
        boxes = clip_boxes(boxes, sizes)
        valid = (scores > self.score_threshold) & (boxes[..., 2:] - boxes[..., :2] >= 0.01).all(-1)
        scores, order = torch.where(valid, scores, 0).sort(-1, descending=True)
        count = num_valid(scores > 0)
        scores, boxes = scores[..., :count], gather_boxes(boxes, order[..., :count])
        scores = torch.where(batched_nms(boxes, scores > 0, self.iou_threshold), scores, 0).flatten(1)
        best, index = scores.topk(min(self.max_detections, scores.shape[1]), 1)
        columns = num_valid(best > 0)
        best, index = best[:, :columns], index[:, :columns]
        return {"boxes": gather_boxes(boxes.flatten(1, 2), index), "labels": index // count, "scores": best}


def split_detections(detections: Target, sizes: Sizes, output_sizes: Sizes | None = None) -> list[Target]:
    """Split padded detections by image and scale them from the images' `sizes` to `output_sizes`."""
    if output_sizes is not None and len(output_sizes) != len(sizes):
        raise ValueError(f"got {len(sizes)} images and {len(output_sizes)} sizes; pass one size per image")
    counts = (detections["scores"] > 0).sum(1).tolist()
    return [
        rescale_detections({name: value[i, :count].clone() for name, value in detections.items()}, size, output)
        for i, (count, size, output) in enumerate(
            zip(counts, sizes, sizes if output_sizes is None else output_sizes, strict=True)
        )
    ]


def batch_images(images: Tensor | Sequence[Tensor], divisor: int) -> ImageList:
    """Batch images, padded at the right and bottom to multiples of `divisor` with zero, the mean colour.

    torchvision's `GeneralizedRCNNTransform.batch_images` copies a tensor that needs no padding.
    """
    for image in images:
        check_tensor(image, "a detector")
    shapes = [tuple(image.shape) for image in images]
    if not shapes or any(len(shape) != 3 for shape in shapes):
        raise ValueError(f"a detector needs images (B, 3, H, W) or a list of (3, h, w), got {shapes or 'no image'}")
    sizes = [shape[1:] for shape in shapes]
    height, width = ((max(sides) + divisor - 1) // divisor * divisor for sides in zip(*sizes, strict=True))
    if isinstance(images, Tensor):
        padding = (0, width - images.shape[-1], 0, height - images.shape[-2])
        # always while exporting: a branch would specialise the graph to sizes that need no padding
        return ImageList(F.pad(images, padding) if dispatch.is_exporting() or any(padding) else images, sizes)
    batch = images[0].new_zeros(len(images), shapes[0][0], height, width)
    for row, image in zip(batch, images, strict=True):
        row[:, : image.shape[1], : image.shape[2]] = image
    return ImageList(batch, sizes)


def validate_targets(
    targets: Sequence[Target], sizes: Sizes, num_classes: int, has_masks: bool, device: torch.device
) -> list[Target]:
    """Check the targets, clip their boxes to the image and remove empty boxes and crowds."""
    if len(targets) != len(sizes):
        raise ValueError(f"got {len(sizes)} images and {len(targets)} targets; pass one target per image")
    valid_targets = []
    for target, size in zip(targets, sizes, strict=True):
        boxes, labels = target["boxes"].to(device).float().reshape(-1, 4), target["labels"].to(device).long()
        if len(boxes) != len(labels):
            raise ValueError(f"a target has {len(boxes)} boxes and {len(labels)} labels; pass one label per box")
        if has_masks and "masks" not in target:
            raise ValueError("this detector needs masks, but a target has none; add them or use method='retinanet'")
        if has_masks and tuple(target["masks"].shape) != (len(boxes), *size):
            shape = tuple(target["masks"].shape)
            raise ValueError(f"{len(boxes)} boxes in an image of {size} need masks {(len(boxes), *size)}, got {shape}")
        boxes = clip_boxes_to_image(boxes, size)
        keep = (boxes[:, 2:] > boxes[:, :2]).all(1)
        if "crowd" in target:
            keep &= ~target["crowd"].to(device).bool()
        valid_target = {"boxes": boxes[keep], "labels": labels[keep]}
        if has_masks:
            valid_target["masks"] = target["masks"].to(device)[keep]
        valid_targets.append(valid_target)
    labels = torch.cat([target["labels"] for target in valid_targets])
    if ((labels < 0) | (labels >= num_classes)).any():
        low, high = labels.min().item(), labels.max().item()
        raise ValueError(f"labels must be 0 to {num_classes - 1}, got labels from {low} to {high}")
    return valid_targets


def rescale_detections(detections: Target, size: tuple[int, int], output_size: tuple[int, int]) -> Target:
    """Scale the detections of one image from `size` to `output_size` and paste their masks into it."""
    if tuple(output_size) != tuple(size):
        scale_y, scale_x = output_size[0] / size[0], output_size[1] / size[1]
        boxes = detections["boxes"].unflatten(1, (2, 2))
        detections["boxes"] = torch.stack([boxes[..., 0] * scale_x, boxes[..., 1] * scale_y], -1).flatten(1)
    if "masks" in detections:
        detections["masks"] = paste_masks(detections["masks"], detections["boxes"], output_size)
    return detections
