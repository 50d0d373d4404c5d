"""Dense prediction: backbones, necks, segmenters and detectors in plain PyTorch and torchvision."""

from tokamix.dense.atm_fpn import AtmFPN
from tokamix.dense.backbone import DenseBackbone, create_backbone
from tokamix.dense.cascade import CascadeMaskRCNN
from tokamix.dense.create import create_detector, create_neck, create_segmenter
from tokamix.dense.detector import Detector
from tokamix.dense.fpn import FPN
from tokamix.dense.graphed import GraphedModel
from tokamix.dense.mask_rcnn import MaskRCNN
from tokamix.dense.retinanet import RetinaNet
from tokamix.dense.segmenter import Segmenter
from tokamix.dense.semantic_fpn import SemanticFPN
from tokamix.dense.upernet import UperNet
from tokamix.dense.vit_pyramid import VitPyramid

__all__ = [
    "FPN",
    "AtmFPN",
    "CascadeMaskRCNN",
    "DenseBackbone",
    "Detector",
    "GraphedModel",
    "MaskRCNN",
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
