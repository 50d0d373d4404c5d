"""ReLU in place of activations that evaluate exp, and what evaluates exp without it."""

import re
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tokamix.cost import KIND_OF, trace_image

# classes of PyTorch, timm and transformers: GELUTanh, QuickGELUActivation, SiLU, Swish; but not HardSwish
SMOOTH = re.compile(r"(?<!hard)(gelu|silu|swish)", re.IGNORECASE)


def replace_activations(model: nn.Module) -> list[str]:
    """Replace every GELU and SiLU, module or function, by ReLU and return their names."""
    modules = model.named_modules(remove_duplicate=False)
    names = [name for name, module in modules if name and _is_smooth(module)]
    for name in names:
        model.set_submodule(name, nn.ReLU())
    for name, module in model.named_modules():
        if getattr(module, "activation", None) in (F.gelu, F.silu):  # nn.TransformerEncoderLayer and its decoder
            module.activation = F.relu
            names.append(f"{name}.activation".lstrip("."))
        if hasattr(module, "activation_relu_or_gelu"):  # what PyTorch's fast path reads instead
            module.activation_relu_or_gelu = 1
    return names


def _is_smooth(module: nn.Module) -> bool:
    plain = not any(True for _ in module.parameters()) and not any(True for _ in module.children())
    return plain and SMOOTH.search(type(module).__name__) is not None


def remaining_exp(model: nn.Module, size: tuple[int, int]) -> list[str]:
    """A note on modules that still evaluate exp, such as gates; softmax of attention is reported elsewhere.

    They are found by running the model on the meta device. If it takes no image, gates are found by their names.
    """
    counter = _FindExp(model)
    try:
        trace_image(model, size, lambda: counter)
        found = counter.found
    except Exception:  # whatever it is, the model did not run on an image
        found = {
            name: "sigmoid"
            for name, module in model.named_modules()
            if type(module).__name__ == "Sigmoid" or isinstance(getattr(module, "gate", None), nn.Linear)
        }
    finally:
        counter.remove()
    if not found:
        return []
    name, kind = next(iter(found.items()))
    return [f"exp remains in {len(found)} modules, such as {name or type(model).__name__} ({kind})"]


class _FindExp(TorchDispatchMode):
    """Notes the innermost module that evaluates each exp outside of softmax."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.found: dict[str, str] = {}
        self.stack = [""]
        self.handles: list[Any] = []
        for name, module in model.named_modules():
            if name:
                self.handles.append(module.register_forward_pre_hook(lambda *_, name=name: self.stack.append(name)))
                self.handles.append(module.register_forward_hook(lambda *_: self._leave(), always_call=True))

    def _leave(self) -> None:
        self.stack.pop()

    def remove(self) -> None:
        """Remove the hooks."""
        for handle in self.handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = KIND_OF.get(func.overloadpacket.__name__.removesuffix("_"))
        if kind not in (None, "softmax"):
            self.found.setdefault(self.stack[-1], str(kind))
        return func(*args, **(kwargs or {}))
