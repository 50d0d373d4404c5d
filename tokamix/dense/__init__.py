"""Dense prediction: backbones, necks, segmenters and detectors in plain PyTorch and torchvision."""

from tokamix.dense.backbone import Backbone, make_backbone
from tokamix.dense.fpn import FPN
from tokamix.dense.vit_pyramid import VitPyramid

__all__ = ["FPN", "Backbone", "VitPyramid", "make_backbone"]
