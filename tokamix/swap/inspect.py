"""Find the attentions of a model: what `swap_mixer` can replace, what it keeps, and the shapes of their tokens."""

import ast
import functools
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from timm.layers import to_2tuple
from torch import Tensor, nn

from tokamix.cost import first_float, image_channels, plain_inference, run_on_meta
from tokamix.swap import hf, torchvision
from tokamix.swap import timm as timm_host
from tokamix.swap import tokamix as tokamix_host
from tokamix.swap import torch as torch_host
from tokamix.swap._host import Adapter
from tokamix.swap.attention import ImageSize, Swapped, swap
from tokamix.swap.product import Call, SoftmaxProduct

HOSTS = (timm_host, torch_host, torchvision, hf, tokamix_host)
ADAPTERS: dict[str, Adapter] = {name: adapter for host in HOSTS for name, adapter in host.ADAPTERS.items()}
KEPT = timm_host.KEPT
SDPA = "scaled_dot_product_attention"
# in the source of an attention, in lower case
SOFTMAX = (
    *("softmax", SDPA, "all_attention_functions", "multi_head_attention_forward"),
    *("memory_efficient_attention", "flex_attention", "flash_attn"),
)
NO_ATTENTION = ("torch.", "timm.layers.classifier", "tokamix.")  # their softmax classes are in the table, or the mixers


@dataclass(frozen=True)
class Shapes:
    """Shapes at one attention in a forward pass: queries, keys, values; input and output, if they are tensors.

    `bias` is what the host adds to the logits of softmax; `inputs` is the number of different tensors among the first
    three arguments of the call: 1 in self-attention.
    """

    q: torch.Size
    k: torch.Size
    v: torch.Size
    input: torch.Size | None
    output: torch.Size | None
    bias: Tensor | None = None
    inputs: int = 1


def find_attentions(model: nn.Module) -> tuple[dict[str, tuple[Any, Adapter]], dict[str, str], dict[str, str]]:
    """The attentions of a model.

    Returns:
        Names with module and adapter of those that can be replaced; names and reasons of modules that compute a softmax
        but are no attention among tokens; names and reasons of attentions without adapter.
    """
    found: dict[str, tuple[Any, Adapter]] = {}
    kept, unknown = {}, {}
    for name, module in model.named_modules():
        if isinstance(module, Swapped):
            continue
        kind: Any = type(module)
        path = class_path(kind)
        adapter = find_adapter(kind)
        if adapter is not None and adapter.keep is not None and (reason := adapter.keep(name)):
            kept[name] = reason
        elif adapter is not None:
            window = adapter.window if adapter.windowed is None else adapter.windowed(name, model)
            found[name] = (module, replace(adapter, window=window))
        elif path in KEPT:
            kept[name] = KEPT[path]
        elif not path.startswith("tokamix.") and (base := known_base(kind)) is not None:
            unknown[name] = f"{kind.__name__} extends {base.__name__} by a forward without F.{SDPA}"
        elif computes_softmax(kind):
            unknown[name] = f"{kind.__name__} computes a softmax and has no adapter"
    return found, kept, unknown


@functools.cache
def find_adapter(kind: Any) -> Adapter | None:
    """The adapter of a class of attention, or of the class that it extends."""
    base = known_base(kind)
    if base is None:
        return None
    adapter = ADAPTERS[class_path(base)]
    if kind.forward is base.forward:
        return adapter
    # a subclass with its own forward: its product is replaced if it calls PyTorch's, itself or by super().forward
    own = " ".join(_source(parent) for parent in kind.__mro__[: kind.__mro__.index(base)])
    calls = SDPA in own or (re.search(r"super\([^)]*\)\.forward\(", own) and SDPA in _source(base))
    return replace(adapter, forward=None, convert=None) if calls else None


def known_base(kind: Any) -> Any:
    """The class of the table that a class is or extends; None if there is none."""
    return next((base for base in kind.__mro__ if class_path(base) in ADAPTERS), None)


@functools.cache
def computes_softmax(kind: Any) -> bool:
    """Whether the source of a class, or of a function that it calls, mentions a softmax or PyTorch's attention."""
    if class_path(kind).startswith(NO_ATTENTION):
        return False
    source = (_source(kind) + _called_functions(kind)).lower()
    return any(word in source for word in SOFTMAX)


def class_path(kind: type) -> str:
    """Module and name of a class."""
    return f"{kind.__module__}.{kind.__qualname__}"


def record_shapes(
    model: nn.Module, hosts: dict[str, tuple[Any, Adapter]], size: tuple[int, int], compute: bool = False
) -> tuple[dict[str, Shapes], str]:
    """The shapes at each attention for one image of a size; {} and the reason if the model does not run on it.

    Nothing is computed, unless the values of the biases are needed (`compute`) or the model needs its own device.
    """
    reason = ""
    for values in dict.fromkeys((compute, True)):
        recorded: dict[str, Shapes] = {}
        handles = []
        with unchanged(host for host, _ in hosts.values()):
            for name, (host, adapter) in hosts.items():
                recorder = _Recorder()
                swap(host, replace(adapter, convert=None), recorder, ImageSize(), 0)
                hook = functools.partial(_record, recorded, recorder, name)
                handles.append(host.register_forward_hook(hook, with_kwargs=True))
            try:
                with plain_inference(model):
                    _forward(model, size, values)
                return recorded, ""
            except Exception as error:  # whatever it is, the shapes are not known
                reason = reason or f"{type(error).__name__}: {error}"
            finally:
                for handle in handles:
                    handle.remove()
    return {}, reason


def nominal_size(model: nn.Module) -> tuple[int, int]:
    """The image size of a model: that of its patch embedding, or of its pretrained_cfg, or 224."""
    embed = getattr(model, "patch_embed", None)
    if (size := getattr(embed, "img_size", None)) is not None:
        return to_2tuple(size)
    for owner in (model, getattr(model, "config", None)):  # torchvision, Hugging Face
        if isinstance(size := getattr(owner, "image_size", None), int | tuple | list):
            return to_2tuple(size)
    cfg = getattr(model, "pretrained_cfg", None) or {}
    return to_2tuple(cfg.get("input_size", (3, 224, 224))[-2:])


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Restore modules when the block ends: their classes, attributes, children and hooks; tensors keep their values."""
    restore = _snapshot(modules)
    try:
        yield
    finally:
        restore()


@contextmanager
def unchanged_on_error(model: nn.Module, original: nn.Module | None = None) -> Iterator[None]:
    """Restore a model if the block fails; with a copy of the original also the values of its tensors."""
    restore = _snapshot(model.modules())
    try:
        yield
    except BaseException:
        restore()
        if original is not None:
            model.load_state_dict(original.state_dict())
        raise


def _snapshot(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """A function that brings modules back to their present state."""
    saved = [
        (module, type(module), dict(vars(module)), [(v, dict(v)) for v in vars(module).values() if isinstance(v, dict)])
        for module in modules
    ]

    def restore() -> None:
        for module, kind, attributes, tables in saved:
            module.__class__ = kind
            vars(module).clear()
            vars(module).update(attributes)
            for table, content in tables:
                table.clear()
                table.update(content)

    return restore


class _Recorder(SoftmaxProduct):
    """The host's own product, which remembers the shapes of its first call."""

    shapes: tuple[torch.Size, torch.Size, torch.Size] | None = None
    bias: Tensor | None = None

    def forward(self, q: Tensor, k: Tensor, v: Tensor, call: Call) -> Tensor:
        if self.shapes is None:
            self.shapes, self.bias = (q.shape, k.shape, v.shape), call.bias
        return super().forward(q, k, v, call)


def _record(
    recorded: dict[str, Shapes], recorder: Any, name: str, _: Any, args: tuple[Any, ...], kwargs: Any, output: Any
) -> None:
    if recorder.shapes is not None:
        first, *_ = given = (*args, *kwargs.values())
        output = output[0] if isinstance(output, tuple) else output
        x, out = (t.shape if isinstance(t, Tensor) else None for t in (first, output))
        q, k, v = recorder.shapes
        inputs = len({id(argument) for argument in given[:3]})
        recorded[name] = Shapes(q, k, v, x, out, recorder.bias, inputs)


def _forward(model: nn.Module, size: tuple[int, int], compute: bool) -> None:
    own = first_float(model)
    image = torch.zeros(1, image_channels(model), *size, dtype=own.dtype, device=own.device)
    if compute:
        model(image)
    else:
        run_on_meta(model, image)


@functools.cache
def _source(kind: Any) -> str:
    """The source of a class or function without comments and docstrings, whose examples may name functions too."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    except (OSError, TypeError, SyntaxError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node, clean=False) is not None:
            node.body[0] = ast.Pass()
    return ast.unparse(tree)


def _called_functions(kind: Any) -> str:
    """The source of the functions that a class calls by their name in its module."""
    space = vars(sys.modules.get(kind.__module__, object))
    calls = (node.func for node in ast.walk(ast.parse(_source(kind))) if isinstance(node, ast.Call))
    names = sorted({call.id for call in calls if isinstance(call, ast.Name)})
    return " ".join(_source(space[name]) for name in names if inspect.isfunction(space.get(name)))
