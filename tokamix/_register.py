"""Registers the models with timm once both packages are imported, in either order, without importing timm early."""

import importlib
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


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
                importlib.import_module("tokamix.models")

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def register_with_timm() -> None:
    """Register the models now if timm is imported, otherwise when it is."""
    if "timm" in sys.modules:
        importlib.import_module("tokamix.models")
    elif not any(isinstance(finder, _TimmFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TimmFinder())
