"""`pick`: the most accurate model that keeps a time budget on this machine, in the runtime that does it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from timm.models import is_model

from tokamix.bench.runtimes import RuntimeRow, check_runtimes, installed_runtimes, measure_runtimes
from tokamix.models._registry import imagenet_top1, list_models
from tokamix.recipes.load import list_recipes, recipe_rows

Task = Literal["classify", "segment", "detect"]
# key of the accuracy in dense recipes, its name and the data
METRICS = {"segment": ("miou", "mIoU", "ADE20K"), "detect": ("box_ap", "box AP", "COCO")}
LARGEST_SPEEDUP = 6.0  # no runtime is known to be that much faster than eager, so slower models need no export
# ImageNet top-1 of peers, as timm's table of results prints it (results-imagenet.csv)
PEERS = {
    "convnext_tiny.fb_in1k": 82.1,
    "swin_tiny_patch4_window7_224.ms_in1k": 81.4,
    "deit_small_patch16_224.fb_in1k": 79.9,
}


@dataclass
class Candidate:
    """A model, and the accuracy it is chosen for."""

    name: str
    accuracy: float  # in percent
    source: str  # of the accuracy
    metric: str = "top-1"


@dataclass
class PickResult:
    """What `pick` measured and recommends."""

    budget_ms: float
    best: RuntimeRow | None  # None: nothing keeps the budget
    candidate: Candidate | None
    rows: list[RuntimeRow] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)  # models that are too slow in eager mode to be exported
    accuracy: dict[str, Candidate] = field(default_factory=dict)
    runtimes: list[str] = field(default_factory=list)  # that were asked for

    def summary(self) -> str:
        """The recommendation in one sentence."""
        if self.best is None or self.candidate is None:
            if not self.rows:
                return "nothing could be measured"
            asked = [row for row in self.rows if row.runtime in self.runtimes]
            if not asked:
                return self._describe_nothing()
            fastest = min(asked, key=lambda row: row.milliseconds)
            return (
                f"nothing keeps {self.budget_ms:g} ms: the fastest is {fastest.model} in {fastest.runtime} with"
                f" {fastest.milliseconds:.1f} ms; allow more time, smaller images, or name other models with --models"
            )
        note = ""
        if self.best.runtime.endswith("int8"):
            note = "; what int8 costs of it is not known: measure it with `tokamix export --precision int8 --data DATA`"
        return (
            f"{self.best.model} in {self.best.runtime}: {self.best.milliseconds:.1f} ms of {self.budget_ms:g},"
            f" {self.candidate.metric} {self.candidate.accuracy} % ({self.candidate.source}){note}"
        )

    def _describe_nothing(self) -> str:
        """Why no model was measured in the runtimes that were asked for; eager mode is measured in any case."""
        names = ", ".join(self.runtimes)
        if any(row.model not in self.skipped for row in self.rows):
            return (
                f"nothing could be measured in {names}: see the failures above, or name other runtimes with --runtime"
            )
        least = min(row.milliseconds for row in self.rows)
        return (
            f"nothing is likely to keep {self.budget_ms:g} ms in {names}, so nothing was exported: without it, every"
            f" model takes more than {LARGEST_SPEEDUP:g} times as long, {least:.1f} ms or more; allow more time,"
            " smaller images, or name other models with --models"
        )


def list_candidates(names: Sequence[str] = (), task: Task = "classify") -> list[Candidate]:
    """Models with a known accuracy (on ImageNet, ADE20K or COCO), the most accurate first.

    Args:
        names: of models; default: ours with an accuracy printed in their paper, and three of timm's. Segmenters and
            detectors are RECIPE:BACKBONE.
        task: of the models.
    """
    candidates = _list_classifiers(names) if task == "classify" else _list_dense(names, task)
    return sorted(candidates, key=lambda candidate: -candidate.accuracy)


def _list_dense(names: Sequence[str], task: Task) -> list[Candidate]:
    key, metric, data = METRICS[task]
    found = {}
    for recipe in [row for name in list_recipes() for row in recipe_rows(name) if row.task == task and row.model]:
        value = getattr(recipe, "printed", {}).get(key)
        if value is not None:
            name = f"{recipe.name}:{recipe.model}"
            found[name] = Candidate(name, float(value), f"{data}, the paper; no weights of ours", metric)
    if unknown := [name for name in names if name not in found]:
        raise ValueError(f"the {metric} of {unknown[0]!r} is not known; choose from {', '.join(found)}")
    return [found[name] for name in names or found]


def _list_classifiers(names: Sequence[str]) -> list[Candidate]:
    candidates = []
    for name in names or [*list_models(), *PEERS]:
        architecture = name.split(".")[0]
        if not is_model(architecture):
            raise ValueError(f"there is no model {name!r}; `tokamix models` lists ours, timm.list_models() the others")
        top1 = imagenet_top1(name)
        if name in PEERS:
            candidates.append(Candidate(architecture, PEERS[name], "timm's results"))
        elif top1 is not None:
            candidates.append(Candidate(name, top1, "the paper; no weights of ours"))
        elif names:
            tagged = [peer for peer in PEERS if peer.startswith(f"{architecture}.")]
            cure = f"; did you mean {tagged[0]}?" if tagged else ", so it cannot be chosen by it"
            raise ValueError(f"the ImageNet accuracy of {name} is not known{cure}")
    return candidates


def pick(
    budget_ms: float,
    size: int = 224,
    device: str = "cpu",
    models: Sequence[str] = (),
    runtimes: Sequence[str] = (),
    seconds: float = 3.0,
    log: Callable[[str], None] = print,
    task: Task = "classify",
) -> PickResult:
    """Measure models here, the most accurate first, until one keeps the budget in some runtime.

    Of the runtimes that keep it, the fastest without int8 is recommended, whose accuracy is known.

    Args:
        budget_ms: milliseconds for one image.
        size: side of the images.
        device: "cpu" or "cuda".
        models: candidates; default: see `list_candidates`.
        runtimes: of the recommendation; default: all that are installed. Eager mode is measured in any case.
        seconds: time of each measurement.
        log: called with a line for each preparation.
        task: of the models. int8 is tried for classifiers only.
    """
    if not budget_ms > 0:  # NaN neither
        raise ValueError(f"the budget is {budget_ms} ms, but must be positive")
    check_runtimes(runtimes, device)
    candidates = list_candidates(models, task)
    result = PickResult(budget_ms, None, None, accuracy={c.name: c for c in candidates})
    names = list(runtimes) or [
        name for name in installed_runtimes(device) if task == "classify" or not name.endswith("int8")
    ]
    result.runtimes = names
    others = [name for name in names if name != "eager"]
    for candidate in candidates:
        eager = list(measure_runtimes([candidate.name], [size], [1], ["eager"], device, 0.0, log))
        if not eager or (eager[0].milliseconds > LARGEST_SPEEDUP * budget_ms and device == "cpu"):
            if eager:
                result.rows += eager
                result.skipped.append(candidate.name)
            continue
        rows = list(measure_runtimes([candidate.name], [size], [1], ["eager", *others], device, seconds, log))
        result.rows += rows
        fitting = [row for row in rows if row.milliseconds <= budget_ms and row.runtime in names]
        if fitting:
            # int8 only if nothing else fits: the accuracy is not that of int8
            result.best = min(fitting, key=lambda row: (row.runtime.endswith("int8"), row.milliseconds))
            result.candidate = candidate
            return result
    return result
