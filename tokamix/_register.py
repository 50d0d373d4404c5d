"""Registers the models with timm once both packages are imported, in either order, without importing timm early."""

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _TimmFinder(MetaPathFinder):
    """Registers the models as soon as timm has been imported; acts once."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "timm":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec and spec.loader:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                register_models()

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def register_models() -> None:
    """Import `tokamix.models` if timm is imported and no submodule of ours is half imported.

    The models may need that submodule; `_lazy` calls this again when its import is complete.
    """
    complete = vars(sys.modules["tokamix"])
    if "timm" in sys.modules and all(n.split(".")[1] in complete for n in sys.modules if n.startswith("tokamix.")):
        importlib.import_module("tokamix.models")


def register_with_timm() -> None:
    """Register the models now if timm is imported, otherwise when it is."""
    register_models()
    if "timm" not in sys.modules and not any(isinstance(finder, _TimmFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TimmFinder())
