"""nn.MultiheadAttention."""

from typing import Any

from torch import Tensor, nn

from tokamix.layers import merge_heads, split_heads
from tokamix.mixers.sima_multihead import SimA, raise_causal, refuse_bias, refuse_causal
from tokamix.swap._host import AFTER, BEFORE, Adapter, BlockLayout
from tokamix.swap.product import SimAProduct


def _convert(host: Any, mixer: nn.Module) -> bool:
    """`tokamix.mixers.SimA` is nn.MultiheadAttention with SimA, weights included."""
    if not isinstance(mixer, SimAProduct) or mixer.norm != "l1":
        return False
    host.num_heads = mixer.num_heads or host.num_heads
    host.head_dim = host.embed_dim // host.num_heads
    host._qkv_same_embed_dim = False
    host.__class__ = SimA
    return True


def _prepare(host: Any) -> None:
    host._qkv_same_embed_dim = False  # see `SimA`: PyTorch's fast paths compute softmax without calling forward


def _check(name: str, host: nn.MultiheadAttention) -> None:
    if host.bias_k is not None or host.add_zero_attn:
        raise ValueError(
            f"{name} adds a token to keys and values (add_bias_kv, add_zero_attn), which no mixer supports; build the"
            " model without these options"
        )


def _forward(
    self: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_padding_mask: Tensor | None = None,
    need_weights: bool = True,
    attn_mask: Tensor | None = None,
    average_attn_weights: bool = True,
    is_causal: bool = False,
) -> tuple[Tensor, None]:
    """As nn.MultiheadAttention, but without weights: None takes their place."""
    product = self.mixer
    if is_causal and not product.keeps_bias:
        raise_causal(product.name)
    if is_causal and attn_mask is None:
        raise ValueError("is_causal is a hint about attn_mask, as in nn.MultiheadAttention; give the mask too")
    batched, cross = query.ndim == 3, query is not key
    if not batched:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
    elif not self.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    q, k, v = (split_heads(x, self.num_heads) for x in SimA._project(self, query, key, value))
    mask = bias = None
    if key_padding_mask is not None:
        mask = _forbidden(key_padding_mask).reshape(-1, 1, 1, k.shape[2])
    if attn_mask is not None:
        attn_mask = attn_mask.unflatten(0, (-1, self.num_heads)) if attn_mask.ndim == 3 else attn_mask
        if product.keeps_bias and attn_mask.is_floating_point():
            bias = attn_mask
        else:
            forbidden = _forbidden(attn_mask)
            if not product.keeps_bias:
                refuse_bias(attn_mask, product.name)
                refuse_causal(forbidden, product.name)
            mask = forbidden if mask is None else mask | forbidden
    out = self.out_proj(merge_heads(self.attend(q, k, v, None if cross else query, mask, bias, cross=cross)))
    if not batched:
        return out.squeeze(0), None
    return out if self.batch_first else out.transpose(0, 1), None


def _whole(out: Tensor, self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
    return out, None


def _forbidden(mask: Tensor) -> Tensor:
    return mask < 0 if mask.is_floating_point() else mask


ADAPTERS: dict[str, Adapter] = {
    "torch.nn.modules.activation.MultiheadAttention": Adapter(
        _forward, output="out_proj", wrap=_whole, prepare=_prepare, convert=_convert, check=_check
    ),
}
BLOCKS = {
    "torch.nn.modules.transformer.TransformerEncoderLayer": BlockLayout(
        front=("linear1", BEFORE), mid=("linear2", BEFORE), end=("dropout2", AFTER), msa=("self_attn", AFTER)
    ),
}
