"""Public names that are imported on first use (PEP 562), so that `import tokamix` loads neither torch nor timm."""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

from tokamix._register import register_models


class _Package(ModuleType):
    """A package whose public functions win over subpackages of the same name.

    The import system binds each imported submodule to its parent, so `import tokamix.train.run` would otherwise replace
    the function `tokamix.train` by the package. `from tokamix.train import ...` works either way.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        is_submodule = isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name, value) if is_submodule and name in self.__all__ else value)
        if is_submodule:
            register_models()


def attach(package: str, modules: Mapping[str, Sequence[str]]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Create `__getattr__` and `__dir__` of a package.

    Args:
        package: the package's name.
        modules: the public names that each submodule holds; other names are looked up as submodules.
    """
    module = sys.modules[package]
    module.__class__ = _Package
    sources = {name: f"{package}.{source}" for source, names in modules.items() for name in names}

    def get(name: str) -> Any:
        if name in sources:
            value = getattr(importlib.import_module(sources[name]), name)
        elif name.startswith("__") or importlib.util.find_spec(f"{package}.{name}") is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        else:
            value = importlib.import_module(f"{package}.{name}")
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *sources})
