"""Segmenters, detectors and necks by name."""

from typing import Any

from torch import nn

from tokamix.dense.atm_fpn import AtmFPN
from tokamix.dense.backbone import DenseBackbone, create_backbone
from tokamix.dense.cascade import CascadeMaskRCNN
from tokamix.dense.detector import Detector
from tokamix.dense.fpn import FPN
from tokamix.dense.mask_rcnn import MaskRCNN
from tokamix.dense.retinanet import RetinaNet
from tokamix.dense.segmenter import Segmenter
from tokamix.dense.semantic_fpn import SemanticFPN
from tokamix.dense.upernet import UperNet
from tokamix.tasks import METHODS

DETECTORS: dict[str, type[RetinaNet | MaskRCNN]] = {
    kind.method: kind for kind in (RetinaNet, MaskRCNN, CascadeMaskRCNN)
}
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
    """Create a segmenter by name.

    Args:
        method: "semantic_fpn" or "upernet".
        backbone: name of a timm model, a model or a `DenseBackbone`.
        num_classes: number of classes.
        neck: "fpn" or "atm_fpn"; UperNet has its own pyramid and takes none.
        aux: give UperNet its auxiliary head.
        width: channels of the head; None: the papers' values (128 for Semantic FPN, 512 for UperNet).
        neck_width: channels of Semantic FPN's neck.
        backbone_kwargs: arguments of `create_backbone`.
    """
    if method not in METHODS["segment"]:
        raise ValueError(f"unknown segmenter {method!r}: choose one of {', '.join(METHODS['segment'])}")
    body = create_backbone(backbone, **backbone_kwargs)
    if method == UperNet.method:
        if neck != "fpn":
            raise ValueError(f"UperNet has its own pyramid and takes no neck, got {neck!r}; use method='semantic_fpn'")
        return UperNet(body, num_classes, width or 512, aux)
    pyramid = create_neck(neck, body, width=neck_width, num_outs=len(body.channels))
    return SemanticFPN(body, num_classes, pyramid, width or 128)


def create_detector(
    method: str,
    backbone: str | nn.Module,
    num_classes: int,
    *,
    neck: str = "fpn",
    width: int = 256,
    rois_per_image: int | None = None,
    **backbone_kwargs: Any,
) -> Detector:
    """Create a detector by name.

    Args:
        method: "retinanet", "mask_rcnn" or "cascade_mask_rcnn".
        backbone: name of a timm model, a model or a `DenseBackbone`.
        num_classes: number of classes, background not counted.
        neck: "fpn" or "atm_fpn".
        width: channels of the neck and of the convolutions in the heads.
        rois_per_image: sampled to train the heads of Mask R-CNN; None: 512, as in the papers.
        backbone_kwargs: arguments of `create_backbone`.
    """
    if method not in DETECTORS:
        raise ValueError(f"unknown detector {method!r}: choose one of {', '.join(DETECTORS)}")
    if rois_per_image is not None and method == RetinaNet.method:
        raise ValueError(f"RetinaNet has no RoIs, got rois_per_image={rois_per_image}; leave it out")
    head_kwargs: dict[str, Any] = {} if rois_per_image is None else {"rois_per_image": rois_per_image}
    body = create_backbone(backbone, **backbone_kwargs)
    return DETECTORS[method](body, num_classes, _neck_class(neck), width, **head_kwargs)


def create_neck(name: str, backbone: DenseBackbone, **kwargs: Any) -> FPN:
    """Create a neck by name for the channels and strides of a backbone; `kwargs` as for `FPN`."""
    return _neck_class(name)(backbone.channels, strides=backbone.strides, **kwargs)


def _neck_class(name: str) -> type[FPN]:
    if name not in NECKS:
        raise ValueError(f"unknown neck {name!r}: choose one of {', '.join(NECKS)}")
    return NECKS[name]
