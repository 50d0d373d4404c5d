"""Parts of detectors that work on boxes: anchor generator, box coder, matcher, RoIAlign, clipping.

They subclass torchvision's parts and change them only where MMDetection, in which the papers' detectors were measured,
differs; each class says what differs and why.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torchvision.models.detection import _utils, anchor_utils
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import box_iou, clip_boxes_to_image
from torchvision.ops.poolers import LevelMapper

from tokamix.ops import dispatch
from tokamix.ops.roi_align.op import multiscale_roi_align

Sizes = Sequence[tuple[int, int]]
Target = dict[str, Tensor]


class AnchorGenerator(anchor_utils.AnchorGenerator):
    """torchvision's anchor generator with unrounded anchors at the true strides, always in float32.

    torchvision rounds the corners to whole pixels, computes the stride as image // grid (800 px at stride 64 give 13
    cells, but 800 // 13 is 61), and uses the dtype of the features, but bfloat16 cannot represent pixel positions.
    """

    cell_anchors: list[Tensor]

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

    def set_cell_anchors(self, dtype: torch.dtype, device: torch.device) -> None:
        """Move the anchors around the origin to a device, anew after `count_macs` has traced on the meta device."""
        if self.cell_anchors[0].is_meta:
            self.cell_anchors = list(map(self.generate_anchors, self.sizes, self.aspect_ratios))
        super().set_cell_anchors(dtype, device)

    def forward(self, image_list: ImageList, feature_maps: list[Tensor]) -> list[Tensor]:
        """The anchors (N, 4) of all levels, repeated for each image."""
        self.set_cell_anchors(torch.float32, feature_maps[0].device)
        levels = self.grid_anchors([x.shape[-2:] for x in feature_maps], [(s, s) for s in self.strides])
        return [torch.cat(levels)] * len(image_list.image_sizes)


class BoxCoder(_utils.BoxCoder):
    """torchvision's box coder in float32, with a lower bound on sizes too.

    A decoded box is at most 1000 / 16 times larger or smaller; torchvision limits only growth, so boxes can vanish.

    Args:
        center_std: standard deviation by which offsets of the centre are divided.
        size_std: standard deviation by which logarithms of the size are divided.
    """

    def __init__(self, center_std: float = 1.0, size_std: float = 1.0) -> None:
        super().__init__((1 / center_std, 1 / center_std, 1 / size_std, 1 / size_std))
        self.center_std, self.size_std = center_std, size_std

    def decode_single(self, rel_codes: Tensor, boxes: Tensor) -> Tensor:
        """Codes (N, 4k) relative to boxes (N, 4) -> boxes (N, 4k)."""
        codes, boxes = rel_codes.float().unflatten(1, (-1, 4)), boxes.float()[:, None]
        extent = boxes[..., 2:] - boxes[..., :2]
        center = boxes[..., :2] + extent / 2 + codes[..., :2] * self.center_std * extent
        half = (codes[..., 2:] * self.size_std).clamp(-self.bbox_xform_clip, self.bbox_xform_clip).exp() * extent / 2
        return torch.cat([center - half, center + half], -1).flatten(1)


class Matcher(_utils.Matcher):
    """torchvision's matcher with MMDetection's rule for low-quality matches.

    A ground-truth box is also matched to the boxes with which it has its highest IoU, if that IoU is at least
    `low_quality_iou` (torchvision: any IoU), and these boxes become its own (torchvision: they go to the ground truth
    that they overlap most).

    Args:
        high_threshold: boxes with at least this IoU are positive.
        low_threshold: boxes with a lower IoU are background; those between the thresholds are ignored.
        low_quality_iou: see above; None: no low-quality matches.
    """

    def __init__(self, high_threshold: float, low_threshold: float, low_quality_iou: float | None) -> None:
        super().__init__(high_threshold, low_threshold, allow_low_quality_matches=low_quality_iou is not None)
        self.low_quality_iou = low_quality_iou or 0.0

    def set_low_quality_matches_(self, matches: Tensor, all_matches: Tensor, match_quality_matrix: Tensor) -> None:
        """Match each ground truth (M) to its best boxes (N) by IoU (M, N); the last ground truth wins a conflict."""
        best = match_quality_matrix.amax(1, keepdim=True)
        is_best = (match_quality_matrix == best) & (best >= self.low_quality_iou) & (best > 0)
        order = torch.arange(1, len(best) + 1, dtype=torch.int32, device=best.device)
        winner = (is_best * order[:, None]).amax(0).long()
        matches.copy_(torch.where(winner > 0, winner - 1, matches))

    def match(self, gt_boxes: Tensor, boxes: Tensor) -> Tensor:
        """Index of the ground truth of each box (N,); -1 for background, -2 for ignored boxes."""
        if not len(gt_boxes) or not len(boxes):
            return torch.full((len(boxes),), self.BELOW_LOW_THRESHOLD, dtype=torch.int64, device=boxes.device)
        return self(box_iou(gt_boxes, boxes))


def match_anchors(matcher: Matcher, anchors: Tensor, targets: list[Target], sizes: Sizes, divisor: int) -> Tensor:
    """Match the anchors to the ground truth of each image: (B, N), values as in `Matcher.match`.

    Anchors centred in the padding that a smaller image needs only because of larger images in its batch are ignored;
    torchvision trains on them as background.

    Args:
        matcher: the matcher.
        anchors: (N, 4).
        targets: of each image.
        sizes: (height, width) of each image before padding.
        divisor: a single image is padded to multiples of it.
    """
    rows = []
    center = (anchors[:, :2] + anchors[:, 2:]) / 2
    for target, (height, width) in zip(targets, sizes, strict=True):
        # ONNX export mistranslates -(-width // divisor) with symbolic sizes
        right, bottom = ((side + divisor - 1) // divisor * divisor for side in (width, height))
        outside = (center[:, 0] >= right) | (center[:, 1] >= bottom)
        matched = matcher.match(target["boxes"], anchors)
        rows.append(matched.masked_fill(outside, Matcher.BETWEEN_THRESHOLDS))
    return torch.stack(rows)


class MultiScaleRoIAlign(nn.Module):
    """RoIAlign from the level that suits the size of a box: floor(log2(sqrt(area) / 56)), levels at strides 4 to 32.

    torchvision's MultiScaleRoIAlign shifts samples by half a pixel (`aligned=False`) and infers the strides from the
    first batch. The number of samples per cell is adaptive.
    """

    def __init__(self, output_size: int, strides: Sequence[int]) -> None:
        super().__init__()
        self.output_size, self.strides = output_size, tuple(strides)
        self.level_mapper = LevelMapper(2, 1 + len(self.strides))

    def forward(self, features: list[Tensor], boxes: Sequence[Tensor]) -> Tensor:
        """Maps (B, C, H_i, W_i) and boxes (n_b, 4) of each image -> (sum of n_b, C, output_size, output_size)."""
        image_index = torch.cat([torch.full_like(b[:, 0], i, dtype=torch.int64) for i, b in enumerate(boxes)])
        all_boxes = torch.cat(list(boxes)).nan_to_num()  # an image of NaN must not affect the rest of its batch
        level = self.level_mapper([all_boxes])
        return multiscale_roi_align(features, all_boxes, image_index, level, self.output_size, self.strides)


def gather_boxes(boxes: Tensor, index: Tensor) -> Tensor:
    """Boxes (..., N, 4) at index (..., n) -> (..., n, 4)."""
    return boxes.gather(-2, index[..., None].expand(*index.shape, 4))


def clip_boxes(boxes: Tensor, sizes: Sizes) -> Tensor:
    """Clip boxes (B, ..., 4) to the images they belong to."""
    if len(sizes) == 1 or len(set(sizes)) == 1:  # symbolic sizes cannot be in a set
        return clip_boxes_to_image(boxes, sizes[0])
    return torch.stack([clip_boxes_to_image(row, size) for row, size in zip(boxes, sizes, strict=True)])


def num_valid(valid: Tensor) -> int:
    """Largest number of valid entries in a row of (..., n), where valid entries come first; at least 1.

    On a GPU this is n: waiting for the number takes longer than computing a few entries in vain. Likewise while
    exporting, because the number depends on the image.
    """
    if valid.is_cuda or dispatch.is_exporting():
        return valid.shape[-1]
    return max(int(valid.sum(-1).amax()), 1)
