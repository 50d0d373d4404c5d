"""Modules that take the place of a host's attention: subclasses of its class with another product inside."""

import functools
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from timm.layers import register_notrace_module
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from tokamix.layers import channels_first, channels_last
from tokamix.mixers import Pooling
from tokamix.mixers.sima_multihead import raise_causal, refuse_bias, refuse_causal
from tokamix.swap._host import Adapter
from tokamix.swap.product import Call, Grid, Product


class ImageSize:
    """Size of the image that a model saw last, from which the grid of its tokens follows; shared by its mixers."""

    size: Grid | None = None


def remember_image_size(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Forward pre-hook of the module that sees the image: patch embedding, first convolution, or the model itself."""
    image = next(iter((*args, *kwargs.values())), None)
    if isinstance(image, Tensor) and image.ndim == 4:
        module.seen_size.size = (image.shape[-2], image.shape[-1])


def token_grid(count: int, size: Grid | None) -> Grid:
    """The grid (H, W) of `count` tokens of an image of a size; the image is square if the size is unknown.

    There must be a stride with which each side of the grid differs from that of the image by less than one token.
    """
    count = int(count)
    height, width = (int(size[0]), int(size[1])) if size else (1, 1)

    def fits(rows: int) -> bool:  # rows - 1 <= height / stride <= rows + 1, and the same for the columns, count / rows
        return height * (count - rows) <= width * rows * (rows + 1) and width * rows * (rows - 1) <= height * (
            count + rows
        )

    guess = max(1, round((count * height / width) ** 0.5))
    grids: list[Grid] = []
    for rows, step in ((guess, 1), (guess - 1, -1)):
        while 0 < rows <= count and fits(rows):
            grids += [(rows, count // rows)] if count % rows == 0 else []
            rows += step
    if not grids:
        raise ValueError(
            f"{count} tokens do not form a grid of the aspect ratio {height}:{width}; choose a mixer without a grid,"
            " such as sima, or an image size that the model's strides divide"
        )
    return min(grids, key=lambda grid: abs(math.log(grid[0] * width / (grid[1] * height))))


def find_window(attention: Any, count: int) -> Grid | None:
    """The window of an attention, if it has `count` tokens."""
    window = getattr(attention, "window_size", None)
    return window if isinstance(window, tuple) and window[0] * window[1] == count else None


class Swapped(nn.Module):
    """Base of all replaced attentions: the host's own module, whose class became a subclass of its class.

    So names of parameters, options and methods of the host stay as they are.

    Attributes:
        mixer: the product, or the mixer with its own projections.
        image_size: the size of the image, for flat tokens.
        prefix: number of prefix tokens.
        argument_names: of the host's forward.
    """

    argument_names: tuple[str, ...]
    host: type[nn.Module]
    adapter: Adapter
    kind: str
    mixer: Any
    image_size: ImageSize
    prefix: int

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        x: Tensor | None = None,
        mask: Tensor | None = None,
        bias: Tensor | None = None,
        scale: float | None = None,
        grid: Grid | None = None,
        cross: bool = False,
    ) -> Tensor:
        """Mix queries, keys and values (B, heads, N, D).

        Args:
            q: queries.
            k: keys.
            v: values.
            x: input of the attention.
            mask: True where a query must not see a key.
            bias: added to the logits of softmax.
            scale: factor of the logits; 1 / sqrt(D) if None.
            grid: grid of the tokens, if the host knows it.
            cross: whether queries are of other tokens than keys.
        """
        tokens, size = None, grid or self.image_size.size
        if x is not None and self.adapter.layout != "other":
            tokens, map_size = to_tokens(x, self.adapter.layout)
            size = map_size or size
            tokens = tokens if tokens.shape[1] == q.shape[2] else None
        if self.adapter.window and self.adapter.layout == "tokens":
            size = self._find_size(q.shape[2], ())
        windows = self.adapter.window
        call = Call(tokens, mask, bias, scale, windows, self.prefix, lambda count: token_grid(count, size), cross)
        return self.mixer(q, k, v, call)

    def attend_like_sdpa(
        self,
        x: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Take the place of F.scaled_dot_product_attention in the host's forward."""
        q, k, v = query, key, value
        if enable_gqa and k.shape[-3] != q.shape[-3]:
            k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], dim=-3) for t in (k, v))
        axis, lead = self.adapter.head_axis, None
        if axis == 0:
            heads = int(getattr(self, "num_heads", 1))
            q, k, v = (t.unflatten(0, (-1, heads)) for t in (q, k, v))
            if attn_mask is not None and attn_mask.ndim == 3:
                attn_mask = attn_mask.unflatten(0, (-1, heads))
        elif q.ndim > 4:
            q, k, v = (t.movedim(axis, -3) for t in (q, k, v))
            lead = q.shape[:-3]
            q, k, v = (t.flatten(0, -4) for t in (q, k, v))
        mask, bias = split_mask(attn_mask, is_causal, q, self.mixer, self.adapter)
        out = self.attend(q, k, v, x, mask, bias, scale)
        if axis == 0:
            return out.flatten(0, 1)
        return out if lead is None else out.unflatten(0, lead).movedim(-3, axis)

    def mix_whole(self, *args: Any, **kwargs: Any) -> Any:
        """The forward of mixers with their own projections: on the patch tokens, then the host's output projection."""
        given = {**dict(zip(self.argument_names, args, strict=False)), **kwargs}
        if given.get("is_causal"):
            raise_causal(type(self.mixer).__name__)
        if not self.adapter.window and any("mask" in key and given[key] is not None for key in given):
            raise ValueError(f"{type(self.mixer).__name__} cannot exclude masked tokens; use to='sima', or no mask")
        x, *args = (*args, *kwargs.values())  # type: ignore[assignment]
        tokens, size = to_tokens(x, self.adapter.layout)
        n = self.prefix
        patches = tokens[:, n:]
        if size is None:
            size = self._find_size(patches.shape[1], args)
        grid = token_grid(patches.shape[1], size)
        out = self.mixer(patches, grid)
        if n:
            # the rule for prefix tokens without queries: they receive the mean of the mixed patch tokens
            mean = out.mean(dim=1, keepdim=True).expand(-1, n, -1)
            if isinstance(self.mixer, Pooling):  # minus the token itself, with all patch tokens as its neighbourhood
                mean = patches.mean(dim=1, keepdim=True) - tokens[:, :n]
            out = torch.cat([mean, out], dim=1)
        projection = getattr(self, "host_projection", None)
        if projection is not None:
            layer = self.get_submodule(projection)
            if isinstance(layer, nn.Conv2d):
                out = channels_first(out.unflatten(1, grid))
                out = channels_last(layer(out)).flatten(1, 2)
            else:
                out = layer(out)
        drop = getattr(self, "proj_drop", None)
        out = out if drop is None else drop(out)
        out = from_tokens(out, x, self.adapter.layout)
        return out if self.adapter.wrap is None else self.adapter.wrap(out, self, *args, **kwargs)

    def _find_size(self, count: int, args: Sequence[Any]) -> Grid | None:
        """What the grid of `count` tokens follows from: the map's size in the call's arguments, window or image."""
        given = args[0] if args and isinstance(args[0], tuple | list | torch.Size) else ()
        if len(given) == 2 and all(isinstance(n, int | torch.SymInt) for n in given):
            return given[0], given[1]
        if not self.adapter.window:
            return self.image_size.size
        return find_window(self, count)

    def set_window_size(self, window_size: Grid) -> None:
        """timm calls this when the image size changes; without position biases only the window changes."""
        if getattr(self.mixer, "keeps_bias", False):
            super().set_window_size(window_size)  # type: ignore[misc]
        else:
            self.window_size = window_size

    def __reduce_ex__(self, protocol: Any) -> Any:
        kind: Any = type(self)  # made at run time, so pickle and copy make it again
        return _restore, (kind.host, kind.adapter, kind.kind), self.__dict__


class ReplaceSoftmax(TorchFunctionMode):
    """While active, F.scaled_dot_product_attention is the product of a swapped attention."""

    def __init__(self, attention: Any, x: Tensor) -> None:
        super().__init__()
        self.attention, self.x, self.calls = attention, x, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            self.calls += 1
            return self.attention.attend_like_sdpa(self.x, *args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@functools.cache
def swapped_class(host: Any, adapter: Adapter, kind: str) -> Any:
    """The subclass of a host's attention for "bias" (biases kept), "plain" (biases dropped) or "whole" mixers."""
    forward: Callable[..., Any]
    if kind == "whole":
        forward = Swapped.mix_whole
    elif adapter.forward is not None:
        forward = adapter.forward
    else:

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            mode = ReplaceSoftmax(self, args[0] if args else next(iter(kwargs.values())))
            with mode:
                out = host.forward(self, *args, **kwargs)
            if not mode.calls:
                raise RuntimeError(
                    f"{host.__name__} did not call F.scaled_dot_product_attention, so its softmax was not replaced;"
                    " enable its fused attention"
                )
            return out

    methods = dict.fromkeys(adapter.bias_methods, _no_bias) if kind == "plain" else {}
    names = tuple(inspect.signature(host.forward).parameters)[1:]
    body = {"host": host, "adapter": adapter, "kind": kind, "forward": forward, "__module__": __name__, **methods}
    body["argument_names"] = names
    made = type(f"Swapped{host.__name__}", (Swapped, host), body)
    return register_notrace_module(made)  # operators look at shapes, so symbolic tracing must not enter


def swap(host: Any, adapter: Adapter, mixer: nn.Module, image_size: ImageSize, prefix: int) -> None:
    """Put a product, or a mixer with its own projections, into a host's attention, in place."""
    whole = not isinstance(mixer, Product)
    kind = "whole" if whole else "bias" if mixer.keeps_bias else "plain"
    dropped = {"plain": adapter.position, "bias": adapter.lost or (), "whole": ()}[kind]
    for name in dropped:
        if name in host._parameters or name in host._modules or name in host._buffers:
            setattr(host, name, None)
    if whole:
        _keep_output(host, adapter, mixer)
    if hasattr(host, "fused_attn"):
        host.fused_attn = True
    mixer.train(host.training)
    host.mixer, host.image_size, host.prefix = mixer, image_size, prefix
    host_class: Any = type(host)
    host.__class__ = swapped_class(host_class, adapter, kind)
    if adapter.prepare is not None:
        adapter.prepare(host)


def _keep_output(host: Any, adapter: Adapter, mixer: Any) -> None:
    """Remove the layers of a host's attention except its output projection, which replaces that of the mixer."""
    own = getattr(mixer, "proj", None)
    theirs = host.get_submodule(adapter.output) if _has(host, adapter.output) else None
    usable = (
        isinstance(own, nn.Linear)
        and isinstance(theirs, nn.Linear | nn.Conv2d)
        and theirs.weight.shape[:2] == own.weight.shape
        and theirs.weight[0, 0].numel() == 1
    )
    kept = {"proj_drop", *([adapter.output.split(".")[0]] if usable else [])}
    for name in [name for name, _ in host.named_children() if name not in kept]:
        delattr(host, name)
    for table in (host._parameters, host._buffers):
        for name in table:
            table[name] = None
    if usable:
        mixer.proj = nn.Identity()
        host.host_projection = adapter.output


def to_tokens(x: Tensor, layout: str) -> tuple[Tensor, Grid | None]:
    """Tokens (B, N, C) of an attention's input, and the size of its map if it is one."""
    if layout == "nchw" and x.ndim == 4:
        return channels_last(x).flatten(1, 2), (x.shape[2], x.shape[3])
    if x.ndim == 4:
        return x.flatten(1, 2), (x.shape[1], x.shape[2])
    return x, None


def from_tokens(out: Tensor, x: Tensor, layout: str) -> Tensor:
    """Tokens (B, N, C) in the layout of x."""
    if layout == "nchw" and x.ndim == 4:
        return channels_first(out.unflatten(1, x.shape[2:]))
    return out.reshape(*x.shape[:-1], out.shape[-1])


def split_mask(
    attn_mask: Tensor | None, is_causal: bool, q: Tensor, product: Product, adapter: Adapter
) -> tuple[Tensor | None, Tensor | None]:
    """A mask of F.scaled_dot_product_attention as a mask that is True at excluded pairs, and a bias."""
    if product.keeps_bias:
        if is_causal:
            return torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool, device=q.device).triu(1), None
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            return ~attn_mask, None
        return None, attn_mask
    if is_causal:
        raise_causal(product.name)
    if attn_mask is None or adapter.position:  # the masks of these hosts are position biases
        return None, None
    if attn_mask.dtype == torch.bool:
        mask = ~attn_mask
    else:
        refuse_bias(attn_mask, product.name)
        mask = attn_mask < 0
    refuse_causal(mask, product.name)
    return mask, None


def _has(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def _no_bias(self: Any, *args: Any, **kwargs: Any) -> None:
    """In place of a host's method that returns position biases."""


def _restore(host: Any, adapter: Adapter, kind: str) -> Any:
    made = swapped_class(host, adapter, kind)
    return made.__new__(made)
