"""Every backbone of the papers, registered with timm."""

from tokamix.models.sima import XCiTSimA
from tokamix.models.stvit import STViT

__all__ = ["STViT", "XCiTSimA"]
