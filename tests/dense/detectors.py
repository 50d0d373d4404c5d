"""Small detectors and targets for tests."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from tokamix.dense import Detector, create_detector

CLASSES = 5
LAST_LAYERS = ("cls_logits", "bbox_reg", "bbox_pred", "classify", "regress", "mask_fcn_logits")


def small_detector(
    method: str, seed: int = 0, spread: float = 0.0, body: str | nn.Module = "resnet10t", **kwargs: int
) -> Detector:
    """A detector with few channels; `spread` scales the last layers so that untrained heads give varied outputs."""
    torch.manual_seed(seed)
    detector = create_detector(method, body, CLASSES, width=32, **kwargs)
    if spread:
        for name, p in detector.named_parameters():
            if p.ndim > 1 and not name.startswith(("backbone.", "neck.")):
                nn.init.kaiming_normal_(p, mode="fan_in", nonlinearity="relu")
                if name.removesuffix(".weight").endswith(LAST_LAYERS):
                    p.data *= spread
    return detector.eval()


def create_target(boxes: list[list[float]], labels: list[int], size: tuple[int, int]) -> dict[str, Tensor]:
    """A target whose masks are the left halves of its boxes."""
    masks = torch.zeros(len(boxes), *size, dtype=torch.bool)
    for mask, (left, top, right, bottom) in zip(masks, boxes, strict=True):
        mask[int(top) : int(bottom), int(left) : int((left + right) / 2)] = True
    return {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": torch.tensor(labels, dtype=torch.int64),
        "masks": masks,
    }


class Levels(nn.Module):
    """A detector's backbone and neck in the form that torchvision's detectors take."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.backbone, self.neck, self.out_channels = detector.backbone, detector.neck, detector.neck.width

    def forward(self, images: Tensor) -> OrderedDict[str, Tensor]:
        return OrderedDict((str(i), x) for i, x in enumerate(self.neck(self.backbone(images))))
