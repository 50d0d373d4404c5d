"""Dense prediction: backbones, necks, segmenters and detectors in plain PyTorch and torchvision."""

from typing import Any

from torch import nn

from tokamix.dense._detector import Detector
from tokamix.dense.atm_fpn import AtmFPN
from tokamix.dense.backbone import DenseBackbone, create_backbone
from tokamix.dense.cascade import CascadeMaskRCNN
from tokamix.dense.fpn import FPN
from tokamix.dense.graphed import Recorded
from tokamix.dense.mask_rcnn import MaskRCNN
from tokamix.dense.retinanet import RetinaNet
from tokamix.dense.segmenter import IGNORE, Segmenter
from tokamix.dense.semantic_fpn import SemanticFPN
from tokamix.dense.upernet import UperNet
from tokamix.dense.vit_pyramid import VitPyramid

SEGMENTERS = (SemanticFPN.method, UperNet.method)
DETECTORS: dict[str, type[RetinaNet | MaskRCNN]] = {
    kind.method: kind for kind in (RetinaNet, MaskRCNN, CascadeMaskRCNN)
}
METHODS = {"segment": SEGMENTERS, "detect": tuple(DETECTORS)}
NECKS: dict[str, type[FPN]] = {"fpn": FPN, "atm_fpn": AtmFPN}


def create_segmenter(
    method: str,
    backbone: str | nn.Module,
    num_classes: int,
    *,
    neck: str = "fpn",
    aux: bool = True,
    width: int | None = None,
    neck_width: int = 256,
    **backbone_kwargs: Any,
) -> Segmenter:
    """A segmenter by name.

    Args:
        method: "semantic_fpn" or "upernet".
        backbone: a timm model's name, a model or a `DenseBackbone`.
        num_classes: classes.
        neck: "fpn" or "atm_fpn"; UperNet brings its own.
        aux: whether UperNet has its auxiliary head.
        width: channels of the head; None for the papers' (128 and 512).
        neck_width: channels of Semantic FPN's neck.
        backbone_kwargs: for `create_backbone`.
    """
    if method not in SEGMENTERS:
        raise ValueError(f"unknown segmenter {method!r}: choose one of {', '.join(SEGMENTERS)}")
    body = create_backbone(backbone, **backbone_kwargs)
    if method == "upernet":
        if neck != "fpn":
            raise ValueError(f"UperNet has its own pyramid and takes no neck {neck!r}; semantic_fpn does")
        return UperNet(body, num_classes, width or 512, aux)
    made = create_neck(neck, body, width=neck_width, outs=len(body.channels))
    return SemanticFPN(body, num_classes, made, width or 128)


def create_detector(
    method: str,
    backbone: str | nn.Module,
    num_classes: int,
    *,
    neck: str = "fpn",
    width: int = 256,
    regions: int | None = None,
    **backbone_kwargs: Any,
) -> Detector:
    """A detector by name.

    Args:
        method: "retinanet", "mask_rcnn" or "cascade_mask_rcnn".
        backbone: a timm model's name, a model or a `DenseBackbone`.
        num_classes: classes, background not counted.
        neck: "fpn" or "atm_fpn".
        width: channels of the neck and of the heads' convolutions.
        regions: of each image that the heads of Mask R-CNN are trained on; None for the papers' 512.
        backbone_kwargs: for `create_backbone`.
    """
    if method not in DETECTORS:
        raise ValueError(f"unknown detector {method!r}: choose one of {', '.join(DETECTORS)}")
    if regions is not None and method == "retinanet":
        raise ValueError(f"RetinaNet has no regions to train on {regions} of; leave `regions` out")
    more: dict[str, Any] = {} if regions is None else {"regions": regions}
    body = create_backbone(backbone, **backbone_kwargs)
    return DETECTORS[method](body, num_classes, _find_neck(neck), width, **more)


def create_neck(name: str, backbone: DenseBackbone, **kwargs: Any) -> FPN:
    """A neck by name, for a backbone's channels and strides; `kwargs` as for `FPN`."""
    return _find_neck(name)(backbone.channels, strides=backbone.strides, **kwargs)


def _find_neck(name: str) -> type[FPN]:
    if name not in NECKS:
        raise ValueError(f"unknown neck {name!r}: choose one of {', '.join(NECKS)}")
    return NECKS[name]


__all__ = [
    "FPN",
    "IGNORE",
    "METHODS",
    "AtmFPN",
    "CascadeMaskRCNN",
    "DenseBackbone",
    "Detector",
    "MaskRCNN",
    "Recorded",
    "RetinaNet",
    "Segmenter",
    "SemanticFPN",
    "UperNet",
    "VitPyramid",
    "create_backbone",
    "create_detector",
    "create_neck",
    "create_segmenter",
]
