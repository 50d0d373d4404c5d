"""Measuring segmenters and detectors on the validation part of a data set."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from tokamix.data import AnnotatedDataset, DatasetSplits, create_dataset
from tokamix.data.annotated.loader import create_eval_loader
from tokamix.dense.saved import Config, load_dense
from tokamix.dense.windows import classify
from tokamix.distributed import share
from tokamix.evaluate.detection import CocoAP
from tokamix.evaluate.segmentation import MeanIoU
from tokamix.inference import InferenceConfig
from tokamix.recipes import Recipe, load_overrides

INFERENCE = ("scale", "interpolation", "window", "window_stride", "test_scales", "test_flip")


def inference_settings(recipe: Recipe) -> Config:
    """What of a recipe decides how a trained model is used; it goes along with the model."""
    return {key: value for key, value in recipe.to_dict().items() if key in INFERENCE}


def inference_recipe(config: Config, overrides: Sequence[str] = ()) -> Recipe:
    """A recipe that says the same to those who ask recipes."""
    settings = {**config["inference"], **load_overrides(overrides)}
    if unknown := [key for key in settings if key not in INFERENCE]:
        raise ValueError(f"{unknown[0]} has no part in evaluation; what can be set is {', '.join(INFERENCE)}")
    return Recipe(name="evaluation", task=config["task"], method=config["method"], crop_size=1, **settings)


def inference_config(config: Config, recipe: Recipe) -> InferenceConfig:
    """Preprocessing of a trained model's images, as loaders and transforms take it."""
    return InferenceConfig(
        task=config["task"],
        class_names=tuple(config["label_names"]),
        mean=tuple(config["mean"]),
        std=tuple(config["std"]),
        interpolation=recipe.interpolation,
        scale=recipe.scale,
    )


@torch.no_grad()
def segment_metrics(model: nn.Module, loader: Any, classes: Sequence[str], recipe: Recipe) -> dict[str, Any]:
    """Mean IoU, pixel and mean accuracy in percent over all processes, and the IoU of each class."""
    metric = MeanIoU(classes)
    with _evaluation(model):
        for images, targets in loader.epoch(0):
            for some in alike(images, targets):
                size = targets[some[0]]["size"]
                found = segment_images(model, torch.stack([images[i] for i in some]), size, recipe)
                for i, labels in zip(some, found, strict=True):
                    metric.update(labels, targets[i]["segmentation"])
    return metric.compute()


def segment_images(model: Any, images: Tensor, size: tuple[int, int], recipe: Recipe) -> Tensor:
    """Classes (B, H, W) of images (B, 3, h, w), at the size that they had."""
    how: Any = {"window": recipe.window, "stride": recipe.window_stride}
    return classify(model, images, size=size, scales=recipe.test_scales, flip=recipe.test_flip, **how)


@torch.no_grad()
def detect_metrics(model: Any, loader: Any, dataset: AnnotatedDataset) -> dict[str, Any]:
    """COCO's average precisions in percent over all processes; of masks too where the model has them."""
    metric = CocoAP(dataset, masks=model.has_masks)
    with _evaluation(model):
        for images, targets in loader.epoch(0):
            for some in alike(images, targets):
                # images of other sizes would be padded, and what is found depend on who shares a batch
                sizes = [targets[i]["size"] for i in some]
                for i, found in zip(some, model([images[i] for i in some], sizes=sizes), strict=True):
                    metric.update(targets[i]["index"], found)
    return metric.compute()


def alike(images: Sequence[Tensor], targets: Sequence[dict[str, Any]]) -> list[list[int]]:
    """Places of the images that have one size, now and before."""
    groups: dict[Any, list[int]] = {}
    for i, (image, target) in enumerate(zip(images, targets, strict=True)):
        groups.setdefault((tuple(image.shape), tuple(target["size"])), []).append(i)
    return list(groups.values())


def evaluate_dense(
    source: str | Path,
    data: str | DatasetSplits,
    *,
    overrides: Sequence[str] = (),
    batch_size: int = 1,
    device: str | None = None,
    workers: int = 0,
    corrupt: Literal["raise", "skip"] = "raise",
) -> dict[str, Any]:
    """The numbers of a run on a validation set, over all processes where `torch.distributed` is initialised.

    Args:
        source: the folder of a run.
        data: the data set, as `tokamix.create_dataset` takes it; its validation part is used.
        overrides: such as "test_scales=[0.75, 1, 1.25]" and "test_flip=true".
        batch_size: images that are read together.
        device: default: a GPU where there is one.
        workers: processes that decode.
        corrupt: what to do with pictures that cannot be decoded: stop and name the first, or skip them.
    """
    model, config = load_dense(source)
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    opened = create_dataset(data, config["task"]) if isinstance(data, str) else data
    check_classes(config, opened)
    recipe = inference_recipe(config, overrides)
    reading: dict[str, Any] = {"batch_size": batch_size, "device": place, "workers": workers, "corrupt": corrupt}
    loader = create_eval_loader(opened.val, inference_config(config, recipe), **reading, **share())
    model.to(place)
    if config["task"] == "segment":
        return segment_metrics(model, loader, opened.classes, recipe)
    return detect_metrics(model, loader, opened.val)


def check_classes(config: Config, opened: DatasetSplits) -> None:
    """Raise where the model was trained on other classes than the data has."""
    known, given = config["label_names"], list(opened.classes)
    if len(known) != len(given):
        raise ValueError(f"the model tells {len(known)} classes apart, but {opened.name} has {len(given)}")
    if known != given:
        i = next(i for i, (one, other) in enumerate(zip(known, given, strict=True)) if one != other)
        raise ValueError(f"class {i} of the model is {known[i]!r}, but that of {opened.name} is {given[i]!r}")


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)
