"""nn.MultiheadAttention."""

from typing import Any

from torch import Tensor, nn

from tokamix.layers import merge_heads, split_heads
from tokamix.mixers.sima_multihead import SimA, raise_causal, refuse_causal
from tokamix.swap._host import Adapter
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
    if is_causal:
        raise_causal(self.mixer.name)
    batched = query.ndim == 3
    if not batched:
        query, key, value = (x.unsqueeze(0) for x in (query, key, value))
    elif not self.batch_first:
        query, key, value = (x.transpose(0, 1) for x in (query, key, value))
    q, k, v = (split_heads(x, self.num_heads) for x in SimA._project(self, query, key, value))
    mask = None
    if key_padding_mask is not None:
        mask = _forbidden(key_padding_mask).reshape(-1, 1, 1, k.shape[2])
    if attn_mask is not None:
        forbidden = _forbidden(attn_mask)
        refuse_causal(forbidden, self.mixer.name)
        forbidden = forbidden.unflatten(0, (-1, self.num_heads)) if forbidden.ndim == 3 else forbidden
        mask = forbidden if mask is None else mask | forbidden
    out = self.out_proj(merge_heads(self.attend(q, k, v, query if query.shape == key.shape else None, mask)))
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
