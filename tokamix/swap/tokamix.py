"""Models of this library whose attention has a replaceable `attend` (CvT, PVT), and the layout of its blocks."""

from typing import Any

from timm.layers import register_notrace_module
from torch import Tensor, nn

from tokamix.layers import SoftmaxProduct
from tokamix.ops import sima_attention
from tokamix.swap._host import Adapter, BlockLayout


@register_notrace_module
class SimAProduct(nn.Module):
    """SimA between the projections of CvT and PVT."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q (B, H, Nq, D), k and v (B, H, Nk, D) -> (B, H, Nq, D); queries and keys are normalised separately."""
        return sima_attention(q, k, v)


def is_replaceable(module: nn.Module) -> bool:
    """Whether a module attends with a `SoftmaxProduct` called `attend`."""
    return isinstance(getattr(module, "attend", None), SoftmaxProduct)


def _replace_attend(host: Any, num_heads: int) -> nn.Module:
    host.num_heads, host.attend = num_heads, SimAProduct()
    return host


ATTEND_ADAPTER = Adapter(_replace_attend)

# by name, so that swap does not import models
BLOCKS = {
    "tokamix.models.pvt.Block": BlockLayout(),
    "tokamix.models.localvit.Block": BlockLayout(),
}
