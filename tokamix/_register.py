"""Registers the models with timm once both packages are imported, in either order, without importing timm early."""

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# `tokamix.models` imports these, and they import timm: if one of them is imported first, registration waits for its end
_BELOW_MODELS = ("tokamix.layers", "tokamix.mixers", "tokamix.swap", "tokamix.cost")
_complete: set[str] = set()


class _TimmFinder(MetaPathFinder):
    """Imports `tokamix.models` as soon as timm has been imported; acts once."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "timm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                _import_models()

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def register_with_timm() -> None:
    """Register the models now if timm is imported, otherwise when it is."""
    if "timm" in sys.modules:
        _import_models()
    elif not any(isinstance(finder, _TimmFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TimmFinder())


def finish_import(name: str) -> None:
    """Called at the end of a module of `_BELOW_MODELS`; registers the models if its import had delayed that."""
    _complete.add(name)
    if "timm" in sys.modules:
        _import_models()


def _import_models() -> None:
    if all(name in _complete for name in _BELOW_MODELS if name in sys.modules):
        importlib.import_module("tokamix.models")
