"""Models of the papers, registered with timm; one file per family."""

from tokamix.models import swapped
from tokamix.models._registry import create_model, list_models
from tokamix.models.amixer import AMixer, AMixerColumn
from tokamix.models.atmnet import ATMNet
from tokamix.models.bodies import ColumnarBody, PyramidBody, create_body
from tokamix.models.cvt import CvT
from tokamix.models.localvit import LocalViT
from tokamix.models.pvt import PVT
from tokamix.models.sima import XCiTSimA
from tokamix.models.stvit import STViT

__all__ = [
    "PVT",
    "AMixer",
    "AMixerColumn",
    "ATMNet",
    "ColumnarBody",
    "CvT",
    "LocalViT",
    "PyramidBody",
    "STViT",
    "XCiTSimA",
    "create_body",
    "create_model",
    "list_models",
    "swapped",
]
