"""Forwards of timm's attentions that compute softmax themselves, with `self.attend` in its place.

Each is the host's computation of queries, keys and values and of what follows them. Position biases are passed to the
mixers that can use them.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from timm.models.mvitv2 import cal_rel_pos_type, reshape_post_pool, reshape_pre_pool
from torch import Tensor, nn

from tokamix.layers import merge_heads, split_heads
from tokamix.ops import sima_class_attention, sima_self_attention
from tokamix.swap.attention import split_mask
from tokamix.swap.product import SimAProduct


def project(self: Any, x: Tensor) -> Tensor:
    """The output projection and its dropout."""
    x = self.proj(x)
    drop = getattr(self, "proj_drop", None)
    return x if drop is None else drop(x)


def fused_qkv(self: Any, x: Tensor, parts: int = 3) -> tuple[Tensor, ...]:
    """Queries, keys and values (B, heads, N, D) of one projection of tokens (B, N, C)."""
    return self.qkv(x).unflatten(-1, (parts, self.num_heads, -1)).transpose(1, 3).unbind(2)


def attention(self: Any, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
    """timm's Attention and those like it, on tokens (B, N, C) or (B, H, W, C)."""
    tokens = x.flatten(1, -2)
    qkv = self.qkv(tokens)
    mixer, q_norm = self.mixer, getattr(self, "q_norm", None)
    plain = q_norm is None or isinstance(q_norm, nn.Identity)
    if isinstance(mixer, SimAProduct) and plain and attn_mask is None and not is_causal:
        packed = qkv.unflatten(-1, (3, mixer.num_heads or self.num_heads, -1))  # (B, N, 3, H, D)
        out = sima_self_attention(packed, mixer.norm)
    else:
        q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
        if not plain:
            q, k = self.q_norm(q), self.k_norm(k)
        mask, bias = split_mask(attn_mask, is_causal, q, mixer, self.adapter)
        out = merge_heads(self.attend(q, k, v, x, mask, bias))
    norm, gate = getattr(self, "norm", None), getattr(self, "gate", None)
    out = out if norm is None else norm(out)
    out = out.reshape(*x.shape[:-1], out.shape[-1])
    return project(self, out if gate is None else out * gate(x).sigmoid())


def class_attention(self: Any, x: Tensor) -> Tensor:
    """CaiT's and VOLO's class attention: (B, 1 + N, C) -> the new class token (B, 1, C).

    SimA normalises queries over all tokens, as in the XCiT of its authors, so every token gets a query there.
    """
    k, v = (self.k(x), self.v(x)) if hasattr(self, "k") else self.kv(x).chunk(2, dim=-1)
    k, v = split_heads(k, self.num_heads), split_heads(v, self.num_heads)
    mixer = self.mixer
    if isinstance(mixer, SimAProduct):
        heads = mixer.num_heads or self.num_heads
        q, k, v = (split_heads(t, heads) for t in (self.q(x), merge_heads(k), merge_heads(v)))
        out = sima_class_attention(q, k, v, mixer.norm, eps=1e-6)
    else:
        out = self.attend(split_heads(self.q(x[:, :1]), self.num_heads), k, v)
    return project(self, merge_heads(out))


def window_attention(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Swin's windows (B * windows, N, C); `mask` (windows, N, N) is negative across borders."""
    if mask is None and isinstance(self.mixer, SimAProduct):
        return attention(self, x)
    q, k, v = fused_qkv(self, x)
    bias = self._get_rel_pos_bias() if self.mixer.keeps_bias else None
    return project(self, merge_heads(self.attend(q, k, v, x, _border(x, mask), bias)))


def cosine_window_attention(self: Any, x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The windows of Swin v2 and v2-CR, with queries and keys of unit length."""
    qkv_bias = None if getattr(self, "q_bias", None) is None else torch.cat((self.q_bias, self.k_bias, self.v_bias))
    qkv = self.qkv(x) if qkv_bias is None else F.linear(x, self.qkv.weight, qkv_bias)
    q, k, v = qkv.unflatten(-1, (3, self.num_heads, -1)).transpose(1, 3).unbind(2)
    q, k, bias = F.normalize(q, dim=-1), F.normalize(k, dim=-1), None
    if self.mixer.keeps_bias:
        q = q * self.logit_scale.view(1, -1, 1, 1).clamp(max=math.log(100.0)).exp()
        bias = _swin_v2_bias(self) if hasattr(self, "cpb_mlp") else self._relative_positional_encodings()
    scale = 1.0 if self.mixer.keeps_bias else None
    return project(self, merge_heads(self.attend(q, k, v, x, _border(x, mask), bias, scale)))


def _swin_v2_bias(self: Any) -> Tensor:
    area = self.window_size[0] * self.window_size[1]
    table = self.cpb_mlp(self.relative_coords_table).view(-1, self.num_heads)
    return 16 * table[self.relative_position_index.view(-1)].view(area, area, -1).permute(2, 0, 1).sigmoid()


def _border(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """A mask of windows (windows, N, N), True at excluded pairs, for all images: (B * windows, 1, N, N)."""
    return None if mask is None else (mask < 0).repeat(x.shape[0] // mask.shape[0], 1, 1).unsqueeze(1)


def gcvit(self: Any, x: Tensor, q_global: Tensor | None = None) -> Tensor:
    """GCViT's windows, with the queries of the image in every second block."""
    if self.use_global and q_global is not None:
        k, v = fused_qkv(self, x, 2)
        q = q_global.repeat_interleave(x.shape[0] // q_global.shape[0], dim=0)  # windows are in the order of images
        q = split_heads(q.reshape(x.shape[0], x.shape[1], -1), self.num_heads)
    else:
        q, k, v = fused_qkv(self, x)
    bias = self.rel_pos(q.new_zeros(1, self.num_heads, x.shape[1], x.shape[1])) if self.mixer.keeps_bias else None
    return project(self, merge_heads(self.attend(q, k, v, x, bias=bias)))


def gpsa(self: Any, x: Tensor) -> Tensor:
    """ConViT's gated positional self-attention; only softmax keeps the attention to positions."""
    q, k = self.qk(x).unflatten(-1, (2, self.num_heads, -1)).transpose(1, 3).unbind(2)
    v = split_heads(self.v(x), self.num_heads)
    out = self.attend(q, k, v, x)
    if self.mixer.keeps_bias:
        if self.rel_indices is None or self.rel_indices.shape[1] != x.shape[1]:
            self.rel_indices = self.get_rel_indices(x.shape[1])
        position = self.pos_proj(self.rel_indices).permute(0, 3, 1, 2).softmax(dim=-1)
        gate = self.gating_param.view(1, -1, 1, 1).sigmoid()
        out = (1 - gate) * out + gate * (position @ v)
    return project(self, merge_heads(out))


def crossvit(self: Any, x: Tensor) -> Tensor:
    """CrossViT's fusion: the class token of one branch attends to the patches of the other."""
    q, k, v = (split_heads(layer(x), self.num_heads) for layer in (self.wq, self.wk, self.wv))
    if isinstance(self.mixer, SimAProduct):  # as in class attention, queries are normalised over all tokens
        heads = self.mixer.num_heads or self.num_heads
        q, k, v = (split_heads(merge_heads(t), heads) for t in (q, k, v))
        out = sima_class_attention(q, k, v, self.mixer.norm, eps=1e-6)
    else:
        out = self.attend(q[:, :, :1], k, v)
    return project(self, merge_heads(out))


def tnt(self: Any, x: Tensor) -> Tensor:
    """TNT's attention inside and among patches."""
    q, k = self.qk(x).unflatten(-1, (2, self.num_heads, -1)).transpose(1, 3).unbind(2)
    return project(self, merge_heads(self.attend(q, k, split_heads(self.v(x), self.num_heads), x)))


def efficientformer(self: Any, x: Tensor) -> Tensor:
    """EfficientFormer's attention, with values wider than keys."""
    qkv = split_heads(self.qkv(x), self.num_heads)
    q, k, v = qkv.split([self.key_dim, self.key_dim, self.val_dim], dim=3)
    return project(self, merge_heads(self.attend(q, k, v, x, bias=_biases(self, x))))


def efficientformer_v2(self: Any, x: Tensor) -> Tensor:
    """EfficientFormerV2's attention on maps; the talking heads (1x1 convolutions of the weights) are dropped."""
    if self.stride_conv is not None:
        x = self.stride_conv(x)
    v = self.v(x)
    q, k = _from_map(self.q(x), self.num_heads), _from_map(self.k(x), self.num_heads)
    out = self.attend(q, k, _from_map(v, self.num_heads), x, bias=_biases(self, x))
    out = _to_map(out, x.shape[2:]) + self.v_local(v)
    return self.proj(self.act(out if self.upsample is None else self.upsample(out)))


def efficientformer_v2_down(self: Any, x: Tensor) -> Tensor:
    """EfficientFormerV2's attention that halves the map."""
    v, q = self.v(x), self.q(x)
    k = _from_map(self.k(x), self.num_heads)
    out = self.attend(_from_map(q, self.num_heads), k, _from_map(v, self.num_heads), x, bias=_biases(self, x))
    return self.proj(self.act(_to_map(out, q.shape[2:]) + self.v_local(v)))


def levit(self: Any, x: Tensor) -> Tensor:
    """LeViT's attention, on tokens or maps."""
    qkv, bias = self.qkv(x), _biases(self, x)
    heads = _from_map(qkv, self.num_heads) if self.use_conv else split_heads(qkv, self.num_heads)
    q, k, v = heads.split([self.key_dim, self.key_dim, self.val_dim], dim=3)
    out = self.attend(q, k, v, x, bias=bias)
    return self.proj(_to_map(out, x.shape[2:]) if self.use_conv else merge_heads(out))


def levit_down(self: Any, x: Tensor) -> Tensor:
    """LeViT's attention that halves the grid."""
    kv, q, bias = self.kv(x), self.q(x), _biases(self, x)
    if self.use_conv:
        kv, queries = _from_map(kv, self.num_heads), _from_map(q, self.num_heads)
    else:
        kv = split_heads(kv, self.num_heads)
        queries = q.reshape(x.shape[0], -1, self.num_heads, self.key_dim).transpose(1, 2)
    k, v = kv.split([self.key_dim, self.val_dim], dim=3)
    out = self.attend(queries, k, v, bias=bias)
    if self.use_conv:
        return self.proj(_to_map(out, [(n - 1) // self.stride + 1 for n in x.shape[2:]]))
    return self.proj(merge_heads(out))


def cascaded_group(self: Any, x: Tensor) -> Tensor:
    """EfficientViT's cascade: each head sees its channels and the output of the head before it."""
    parts, outputs, feat = x.chunk(len(self.qkvs), dim=1), [], None
    biases = _biases(self, x)
    for index, (qkv, dws) in enumerate(zip(self.qkvs, self.dws, strict=True)):
        feat = qkv(parts[index] if feat is None else feat + parts[index])
        q, k, v = feat.split([self.key_dim, self.key_dim, self.val_dim], dim=1)
        bias = None if biases is None else biases[index]
        out = self.attend(*(_from_map(t, 1) for t in (dws(q), k, v)), x=x, bias=bias)
        feat = _to_map(out, x.shape[2:])
        outputs.append(feat)
    return self.proj(torch.cat(outputs, dim=1))


def shvit(self: Any, x: Tensor) -> Tensor:
    """SHViT's single-head attention of a part of the channels."""
    mixed, rest = x.split([self.pdim, self.dim - self.pdim], dim=1)
    mixed = self.pre_norm(mixed)
    q, k, v = (_from_map(t, 1) for t in self.qkv(mixed).split([self.qk_dim, self.qk_dim, self.pdim], dim=1))
    out = _to_map(self.attend(q, k, v, mixed, scale=self.scale), x.shape[2:])
    return self.proj(torch.cat([out, rest], dim=1))


def mvit(self: Any, x: Tensor, feat_size: Any) -> tuple[Tensor, Any]:
    """MViTv2's attention with pooled queries, keys and values."""
    parts, sizes = [], []
    for t, name in zip(fused_qkv(self, x), "qkv", strict=True):
        pool, norm, size = getattr(self, f"pool_{name}"), getattr(self, f"norm_{name}"), feat_size
        if pool is not None:
            t, token = reshape_pre_pool(t, feat_size, self.has_cls_token)
            t, size = reshape_post_pool(pool(t), self.num_heads, token)
        parts.append(t if norm is None else norm(t))
        sizes.append(size)
    q, k, v = parts
    bias = None
    if self.rel_pos_type == "spatial" and self.mixer.keeps_bias:
        zeros = q.new_zeros(*q.shape[:3], k.shape[2])
        bias = cal_rel_pos_type(zeros, q, self.has_cls_token, *sizes[:2], self.rel_pos_h, self.rel_pos_w)
    out = self.attend(q, k, v, bias=bias, scale=self.scale, grid=tuple(sizes[0]))
    out = out + q if self.residual_pooling else out
    return self.proj(merge_heads(out)), sizes[0]


def coat(self: Any, x: Tensor, size: tuple[int, int]) -> Tensor:
    """CoaT's factorised attention: the product changes, the convolutional position encoding stays."""
    q, k, v = fused_qkv(self, x)
    return project(self, merge_heads(self.attend(q, k, v, x, grid=size) + self.crpe(q, v, size=size)))


def bottleneck(self: Any, x: Tensor) -> Tensor:
    """BoTNet's attention on maps."""
    parts = self.qkv(x).split([self.dim_out_qk, self.dim_out_qk, self.dim_out_v], dim=1)
    q, k, v = (_from_map(t, self.num_heads) for t in parts)
    bias = None
    if self.mixer.keeps_bias:
        bias = self.pos_embed(q.flatten(0, 1)).unflatten(0, (-1, self.num_heads))
        bias = bias * self.scale if self.scale_pos_embed else bias
    return self.pool(_to_map(self.attend(q, k, v, x, bias=bias, scale=self.scale), x.shape[2:]))


def halo(self: Any, x: Tensor) -> Tensor:
    """HaloNet's blocks, which attend to themselves and a margin around them."""
    rows, columns = x.shape[2] // self.block_size, x.shape[3] // self.block_size
    side, heads = self.block_size_ds, self.num_heads
    q = self.q(x).reshape(-1, self.dim_head_qk, rows, side, columns, side)
    q = q.permute(0, 2, 4, 3, 5, 1).flatten(1, 2).flatten(2, 3)  # (B * heads, blocks, side^2, D)
    kv = F.pad(self.kv(x), [self.halo_size] * 4)
    kv = kv.unfold(2, self.win_size, self.block_size).unfold(3, self.win_size, self.block_size)
    kv = kv.reshape(x.shape[0] * heads, -1, rows * columns, self.win_size**2).permute(0, 2, 3, 1)
    k, v = kv.split([self.dim_head_qk, self.dim_head_v], dim=-1)
    bias = None
    if self.mixer.keeps_bias:
        bias = self.pos_embed(q)
        bias = (bias * self.scale if self.scale_pos_embed else bias).flatten(0, 1).unsqueeze(1)
    blocks = (t.flatten(0, 1).unsqueeze(1) for t in (q, k, v))
    out = self.attend(*blocks, bias=bias, scale=self.scale).squeeze(1)  # (B * heads * blocks, side^2, D)
    out = out.reshape(-1, rows, columns, side, side, self.dim_head_v).permute(0, 5, 1, 3, 2, 4)
    return self.pool(out.reshape(x.shape[0], self.dim_out_v, rows * side, columns * side))


def _from_map(x: Tensor, heads: int) -> Tensor:
    """(B, heads * D, H, W) -> (B, heads, H * W, D)."""
    return x.flatten(2).unflatten(1, (heads, -1)).transpose(2, 3)


def _to_map(x: Tensor, size: Any) -> Tensor:
    """(B, heads, H * W, D) -> (B, heads * D, H, W)."""
    return x.transpose(2, 3).flatten(1, 2).unflatten(2, tuple(size))


def _biases(self: Any, x: Tensor) -> Tensor | None:
    """The attention biases of LeViT and its descendants."""
    return self.get_attention_biases(x.device) if self.mixer.keeps_bias else None
