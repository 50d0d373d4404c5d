"""SimA with the interface of nn.MultiheadAttention, for existing encoders and decoders."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.layers import merge_heads, split_heads
from tokamix.ops import sima_attention
from tokamix.ops.precision import no_autocast
from tokamix.ops.sima.reference import channel_weight

EPS = 1e-12
NO_CAUSAL = (
    "{} sums over all tokens, including later ones, so it has no causal form; use no causal mask, or keep the attention"
    " of this block with where="
)
NO_BIAS = (
    "{} has no logits to add a bias to, and this additive mask has values other than 0 and below -50; use a mask that"
    " excludes pairs, or keep the attention of this block with where="
)
EXCLUDES = -50.0  # additive masks exclude pairs by values below: -100 in Swin, -inf and the like elsewhere


class SimA(nn.MultiheadAttention):
    """A drop-in replacement of nn.MultiheadAttention without softmax: self- and cross-attention, padding, both layouts.

    SimA: Simple Softmax-free Attention for Vision Transformers, arXiv 2206.08898. Parameters have the names, shapes
    and initial values of nn.MultiheadAttention, so its checkpoints load. Queries are normalised over the queries, keys
    over the keys. Padded keys are excluded, also from the norms; if query and key are the same tensor, padded queries
    are excluded from the norms too, so that the outputs of real tokens do not depend on the padding.

    Differences: weights may be negative and do not sum to 1. `dropout` is accepted but not applied, as by the authors:
    without softmax no weights are computed unless they are requested. There is no causal form, since norms are over all
    tokens.

    Args:
        embed_dim: channels of queries and output.
        num_heads: heads.
        dropout: accepted but not applied.
        bias: whether the projections have biases.
        add_bias_kv: not supported.
        add_zero_attn: not supported.
        kdim: channels of the keys; embed_dim if None.
        vdim: channels of the values; embed_dim if None.
        batch_first: (B, N, C) instead of (N, B, C).
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        if add_bias_kv or add_zero_attn:
            raise ValueError(
                "SimA does not support add_bias_kv and add_zero_attn: the added token would change its norms"
            )
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"{embed_dim} channels do not divide into {num_heads} heads; choose a divisor")
        super().__init__(embed_dim, num_heads, dropout, bias, False, False, kdim, vdim, batch_first, device, dtype)
        # in eval mode nn.TransformerEncoder and its layers compute softmax attention from the weights without calling
        # forward, unless this flag is False (queries, keys and values differ in width)
        self._qkv_same_embed_dim = False

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None  # read by the base class
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from query (L, B, C) to key and value (S, B, C); (B, L, C) with batch_first, (L, C) unbatched.

        Args:
            query: queries.
            key: keys.
            value: values.
            key_padding_mask: (B, S) or (S,); True, or a negative number, where a key is padding.
            need_weights: also return the weights, at a cost of L * S; otherwise None is returned for them.
            attn_mask: (L, S) or (B * num_heads, L, S); True, or a large negative number, where a pair gets weight 0.
                Norms ignore it. A causal mask is refused, and so is a bias of the logits.
            average_attn_weights: average the weights over the heads.
            is_causal: not supported.

        Returns:
            Output of the query's layout, and weights (B, L, S), or (B, num_heads, L, S) unless averaged.
        """
        if is_causal:
            raise_causal("SimA")
        if query.is_nested or query.ndim not in (2, 3):
            raise ValueError(
                "SimA needs plain tensors (L, B, C), (B, L, C) or (L, C); pad nested ones, and give nn.Transformer"
                "Encoder enable_nested_tensor=False"
            )
        same, batched = query is key, query.ndim == 3
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v = (split_heads(x, self.num_heads) for x in self._project(query, key, value))  # (B, H, N, D)
        if key_padding_mask is not None:
            padding = _forbidden(key_padding_mask).unsqueeze(-2).unsqueeze(-1)  # (B, 1, S, 1)
            k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
            q = q.masked_fill(padding, 0) if same else q
        if need_weights or attn_mask is not None:
            forbidden = None if attn_mask is None else _forbidden(attn_mask)
            if attn_mask is not None and forbidden is not None:
                refuse_bias(attn_mask, "SimA")
                refuse_causal(forbidden, "SimA")
            if forbidden is not None and forbidden.ndim == 3:
                forbidden = forbidden.unflatten(0, (-1, self.num_heads))
            out, weights = weigh(q, k, v, forbidden)
        else:
            out, weights = sima_attention(q, k, v), None
        out = self.out_proj(merge_heads(out))
        if weights is not None:
            weights = weights.mean(1) if average_attn_weights else weights
        if not batched:
            out, weights = out.squeeze(0), None if weights is None else weights.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        return out, weights if need_weights else None

    def _project(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if self.in_proj_weight is not None:
            matrices = self.in_proj_weight.chunk(3)
        else:
            matrices = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        biases = (None, None, None) if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        return [F.linear(x, w, b) for x, w, b in zip((query, key, value), matrices, biases, strict=True)]


def weigh(
    q: Tensor, k: Tensor, v: Tensor, forbidden: Tensor | None = None, norm: str | None = "l1"
) -> tuple[Tensor, Tensor]:
    """SimA with explicit weights: q (B, H, Nq, D), k, v (B, H, Nk, D) -> (B, H, Nq, D) and weights (B, H, Nq, Nk).

    Forbidden pairs, (Nq, Nk) or (B, H, Nq, Nk), get weight 0. Computed in float32 or wider, because weights are of the
    order of 1 / N², below the range of float16.
    """
    with no_autocast(q):
        scale = channel_weight(q, k, norm, EPS)
        weights = (q * scale) @ k.to(scale.dtype).mT
        if forbidden is not None:
            weights = weights.masked_fill(forbidden, 0)
        return (weights @ v.to(scale.dtype)).to(q.dtype), weights.to(q.dtype)


def refuse_causal(mask: Tensor, name: str) -> None:
    """Raise ValueError for a causal mask: later tokens would leak through norms and sums over all tokens."""
    if mask.ndim < 2 or mask.shape[-1] != mask.shape[-2] or mask.shape[-1] < 2:
        return
    later = torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).triu(1)
    _refuse((mask | ~later).all(), NO_CAUSAL.format(name))


def refuse_bias(mask: Tensor, name: str) -> None:
    """Raise ValueError for an additive mask with other values than 0 and large negative ones: it is a bias."""
    if mask.is_floating_point():
        _refuse(((mask != 0) & (mask > EXCLUDES)).any(), NO_BIAS.format(name))


def raise_causal(name: str) -> None:
    """Raise the error for causal masks."""
    raise ValueError(NO_CAUSAL.format(name))


def _refuse(wrong: Tensor, message: str) -> None:
    """Raise ValueError if a condition holds; a compiled or exported graph raises RuntimeError when it runs."""
    if torch.compiler.is_compiling():  # no branches that depend on data
        torch._assert_async(~wrong, message)
    elif not wrong.is_meta and bool(wrong):
        raise ValueError(message)


def _forbidden(mask: Tensor) -> Tensor:
    """A mask as booleans; nn.TransformerEncoder turns boolean masks into additive ones with -inf."""
    return mask < 0 if mask.is_floating_point() else mask
