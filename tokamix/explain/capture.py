"""Capture what the token mixers of a model see in one forward pass.

`capture(model, images)` runs the model once with forward hooks on its mixers and removes them again, also after an
error: outside of the call the model has no hooks, costs nothing extra, and compiles as before. All figures are made
from what was captured, so a question about another token, head or layer needs no further pass through the network.
"""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from timm.layers import Attention
from torch import Tensor, nn

from tokamix.layers import SoftmaxProduct
from tokamix.mixers import (
    ActiveTokenMixer,
    SimA,
    SimASelfAttention,
    SoftmaxAttention,
    SuperTokenAttention,
    WeightMixing,
)
from tokamix.swap.attention import Swapped

Pair = tuple[int, int]
NAMES = ("mixer", "attn", "token_mixer", "self_attention", "self_attn")  # of a token mixer in its block
MAX_PREFIX = 8  # class, distillation and register tokens of a host that does not say how many it has


@dataclass(frozen=True)
class Layer:
    """A token mixer's place in a model.

    Attributes:
        index: among all mixers of the model, from 0.
        name: of the module, such as "stages.1.blocks.0.mixer".
        kind: "softmax", "sima", "active_token", "super_token", "weight_mixing", or the class name of any other mixer.
    """

    index: int
    name: str
    kind: str

    @property
    def label(self) -> str:
        """The place in words, counted from 1: "stage 2, block 1"."""
        numbers = [int(number) + 1 for number in re.findall(r"\d+", self.name)]
        names = {1: ("block",), 2: ("stage", "block")}.get(len(numbers))
        return ", ".join(f"{n} {i}" for n, i in zip(names, numbers, strict=True)) if names else self.name


@dataclass
class CapturedLayer:
    """Input of one mixer, and output of its block, for a batch of images.

    Tokens are (B, prefix + H*W, C), whatever layout the mixer itself has.

    Attributes:
        layer: place and kind of the mixer.
        mixer: the module.
        x: the mixer's input tokens.
        tokens: the tokens after the block: mixer, MLP and residual connections.
        grid: (H, W) of the patch tokens.
        prefix: class, distillation and register tokens in front of them.
        image_size: (H, W) of the images in pixels.
        args: the mixer's further arguments by position.
        kwargs: the mixer's further arguments by name.
        call: tokens and further arguments -> mixed tokens.
        to_tokens: the layout of mixer and block -> tokens (B, prefix + H*W, C).
    """

    layer: Layer
    mixer: Any
    x: Tensor
    tokens: Tensor
    grid: Pair
    prefix: int
    image_size: Pair
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    call: Callable[..., Tensor] = field(repr=False)
    to_tokens: Callable[[Tensor], Tensor] = field(repr=False)

    @property
    def stride(self) -> tuple[float, float]:
        """Distance of neighbouring tokens in pixels, down and right."""
        return self.image_size[0] / self.grid[0], self.image_size[1] / self.grid[1]

    def mix(self, x: Tensor, image: int | None = None) -> Tensor:
        """Call the mixer on other tokens (B, prefix + H*W, C) with the captured further arguments.

        Args:
            x: one set of tokens for each captured image; or any number for one of them.
            image: index of that image, whose arguments serve all of x.
        """

        def choose(value: Any) -> Any:
            if image is None or not isinstance(value, Tensor) or value.ndim < 3 or len(value) != len(self.x):
                return value
            return value[image : image + 1].expand(len(x), *value.shape[1:])

        return self.call(x, *map(choose, self.args), **{key: choose(value) for key, value in self.kwargs.items()})

    def token_at(self, y: float, x: float) -> Pair:
        """The token (row, column) at a position of the image, in fractions of its height and width."""
        if not (0 <= y <= 1 and 0 <= x <= 1):
            raise ValueError(f"position ({y:g}, {x:g}) is outside of the image: give fractions from 0 to 1")
        return min(int(y * self.grid[0]), self.grid[0] - 1), min(int(x * self.grid[1]), self.grid[1] - 1)

    def index_of(self, token: Pair | None) -> int:
        """Index of a token (row, column) of the grid among all tokens; None: the middle of the grid."""
        row, column = check_token(token, self.grid)
        return self.prefix + row * self.grid[1] + column

    def to_map(self, values: Tensor) -> Tensor:
        """Values (..., prefix + H*W) of tokens -> those of the patch tokens (..., H, W)."""
        return values[..., self.prefix :].unflatten(-1, self.grid)


@dataclass
class Capture:
    """One forward pass: images, output and every captured layer.

    `capture[-1]`, `capture["stages.1.blocks.0.mixer"]` and iteration give the layers.
    """

    images: Tensor
    output: Any
    layers: list[CapturedLayer]

    def __len__(self) -> int:
        return len(self.layers)

    def __iter__(self) -> Iterator[CapturedLayer]:
        return iter(self.layers)

    def __getitem__(self, layer: int | str) -> CapturedLayer:
        if isinstance(layer, int) and -len(self) <= layer < len(self):
            return self.layers[layer]
        for captured in self.layers:
            if captured.layer.name == layer:
                return captured
        raise ValueError(
            f"there is no layer {layer!r}: the model has {len(self)}, 0 to {len(self) - 1}, from"
            f" {self.layers[0].layer.name} to {self.layers[-1].layer.name}"
        )

    def of_kind(self, *kinds: str) -> list[CapturedLayer]:
        """The layers with mixers of the given kinds."""
        return [captured for captured in self.layers if captured.layer.kind in kinds]


def capture(model: nn.Module, images: Tensor) -> Capture:
    """Run a model once and capture the input of every token mixer.

    It works for the models of this library, bodies, swapped models and timm's ViT, Swin, PiT, PoolFormer and others
    whose blocks name their mixer "attn", "mixer" or "token_mixer". Class attention, which makes one token from many, is
    left out. Compiled models run uncompiled for this one pass. The model runs in evaluation mode, without gradients.

    Args:
        model: the network; it is the same afterwards.
        images: (B, C, H, W), normalised as the model expects.
    """
    if images.ndim != 4:
        raise ValueError(f"capture needs a batch of images (B, C, H, W), got shape {tuple(images.shape)}")
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    sites = _find_mixers(model)
    calls: dict[str, tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = {}
    outputs: dict[str, Tensor] = {}
    with torch.inference_mode(False), torch.no_grad(), ExitStack() as stack:
        images = images.clone()  # tensors of inference mode cannot be used for gradients later
        stack.enter_context(evaluation(model))
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        for name, site in sites.items():
            stack.callback(site.register(calls, name).remove)
            stack.callback(site.block.register_forward_hook(_keep_output(outputs, name)).remove)
        output = model(images)
    size, prefix = (images.shape[2], images.shape[3]), getattr(model, "num_prefix_tokens", 0)
    layers: list[CapturedLayer] = []
    for name, (x, args, kwargs) in calls.items():
        layer = Layer(len(layers), name, _kind(sites[name].mixer))
        layout = _find_layout(x, args, kwargs, size, prefix) if len(x) == len(images) else None
        if layout is not None:
            tokens = outputs[name] if name in outputs and outputs[name].shape[:-1] == x.shape[:-1] else x
            layers.append(
                CapturedLayer(
                    layer=layer,
                    mixer=sites[name].mixer,
                    x=layout.to_tokens(x),
                    tokens=layout.to_tokens(tokens),
                    grid=layout.grid,
                    prefix=layout.prefix,
                    image_size=size,
                    args=args,
                    kwargs=kwargs,
                    call=layout.on_tokens(sites[name].function()),
                    to_tokens=layout.to_tokens,
                )
            )
    if not layers:
        raise ValueError(
            f"{type(model).__name__} has no token mixers that tokamix finds: blocks must have a child named"
            f" {', '.join(NAMES)} that maps tokens to tokens"
        )
    return Capture(images, output, layers)


@contextmanager
def evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode; afterwards every module has its own mode again, also where they differed."""
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, flag in training.items():
            module.training = flag


def check_token(token: Pair | None, grid: Pair) -> Pair:
    """The given token (row, column) if the grid has it; None: the middle of the grid."""
    row, column = token or (grid[0] // 2, grid[1] // 2)
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise ValueError(f"token ({row}, {column}) is outside of the map of {grid[0]}x{grid[1]} tokens")
    return row, column


@dataclass(frozen=True)
class _Site:
    """A mixer and its block."""

    mixer: Any
    block: Any

    @property
    def windowed(self) -> bool:
        """Whether the block itself cuts its map into windows for the mixer, as Swin's does."""
        return type(self.block).__name__ == "SwinTransformerBlock"

    def register(self, calls: dict[str, Any], name: str) -> Any:
        """Hook that keeps the mixer's arguments; in a Swin block the map before it is cut into windows."""
        if self.windowed:

            def keep_norm(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
                calls[name] = (output, (), {})

            return self.block.norm1.register_forward_hook(keep_norm)

        def keep(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            x = args[0] if args else kwargs.get("query")
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(x, Tensor) and isinstance(first, Tensor) and x.shape[:-1] == first.shape[:-1]:
                calls[name] = (x, args[1:], kwargs)

        return self.mixer.register_forward_hook(keep, with_kwargs=True)

    def function(self) -> Callable[..., Tensor]:
        """The mixer as a function of tokens in its own layout and of its further arguments."""
        if self.windowed:
            return self.block._attn
        if isinstance(self.mixer, nn.MultiheadAttention):
            return lambda x, *args, **kwargs: self.mixer(x, x, x, need_weights=False)[0]
        return self.mixer


@dataclass(frozen=True)
class _Layout:
    """How tokens lie in the tensors of a mixer: (B, prefix + H*W, C), or a map (B, H, W, C) or (B, C, H, W)."""

    grid: Pair
    prefix: int = 0
    is_map: bool = False
    channels_first: bool = False

    def to_tokens(self, x: Tensor) -> Tensor:
        if not self.is_map:
            return x
        return x.flatten(2).transpose(1, 2) if self.channels_first else x.flatten(1, 2)

    def from_tokens(self, x: Tensor) -> Tensor:
        if not self.is_map:
            return x
        return x.transpose(1, 2).unflatten(2, self.grid) if self.channels_first else x.unflatten(1, self.grid)

    def on_tokens(self, call: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda x, *args, **kwargs: self.to_tokens(call(self.from_tokens(x), *args, **kwargs))


def _find_mixers(model: nn.Module) -> dict[str, _Site]:
    """Mixers by name; not those inside of other mixers, such as the attention among super tokens."""
    found: dict[str, _Site] = {}
    for name, module in model.named_modules():
        parent, _, last = name.rpartition(".")
        if last in NAMES and not any(name.startswith(f"{other}.") for other in found):
            found[name] = _Site(module, model.get_submodule(parent))
    return found


def _kind(mixer: Any) -> str:
    product = getattr(mixer, "attend", None)  # a module in CvT and PVT
    if isinstance(mixer, Swapped):
        plain = type(mixer).host is Attention and mixer.mixer.name in ("sima", "softmax")
        return mixer.mixer.name if plain else type(mixer).__name__
    if isinstance(product, Swapped):
        return product.mixer.name
    if isinstance(mixer, SimASelfAttention | SimA):
        return "sima"
    kinds = {ActiveTokenMixer: "active_token", SuperTokenAttention: "super_token", WeightMixing: "weight_mixing"}
    for cls, kind in kinds.items():
        if isinstance(mixer, cls):
            return kind
    softmax = isinstance(mixer, SoftmaxAttention | nn.MultiheadAttention) or isinstance(product, SoftmaxProduct)
    return "softmax" if type(mixer) is Attention or softmax else type(mixer).__name__


def _keep_output(outputs: dict[str, Tensor], name: str) -> Callable[..., None]:
    def hook(_: nn.Module, args: Any, output: Any) -> None:
        outputs[name] = output[0] if isinstance(output, tuple) else output  # ATMNet's blocks return offsets, too

    return hook


def _find_layout(x: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any], size: Pair, prefix: int) -> _Layout | None:
    """The layout of a mixer's input, or None if it is no grid of tokens."""
    if x.ndim == 4:
        channels_first = not _fits(x.shape[1:3], size) and _fits(x.shape[2:], size)
        height, width = x.shape[2:] if channels_first else x.shape[1:3]
        return _Layout((height, width), is_map=True, channels_first=channels_first)
    given = next((value for value in (*args, *kwargs.values()) if _is_grid(value)), None)
    found = _find_grid(x.shape[1], given, size, prefix) if x.ndim == 3 else None
    return _Layout(*found) if found else None


def _is_grid(value: Any) -> bool:
    return isinstance(value, tuple | torch.Size) and len(value) == 2 and all(isinstance(n, int) for n in value)


def _find_grid(count: int, given: Pair | None, size: Pair, prefix: int) -> tuple[Pair, int] | None:
    """Grid and number of prefix tokens of `count` tokens: as the mixer was told, or with the image's aspect ratio."""
    if given is not None:
        return (given[0], given[1]), count - given[0] * given[1]
    for extra in dict.fromkeys((prefix, *range(MAX_PREFIX))):
        rows = round(((count - extra) * size[0] / size[1]) ** 0.5) if count > extra else 0
        if rows and (count - extra) % rows == 0 and _fits((rows, (count - extra) // rows), size):
            return (rows, (count - extra) // rows), extra
    return None


def _fits(grid: Any, size: Pair) -> bool:
    """Whether a grid has the aspect ratio of the image, up to incomplete patches at its border."""
    stride = max(size[0] / grid[0], size[1] / grid[1])
    return all(abs(n - s / stride) < 1 for n, s in zip(grid, size, strict=True))
