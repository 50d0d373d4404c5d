"""`evaluate_robustness`: classifiers side by side under occlusion, attacks and corruptions."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tokamix.data import DatasetSplits, ImageStream, create_dataset
from tokamix.data.images.datasets import ImageDataset, SubsetDataset
from tokamix.data.images.loader import create_eval_loader
from tokamix.data.rng import generator
from tokamix.distributed import rank_and_world_size
from tokamix.evaluate.classes import SelectClasses, match_classes
from tokamix.evaluate.report import write_report
from tokamix.evaluate.robustness.calibration import measure_calibration
from tokamix.evaluate.robustness.conditions import (
    CLEAN,
    EPSILONS,
    TESTS,
    Condition,
    PixelModel,
    apply_conditions,
    list_conditions,
)
from tokamix.evaluate.robustness.imagenet import TestSet, open_imagenet
from tokamix.evaluate.robustness.report import draw_robustness, write_csv
from tokamix.evaluate.robustness.result import ModelRobustness, RobustnessResult
from tokamix.files import write_atomically
from tokamix.inference import InferenceConfig, autocast, choose_device, evaluation_mode, load_model
from tokamix.recipes import load_overrides

Source = str | Path | nn.Module


def evaluate_robustness(
    sources: Source | Sequence[Source] | Mapping[str, Source],
    data: str | Path | DatasetSplits,
    *,
    tests: Sequence[str] = TESTS,
    epsilons: Sequence[float] = EPSILONS,
    imagenet: Mapping[str, str | Path] | None = None,
    split: Literal["val", "train"] = "val",
    limit: int | None = None,
    model: str | None = None,
    image_size: int | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    precision: Literal["fp32", "bf16"] = "fp32",
    batch_size: int = 128,
    device: str | None = None,
    workers: int = 0,
    report: str | Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> RobustnessResult:
    """Measure classifiers side by side: occlusion, attacks, corruptions, calibration, and ImageNet's further test sets.

    Args:
        sources: one or several models, each as for `tokamix.evaluate`; a mapping gives them titles.
        data: a data set for classification, as for `tokamix.create_dataset`.
        tests: some of "occlusion", "patch_drop", "fgsm", "pgd", "corruptions" and "calibration".
        epsilons: strengths of the attacks, in units of 1/255 of the pixels' range.
        imagenet: folders of ImageNet's test sets by "a", "r", "sketch", "v2" and "real", for models with its classes.
        split: the part of the data to evaluate on.
        limit: number of images, drawn at random but always the same; default: all.
        model: name of the architecture, for checkpoint files.
        image_size: in pixels; default: each model's own.
        overrides: options of `InferenceConfig` to change, such as "crop_pct=0.875".
        precision: of forward and backward passes; fp16 would lose small gradients.
        batch_size: images of one pass.
        device: "cpu" or "cuda"; default: a GPU if there is one.
        workers: processes that decode images.
        report: folder for results.csv, robustness.png, and the confusion matrix, class accuracies and mistakes of each
            model.
        progress: called with a line about each finished model.
    """
    conditions = list_conditions(tests, epsilons)
    if precision not in ("fp32", "bf16"):
        raise ValueError(f"precision is {precision!r}, but the robustness suite needs fp32 or bf16")
    if batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but must be at least 1")
    if rank_and_world_size()[1] > 1:
        raise ValueError("the robustness suite runs in one process; start it without torchrun")
    where = choose_device(device)
    options = load_overrides(overrides) | ({} if image_size is None else {"image_size": image_size})
    splits = data if isinstance(data, DatasetSplits) else create_dataset(str(data))
    part = _select_images(splits, split, limit)
    result = RobustnessResult([], splits.name, len(part), len(getattr(splits, split)), split)
    for title, source in _titles(sources).items():
        network, config = _load(source, model, splits)
        config = config.replace(**options)
        network.to(where)
        sets = [one for kind, folder in (imagenet or {}).items() for one in open_imagenet(kind, folder, config)]
        index, note = match_classes(config, splits.classes, splits.name)
        matched = (network if index is None else SelectClasses(network, index)).to(where)
        matched_config = config.replace(class_names=tuple(splits.classes))
        row = ModelRobustness(title, notes=[note] if note else [])
        loading: dict[str, Any] = {"batch_size": batch_size, "device": where, "workers": workers}
        with autocast(where, precision), evaluation_mode(network):
            confidence = _measure(row, PixelModel(matched, config).to(where), part, config, conditions, loading)
            for one in sets:
                _measure_set(row, PixelModel(network, config).to(where), one, config, loading)
            if "calibration" in tests:
                row.calibration = measure_calibration(confidence, row.scores[CLEAN])
            if report is not None:
                write_report(Path(report) / _slug(title), matched, part, matched_config, batch_size=batch_size)
        result.models.append(row)
        if report is not None:  # after each model, so that nothing is lost if a later one fails
            write_csv(result, Path(report))
        if progress is not None:
            progress(f"{title}: {row.accuracy():.2f} % on {len(part):,} images, {len(row.scores)} conditions")
    if report is not None and find_spec("matplotlib"):
        write_atomically(Path(report) / "robustness.png", lambda path: draw_robustness(result, path))
    return result


def _measure(
    row: ModelRobustness,
    model: PixelModel,
    data: ImageDataset | ImageStream,
    config: InferenceConfig,
    conditions: Sequence[Condition],
    loading: Mapping[str, Any],
) -> Tensor:
    """Classify the images under all conditions; returns the confidence in the classes of the unchanged images."""
    scores: dict[Condition, list[Tensor]] = {condition: [] for condition in conditions}
    confidence = []
    for images, labels, indices in _pixel_batches(data, config, loading):
        for condition, changed in apply_conditions(model, images, labels, conditions, indices):
            with torch.no_grad():
                probability, predicted = model(changed).float().softmax(1).max(1)
            scores[condition].append((predicted == labels).cpu())
            if condition == CLEAN:
                confidence.append(probability.cpu())
    row.scores |= {condition: torch.cat(parts) for condition, parts in scores.items()}
    return torch.cat(confidence)


@torch.no_grad()
def _measure_set(
    row: ModelRobustness, model: PixelModel, test: TestSet, config: InferenceConfig, loading: Mapping[str, Any]
) -> None:
    """Classify the images of one of ImageNet's test sets."""
    correct: list[bool] = []
    for images, _, indices in _pixel_batches(test.data, config, loading):
        logits = model(images)
        if test.outputs is None:
            predictions = logits.argmax(1).tolist()
        else:
            predictions = [test.outputs[i] for i in logits[:, test.outputs].argmax(1).tolist()]
        correct += [prediction in test.targets[i] for prediction, i in zip(predictions, indices, strict=True)]
    row.scores[Condition("imagenet", kind=test.name)] = torch.tensor(correct)
    if test.skipped:
        row.notes.append(f"{test.name}: {test.skipped:,} images without a label of the model are skipped")


def _pixel_batches(
    data: ImageDataset | ImageStream, config: InferenceConfig, loading: Mapping[str, Any]
) -> Iterator[tuple[Tensor, Tensor, list[int]]]:
    """Batches of pixels from 0 to 1 in the size of the model, labels, and numbers of the images."""
    count = len(config.mean)
    raw = config.replace(mean=(0.0,) * count, std=(1.0,) * count)
    start = 0
    for images, labels in create_eval_loader(data, raw, **loading).epoch(0):
        yield images, labels, list(range(start, start + len(labels)))
        start += len(labels)


def _select_images(splits: DatasetSplits, split: str, limit: int | None) -> Any:
    if splits.task != "classify":
        raise ValueError(f"the robustness suite is for classifiers, but {splits.name} is for task {splits.task}")
    if split not in ("val", "train"):
        raise ValueError(f"the robustness suite evaluates split val or train, not {split}")
    part = getattr(splits, split)
    if limit is None or limit >= len(part):
        return part
    if limit < 1:
        raise ValueError(f"limit is {limit}, but must be at least 1")
    if isinstance(part, ImageStream):
        raise ValueError(f"{splits.name} is a stream, from which no images can be drawn; leave out the limit")
    chosen = torch.randperm(len(part), generator=generator("robustness"))[:limit]
    return SubsetDataset(part, chosen.sort().values.tolist())


def _load(source: Source, model: str | None, splits: DatasetSplits) -> tuple[Any, InferenceConfig]:
    if isinstance(source, nn.Module):
        return source, InferenceConfig.from_model(source)
    network, config = load_model(source, model=model, num_classes=splits.num_classes if model else None)
    if config.task != "classify":
        raise ValueError(f"the robustness suite is for classifiers, but the task of {source} is {config.task}")
    return network, config


def _titles(sources: Source | Sequence[Source] | Mapping[str, Source]) -> dict[str, Source]:
    """Models by their titles: given ones, or the last part of a path where these are different."""
    if isinstance(sources, Mapping):
        return dict(sources)
    listed = [sources] if isinstance(sources, str | Path | nn.Module) else list(sources)
    if not listed:
        raise ValueError("the robustness suite needs at least one model")
    long = [type(one).__name__ if isinstance(one, nn.Module) else str(one) for one in listed]
    short = [name.rstrip("/").rpartition("/")[2] for name in long]
    titles = short if len(set(short)) == len(short) else long
    if twice := [name for name in titles if titles.count(name) > 1]:
        raise ValueError(f"{twice[0]} is given twice; give a mapping of titles to models")
    return dict(zip(titles, listed, strict=True))


def _slug(title: str) -> str:
    """A title as the name of a folder."""
    return "".join(letter if letter.isalnum() or letter in "._-" else "_" for letter in title)
