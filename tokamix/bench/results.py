"""Results of models in one form: accuracy, speed, memory and counts, from the package, CSV files and measurements."""

import csv
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tokamix.bench.runtimes import RuntimeRow
from tokamix.models._registry import imagenet_top1, known_sizes, list_models
from tokamix.models.shipped import shipped_weights

MAX_ROWS = 1000  # of one file
# quantity -> columns that hold it in the files of `tokamix bench`, `tokamix study` and benchmarks/, with a factor
COLUMNS: dict[str, tuple[tuple[str, float], ...]] = {
    "accuracy": (("top1", 1), ("accuracy", 1), ("score", 1)),
    "images_per_second": (("images_per_second", 1),),
    "milliseconds": (("milliseconds", 1),),
    "memory_gb": (("peak_gb", 1), ("memory_gb", 1)),
    "exps": (("exps", 1e-6),),
    "macs": (("macs", 1e-9),),
    "parameters": (("parameters", 1e-6),),
}
# columns that tell apart two rows of one model
SETTINGS = (
    "mode",
    "runtime",
    "device",
    "data",
    "arm",
    "seed",
    "size",
    "batch",
    "dtype",
    "compiled",
    "test",
    "kind",
    "level",
)


@dataclass(frozen=True)
class ModelResult:
    """What is known about one model in one setting; NaN where it is not.

    Attributes:
        model: its name.
        setting: data, size, precision and the like, in words.
        source: where the numbers come from.
        accuracy: in percent.
        images_per_second: throughput.
        milliseconds: of one batch.
        memory_gb: peak memory.
        exps: evaluations of exp for one image, in millions.
        macs: multiplications and additions for one image, in billions.
        parameters: in millions.
    """

    model: str
    setting: str
    source: str
    accuracy: float = math.nan
    images_per_second: float = math.nan
    milliseconds: float = math.nan
    memory_gb: float = math.nan
    exps: float = math.nan
    macs: float = math.nan
    parameters: float = math.nan

    def as_dict(self) -> dict[str, Any]:
        """The result as a dict, for a table."""
        return asdict(self)


def shipped_results() -> list[ModelResult]:
    """The networks that come with the package: recorded accuracies and counts."""
    return [
        ModelResult(
            name,
            f"{row['data']['image_size']} px",
            f"shipped, {row['data']['name']}",
            accuracy=row["top1"],
            exps=row["exps"] / 1e6,
            macs=row["macs"] / 1e9,
            parameters=row["parameters"] / 1e6,
        )
        for name, row in shipped_weights().items()
    ]


def paper_results() -> list[ModelResult]:
    """Our models with the ImageNet accuracy that their paper prints; no weights of ours have it."""
    results = []
    for name in list_models():
        top1 = imagenet_top1(name)
        if top1 is not None and name in known_sizes():
            parameters, macs = known_sizes()[name]
            setting = "ImageNet, 384 px" if "384" in name else "ImageNet, 224 px"
            numbers = {"accuracy": top1, "parameters": parameters / 1e6, "macs": macs / 1e9}
            results.append(ModelResult(name, setting, "papers", **numbers))
    return results


def read_results(path: Path) -> list[ModelResult]:
    """Rows of a CSV file with a column `model` and one of ours; [] for a file of another kind."""
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            if "model" not in (reader.fieldnames or ()):
                return []
            rows = [row for row, _ in zip(reader, range(MAX_ROWS), strict=False)]
    except (OSError, UnicodeDecodeError, csv.Error):
        return []
    results = [_from_row(row, path.name) for row in rows]
    return [result for result in results if not all(map(math.isnan, _numbers(result)))]


def measured_result(row: RuntimeRow) -> ModelResult:
    """A measurement of `measure_runtimes` as a result; the recorded accuracy of shipped weights at their own size."""
    weights = shipped_weights().get(row.model)
    known = {"top1": weights["top1"]} if weights and weights["data"]["image_size"] == row.size else {}
    return _from_row(row.as_dict() | known, "measured here")


def _from_row(row: Mapping[str, Any], source: str) -> ModelResult:
    words = {"size": "{} px", "batch": "batch {}", "seed": "seed {}"}
    parts = [words.get(key, "{}").format(row[key]) for key in SETTINGS if row.get(key) not in (None, "")]
    if "train_images" in row:  # of `tokamix study`, which measures the speed of training
        parts.insert(0, "training")
    numbers = {name: _number(row, columns) for name, columns in COLUMNS.items()}
    return ModelResult(str(row["model"]), ", ".join(parts), source, **numbers)


def _number(row: Mapping[str, Any], columns: tuple[tuple[str, float], ...]) -> float:
    """The first of some columns that holds a number, times its factor."""
    for column, factor in columns:
        try:
            return float(row[column]) * factor
        except (KeyError, TypeError, ValueError):
            continue
    return math.nan


def _numbers(result: ModelResult) -> list[float]:
    return [getattr(result, name) for name in COLUMNS]
