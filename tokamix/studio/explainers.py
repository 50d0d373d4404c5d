"""Models that the page may name, and the few explainers and explanations that are kept."""

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import timm
from timm.models import split_model_name_tag

from tokamix.explain import Explainer, Explanation, load_explainer
from tokamix.models.shipped import shipped_weights
from tokamix.studio.folders import list_runs
from tokamix.studio.photos import PhotoStore
from tokamix.studio.settings import StudioSettings

MAX_MODELS, MAX_EXPLANATIONS = 6, 12  # that are kept


def list_sources(settings: StudioSettings) -> list[tuple[str, str]]:
    """Labels and names of models to choose from: shipped weights, and classifiers below the folders."""
    return [*((name, name) for name in shipped_weights()), *list_runs(settings, ("classify",))]


def check_source(name: str, settings: StudioSettings) -> str:
    """A model that the page may load: a name of tokamix or timm, or a run below the folders."""
    is_name = re.fullmatch(r"[\w.\-]+", name) is not None and timm.is_model(split_model_name_tag(name)[0])
    if is_name and not Path(name).exists():
        return name
    try:
        return str(settings.resolve(name))
    except ValueError as error:
        raise ValueError(f"tokamix and timm have no model of that name, and {error}") from None


class Explainers:
    """Explanations of photos by models. Each is computed once, and the latest are kept.

    One request computes at a time: capturing puts hooks on a model that all share.
    """

    def __init__(self, settings: StudioSettings, photos: PhotoStore) -> None:
        self.settings, self.photos = settings, photos
        self.lock = threading.RLock()
        self._explainers: OrderedDict[Any, Explainer] = OrderedDict()
        self._explanations: OrderedDict[Any, Explanation] = OrderedDict()

    def explain(self, photo: str, model: str) -> Explanation:
        """The explanation of a photo (its key) by a model (its name)."""
        source = check_source(model, self.settings)
        weights = Path(source) / "model.safetensors"  # a run's, which may train on
        version = (source, weights.stat().st_mtime if weights.is_file() else 0)
        with self.lock:
            image = self.photos[photo]
            return _keep(self._explanations, (photo, version), MAX_EXPLANATIONS, lambda: self._load(version)(image))

    def _load(self, version: tuple[str, float]) -> Explainer:
        load = lambda: load_explainer(version[0], device=self.settings.device)  # noqa: E731
        return _keep(self._explainers, version, MAX_MODELS, load)


def _keep(kept: OrderedDict[Any, Any], key: Any, limit: int, create: Callable[[], Any]) -> Any:
    """A kept value, or a new one in place of the least recently used."""
    value = kept.pop(key) if key in kept else create()
    kept[key] = value
    while len(kept) > limit:
        kept.popitem(last=False)
    return value
