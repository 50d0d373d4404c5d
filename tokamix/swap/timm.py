"""timm's attention classes, replaced by SimA, and the layout of timm's blocks.

The modules that call operators are leaves to symbolic tracing (timm's feature extraction by torch.fx), because the
operators look at shapes.
"""

from typing import Any

import torch
from timm.layers import Attention, register_notrace_module
from timm.models.cait import ClassAttn, TalkingHeadAttn
from timm.models.swin_transformer import WindowAttention
from timm.models.xcit import XCA
from torch import Tensor, nn

from tokamix.layers import merge_heads, split_heads
from tokamix.mixers.sima_multihead import weigh
from tokamix.ops import sima_class_attention, sima_self_attention
from tokamix.swap._host import BEFORE, Adapter, BlockLayout


@register_notrace_module
class QKVSimA(nn.Module):
    """SimA with the layers of an attention that has one projection for queries, keys and values."""

    def __init__(self, host: Any, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv, self.proj, self.proj_drop = host.qkv, host.proj, host.proj_drop
        # optional parts of timm's Attention
        self.q_norm: nn.Module = getattr(host, "q_norm", nn.Identity())
        self.k_norm: nn.Module = getattr(host, "k_norm", nn.Identity())
        self.norm: nn.Module = getattr(host, "norm", nn.Identity())
        self.gate: nn.Module | None = getattr(host, "gate", None)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Mix tokens x (B, N, C) or (B, H, W, C); masked pairs (False, or negative) get weight 0."""
        if is_causal:
            raise ValueError(
                "SimA normalises over all tokens, including later ones, so it has no causal form; use is_causal=False"
            )
        qkv = self.qkv(x.flatten(1, -2)).unflatten(-1, (3, self.num_heads, -1))  # (B, N, 3, H, D)
        if not isinstance(self.q_norm, nn.Identity):
            q, k, v = qkv.unbind(2)
            qkv = torch.stack([self.q_norm(q), self.k_norm(k), v], dim=2)
        if attn_mask is None:
            out = sima_self_attention(qkv)
        else:
            q, k, v = qkv.transpose(1, 3).unbind(2)  # (B, H, N, D)
            masked = attn_mask < 0 if attn_mask.is_floating_point() else ~attn_mask
            out = merge_heads(weigh(q, k, v, masked)[0])
        out = self.norm(out).reshape(*x.shape[:-1], -1)
        out = out if self.gate is None else out * self.gate(x).sigmoid()
        return self.proj_drop(self.proj(out))


class WindowSimA(QKVSimA):
    """`QKVSimA` in Swin's windows."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Mix the tokens x (B * windows, N, C) of each window; `mask` (windows, N, N) is negative across borders."""
        if mask is not None:
            mask = mask.repeat(x.shape[0] // mask.shape[0], 1, 1).unsqueeze(1)
        return super().forward(x, mask)

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Do nothing: timm calls this when the image size changes, but nothing here depends on the window."""


@register_notrace_module
class ClassSimA(nn.Module):
    """SimA with the layers of timm's class attention, as in the XCiT of SimA's authors.

    Queries and keys are normalised over all tokens with eps 1e-6, so every token gets a query.
    """

    def __init__(self, host: Any, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.q, self.k, self.v, self.proj, self.proj_drop = host.q, host.k, host.v, host.proj, host.proj_drop

    def forward(self, x: Tensor) -> Tensor:
        """(B, 1 + N, C) -> the new class token (B, 1, C)."""
        q, k, v = (split_heads(layer(x), self.num_heads) for layer in (self.q, self.k, self.v))
        return self.proj_drop(self.proj(merge_heads(sima_class_attention(q, k, v, eps=1e-6))))


ADAPTERS: dict[type[nn.Module], Adapter] = {
    Attention: Adapter(QKVSimA),
    XCA: Adapter(
        QKVSimA, note="cross-covariance attention: its temperatures are dropped, and tokens mix instead of channels"
    ),
    TalkingHeadAttn: Adapter(
        QKVSimA, note="talking heads (proj_l, proj_w) are dropped: SimA has no attention weights for them to mix"
    ),
    WindowAttention: Adapter(
        WindowSimA,
        note="each window is normalised on its own; the relative position bias is dropped, and pairs that the shifted"
        " windows mask get weight 0",
    ),
    ClassAttn: Adapter(
        ClassSimA,
        note="class attention normalises over all tokens, so every token gets a query",
        class_attention=True,
    ),
}

# by name, so that these models need not be imported
BLOCKS = {
    "timm.models.vision_transformer.Block": BlockLayout(class_token=True),  # also of DeiT and PiT
    "timm.models.pvt_v2.Block": BlockLayout(),
    "timm.models.twins.Block": BlockLayout(),
    "timm.models.swin_transformer.SwinTransformerBlock": BlockLayout(msa=("drop_path1", BEFORE)),  # outside the windows
}
