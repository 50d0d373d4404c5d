"""Parameters and multiply-accumulates of the papers' detectors.

MMDetection's counter, inferred by reproducing its numbers, counts the layers with weights (convolutions, linear layers)
of backbone, neck and heads on one image of 800 x 1280, with 1000 RoIs for each box head and 100 for each mask head. It
counts neither products between activations nor RoIAlign: with them STViT-B, whose last stages attend globally, would
have 543 G instead of the printed 359 G. A multiply-accumulate counts as one.
"""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from tokamix.dense import CascadeMaskRCNN, DenseBackbone, Detector, RetinaNet, create_backbone, create_detector
from tokamix.ops.dispatch import use_backend

pytestmark = pytest.mark.xdist_group("sizes")

WEIGHTED = (torch.ops.aten.convolution, torch.ops.aten.mm, torch.ops.aten.addmm)
SIZES = ("xtiny", "tiny", "small", "base", "large")
# tables 4, 5 and 6 of Active Token Mixer: M parameters, G FLOPs
PRINTED = {
    "retinanet": ((25, 196), (37, 233), (48, 293), (62, 359), (86, 405)),
    "mask_rcnn": ((35, 215), (47, 251), (58, 311), (72, 377), (96, 424)),
    "cascade_mask_rcnn": ((73, 693), (85, 730), (96, 790), (110, 856), (134, 902)),
}
ROWS = [(method, *row) for method, rows in PRINTED.items() for row in zip(SIZES, rows, strict=True)]


class WeightedLayers(TorchDispatchMode):
    """Count the multiply-accumulates of products with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.macs = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in WEIGHTED:
            self.macs += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out) // 2
        return out


@functools.cache
def meta_backbone(name: str, **kwargs: Any) -> DenseBackbone:
    with torch.device("meta"):
        return create_backbone(name, **kwargs).eval()


@functools.cache
@torch.no_grad()
def meta_maps(name: str) -> tuple[list[Tensor], int]:
    """The maps of the image on the meta device, and their multiply-accumulates."""
    with torch.device("meta"), use_backend("eager"), WeightedLayers() as counter:
        return meta_backbone(name)(torch.zeros(1, 3, 800, 1280)), counter.macs


def meta_detector(method: str, name: str) -> Detector:
    with torch.device("meta"):
        return create_detector(method, meta_backbone(name), 80).eval()


@functools.cache
@torch.no_grad()
def gmacs(method: str, name: str) -> float:
    detector, (maps, backbone_macs) = meta_detector(method, name), meta_maps(name)
    with WeightedLayers() as counter:
        features = detector.neck(maps)
        if isinstance(detector, RetinaNet):
            detector.head(features)
        else:
            detector.rpn.head(features)
            for stage in detector.stages:
                hidden = stage.head(features[0].new_zeros(1000, 256, 7, 7))
                stage.classify(hidden), stage.regress(hidden)
                stage.mask_predictor(stage.mask_head(features[0].new_zeros(100, 256, 14, 14)))
    return (counter.macs + backbone_macs) / 1e9


def millions(model: nn.Module) -> float:
    return sum(p.numel() for p in model.parameters()) / 1e6


@pytest.mark.parametrize(("method", "size", "printed"), ROWS, ids=lambda v: str(v))
def test_atmnet(method: str, size: str, printed: tuple[int, int]) -> None:
    assert round(millions(meta_detector(method, f"atmnet_{size}"))) == printed[0]
    assert gmacs(method, f"atmnet_{size}") == pytest.approx(printed[1], rel=0.005)


def test_stvit() -> None:
    assert round(millions(meta_detector("mask_rcnn", "stvit_base"))) == 70
    assert gmacs("mask_rcnn", "stvit_base") == pytest.approx(359, rel=0.01)


@pytest.mark.parametrize(("name", "printed"), [("xcit_small_12_p16_sima", 44.3), ("xcit_small_12_p8_224", 43.1)])
def test_xcit(name: str, printed: float) -> None:
    """Table 3 of SimA; its authors and those of XCiT truncate decimals."""
    assert int(10 * millions(meta_detector("mask_rcnn", name))) / 10 == printed


def test_parameters_of_the_heads() -> None:
    """Heads of 80 classes, counted by hand."""

    def conv(width: int, out: int, kernel: int, bias: bool = True) -> int:
        return width * out * kernel**2 + out * bias

    def linear(width: int, out: int) -> int:
        return (width + 1) * out

    last = linear(1024, 81) + linear(1024, 320)
    mask = 4 * conv(256, 256, 3) + conv(256, 256, 2) + conv(256, 80, 1)
    rpn = conv(256, 256, 3) + conv(256, 3, 1) + conv(256, 12, 1)
    two = linear(256 * 49, 1024) + linear(1024, 1024) + last
    four = 4 * (conv(256, 256, 3, bias=False) + 512) + linear(256 * 49, 1024) + last
    retina = 8 * conv(256, 256, 3) + conv(256, 720, 3) + conv(256, 36, 3)

    def heads(method: str) -> int:
        detector = meta_detector(method, "resnet10t")
        rest = [p for part in (detector.backbone, detector.neck) for p in part.parameters()]
        return sum(p.numel() for p in detector.parameters()) - sum(p.numel() for p in rest)

    assert heads("retinanet") == retina
    assert heads("mask_rcnn") == rpn + two + mask
    assert heads("cascade_mask_rcnn") == rpn + 3 * (four + mask)
    assert len(CascadeMaskRCNN.stage_weights) == 3


def test_any_neck() -> None:
    """Detectors take ATMFPN too."""
    detector = create_detector("mask_rcnn", "resnet10t", 3, neck="atm_fpn", width=32).eval()
    (detections,) = detector(torch.randn(1, 3, 70, 90))
    assert detections["masks"].shape == (len(detections["boxes"]), 70, 90)
    with pytest.raises(ValueError, match="unknown neck 'pan': choose one of fpn, atm_fpn"):
        create_detector("mask_rcnn", "resnet10t", 3, neck="pan")
    with pytest.raises(ValueError, match="unknown detector 'yolo': choose one of retinanet, mask_rcnn, cascade"):
        create_detector("yolo", "resnet10t", 3)
