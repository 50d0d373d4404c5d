"""Mixers between a host's projections: the product of queries, keys and values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.layers import merge_heads, tokens_to_map
from tokamix.mixers import CosFormer, HeadMixer, Linformer, SimASelfAttention, Site, create_mixer
from tokamix.mixers.sima_multihead import weigh
from tokamix.mixers.super_token import SuperTokenAttention
from tokamix.ops import sima_attention, super_token_sample, super_token_scatter
from tokamix.ops.sima.reference import channel_weight
from tokamix.ops.super_token.reference import EPS, scatter_backward

Grid = tuple[int, int]


@dataclass
class Call:
    """What a product knows about its tokens besides queries, keys and values.

    Attributes:
        tokens: the attention's input as tokens (B, N, C); None if the host changes their number before the product.
        mask: True where a query must not see a key, broadcastable to (B, heads, Nq, Nk).
        bias: added to the logits of softmax.
        scale: factor of the logits; 1 / sqrt(D) if None.
        windows: whether `mask` separates the regions of a shifted window, not padding from tokens.
        prefix: tokens at the start that are not on the grid, such as the class token.
        find_grid: number of patch tokens -> grid (H, W).
        cross: whether queries are of other tokens than keys, whose padding then says nothing about the queries.
    """

    tokens: Tensor | None
    mask: Tensor | None
    bias: Tensor | None
    scale: float | None
    windows: bool
    prefix: int
    find_grid: Callable[[int], Grid]
    cross: bool = False


class Product(nn.Module):
    """Mixes queries (B, heads, Nq, D), keys (B, heads, Nk, D) and values (B, heads, Nk, Dv) to (B, heads, Nq, Dv).

    Attributes:
        name: the mixer's name.
        num_heads: heads of the product; None for the host's.
        keeps_bias: whether position biases of the host are used.
        square: whether there must be as many keys as queries.
        same_width: whether queries, keys and values must have the same number of channels.
        on_grid: whether patch tokens are mixed on their grid, without the prefix tokens.
    """

    name = ""
    num_heads: int | None = None
    keeps_bias = square = same_width = on_grid = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Mix; heads are regrouped if `num_heads` differs from the host's."""
        heads = q.shape[1]
        if k.shape[1] != heads:  # keys and values that all queries share
            k, v = k.expand(-1, heads, -1, -1), v.expand(-1, heads, -1, -1)
        if self.num_heads is not None and self.num_heads != heads:
            q, k, v = (_regroup(t, self.num_heads) for t in (q, k, v))
        if self.on_grid and call.prefix:
            # the rule for prefix tokens: patch tokens are mixed on their grid, prefix tokens attend to all tokens
            n = call.prefix
            patches = self.mix(q[:, :, n:], k[:, :, n:], v[:, :, n:], call)
            prefix = F.scaled_dot_product_attention(q[:, :, :n], k, v, scale=call.scale)
            out = torch.cat([prefix.to(patches.dtype), patches], dim=2)
        else:
            out = self.mix(q, k, v, call)
        return out if out.shape[1] == heads else _regroup(out, heads)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """The product of one number of heads, without prefix tokens if `on_grid`."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        """The mixer's name, and its heads if they are not the host's."""
        return self.name if self.num_heads is None else f"{self.name}, num_heads={self.num_heads}"


class SoftmaxProduct(Product):
    """The host's own product: softmax(scale q k^T + bias) v."""

    keeps_bias = True

    def mix(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Softmax attention."""
        bias = call.bias
        if call.mask is not None:
            bias = torch.zeros((), dtype=q.dtype, device=q.device) if bias is None else bias
            bias = bias.masked_fill(call.mask, -torch.inf)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=call.scale)


class SimAProduct(Product):
    """SimA. Masked keys, and queries that are masked keys, take no part in the norms; masked pairs get weight 0."""

    def __init__(self, mixer: SimASelfAttention) -> None:
        super().__init__()
        self.norm = mixer.norm

    def mix(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """SimA; its scale and biases cancel or do not exist."""
        if call.mask is not None:
            if not call.windows:
                padding = call.mask.all(dim=-2).unsqueeze(-1)  # (B, heads, Nk, 1)
                k, v = k.masked_fill(padding, 0), v.masked_fill(padding, 0)
                if q.shape[2] == k.shape[2] and not call.cross:
                    q = q.masked_fill(padding, 0)
            if call.mask.shape[-2] > 1:
                return weigh(q, k, v, call.mask, self.norm)[0]
        if k.shape == v.shape and q.dtype == k.dtype == v.dtype:
            return sima_attention(q, k, v, self.norm)
        scale = channel_weight(q, k, self.norm, 1e-12)  # values of another width
        return ((q * scale) @ (k.to(scale.dtype).mT @ v.to(scale.dtype))).to(v.dtype)


class AttendProduct(Product):
    """The part of a `HeadMixer` between its projections."""

    def __init__(self, mixer: HeadMixer) -> None:
        super().__init__()
        del mixer.qkv, mixer.proj  # the host has them
        self.mixer = mixer
        self.on_grid = isinstance(mixer, Linformer) or (isinstance(mixer, CosFormer) and mixer.reweight)

    def mix(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Call the mixer's `attend`."""
        _refuse_padding(self.name, call)
        if call.scale is not None:  # these mixers scale by 1 / sqrt(D)
            q = q * (call.scale * q.shape[-1] ** 0.5)
        grid = call.find_grid(k.shape[2]) if self.on_grid else (1, k.shape[2])
        return self.mixer.attend(q, k, v, grid=grid)


class SuperTokenProduct(Product):
    """Attention among super tokens: queries, keys and values are averaged by the association of the input tokens."""

    on_grid = square = True

    def __init__(self, mixer: SuperTokenAttention) -> None:
        super().__init__()
        self.cell, self.n_iter, self.backend = mixer.cell, mixer.n_iter, mixer.backend

    def mix(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        """Average, attend, and map back to tokens."""
        _refuse_padding(self.name, call)
        grid, heads = call.find_grid(q.shape[2]), q.shape[1]
        tokens = merge_heads(v) if call.tokens is None else call.tokens
        x = tokens_to_map(tokens[:, tokens.shape[1] - q.shape[2] :].to(v.dtype), grid)
        association = super_token_sample(x, self.cell, self.n_iter, self.backend)[1]
        parts = torch.cat([merge_heads(q), merge_heads(k), merge_heads(v)], dim=-1)
        sums = scatter_backward(tokens_to_map(parts, grid), association, self.cell)
        weight = scatter_backward(torch.ones_like(x[..., :1]), association, self.cell) + EPS
        means = (sums / weight).flatten(1, 2)
        sizes = [heads * t.shape[-1] for t in (q, k, v)]
        sq, sk, sv = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in means.split(sizes, dim=-1))
        out = merge_heads(F.scaled_dot_product_attention(sq, sk, sv, scale=call.scale))
        out = out.unflatten(1, sums.shape[1:3])
        out = super_token_scatter(out, association, self.cell, self.backend).flatten(1, 2)
        return out.unflatten(-1, (heads, -1)).transpose(1, 2)


def create_product(name: str, site: Site, **options: Any) -> Product | None:
    """The product of a registered mixer; None for one that does not work between a host's projections."""
    mixer = create_mixer(name, site, **options)
    product: Product
    if isinstance(mixer, SimASelfAttention):
        _check_used(name, options, ("norm",))
        product = SimAProduct(mixer)
    elif name == "softmax":
        _check_used(name, options, ())
        product = SoftmaxProduct()
    elif isinstance(mixer, SuperTokenAttention):
        _check_used(name, options, ("cell", "n_iter", "backend"))
        # with cells of 1x1 each token is its own super token
        product = SoftmaxProduct() if mixer.cell == (1, 1) else SuperTokenProduct(mixer)
    elif isinstance(mixer, HeadMixer) and mixer.parts == 3:
        _check_used(name, options, tuple(option for option in options if option != "qkv_bias"))
        product = AttendProduct(mixer)
        product.square = product.same_width = name == "xca"
    else:
        return None
    product.name = name
    return product


def _check_used(name: str, options: Mapping[str, Any], used: Sequence[str]) -> None:
    """Refuse options without effect: those of parts that the host has."""
    unused = [option for option in options if option not in (*used, "device", "dtype")]
    if unused:
        raise ValueError(
            f"mixer_kwargs has {unused[0]!r}, but {name} has no such option between the projections of a host;"
            + (f" it has {', '.join(used)}" if used else " it has none")
        )


def _refuse_padding(name: str, call: Call) -> None:
    if call.mask is not None and not call.windows:
        raise ValueError(f"{name} cannot exclude masked tokens; use to='sima' or 'softmax', or no mask")


def _regroup(t: Tensor, heads: int) -> Tensor:
    """(B, H, N, D) -> (B, heads, N, H * D / heads), channels in the same order."""
    return t.transpose(1, 2).flatten(2).unflatten(-1, (heads, -1)).transpose(1, 2)
