"""Models of this library: the product inside the attention of CvT and PVT, and the layout of its blocks."""

from typing import Any

from torch import Tensor

from tokamix.swap._host import Adapter, BlockLayout


def _product(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q (B, H, Nq, D), k and v (B, H, Nk, D) -> (B, H, Nq, D)."""
    return self.attend(q, k, v, scale=self.scale)


# by name, so that swap does not import models
ADAPTERS = {"tokamix.layers.heads.SoftmaxProduct": Adapter(_product, layout="other")}
BLOCKS = {
    "tokamix.models.pvt.Block": BlockLayout(),
    "tokamix.models.localvit.Block": BlockLayout(),
}
