"""`evaluate`: the metrics of a trained model of any task on a data set."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tokamix.data import DatasetSplits, create_dataset
from tokamix.data.annotated import loader as annotated
from tokamix.data.images import loader as images
from tokamix.distributed import rank_and_world_size
from tokamix.evaluate.accuracy import measure_accuracy
from tokamix.evaluate.detection import measure_ap
from tokamix.evaluate.segmentation import measure_miou
from tokamix.inference import InferenceConfig, load_model
from tokamix.recipes import load_overrides


def evaluate(
    source: str | Path | nn.Module,
    data: str | DatasetSplits,
    *,
    model: str | None = None,
    image_size: int | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    batch_size: int | None = None,
    device: str | None = None,
    workers: int = 0,
    corrupt: Literal["raise", "skip"] = "raise",
) -> dict[str, float]:
    """Evaluate a trained model of any task on a validation set, over all processes of `torch.distributed`.

    Args:
        source: see `tokamix.inference.load_model`; or a classifier as a module.
        data: a data set, as for `tokamix.create_dataset`; its validation split is used.
        model: name of the architecture, for a checkpoint file.
        image_size: of a classifier, in pixels; default: the model's own.
        overrides: options of `InferenceConfig` to change, such as "test_flip=true".
        batch_size: images of one forward pass; default: 128 for classifiers, otherwise 1.
        device: default: a GPU if there is one.
        workers: processes that decode images.
        corrupt: for images that cannot be decoded: stop and name the first ("raise"), or skip them ("skip").
    """
    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    splits = data if isinstance(data, DatasetSplits) else None
    if isinstance(source, nn.Module):
        network, config = source, InferenceConfig.from_model(source)
    else:
        if splits is None and model is not None:
            splits = create_dataset(str(data))
        network, config = load_model(source, model=model, num_classes=splits.num_classes if splits else None)
    splits = splits or create_dataset(str(data), config.task)
    config = config.replace(**load_overrides(overrides) | ({} if image_size is None else {"image_size": image_size}))
    _check_classes(config, splits)
    network.to(where)
    rank, world_size = rank_and_world_size()
    reading: dict[str, Any] = {"device": where, "workers": workers, "corrupt": corrupt}
    reading |= {"rank": rank, "world_size": world_size}
    if config.task == "classify":
        loader = images.create_eval_loader(splits.val, config, batch_size=batch_size or 128, **reading)
        return measure_accuracy(network, loader)
    samples = annotated.create_eval_loader(splits.val, config, batch_size=batch_size or 1, **reading)
    if config.task == "segment":
        return measure_miou(network, samples, config)
    return measure_ap(network, samples, splits.val)


def _check_classes(config: InferenceConfig, splits: DatasetSplits) -> None:
    names, classes = config.class_names, splits.classes
    if len(names) != len(classes):
        raise ValueError(f"the model has {len(names)} classes, but {splits.name} has {len(classes)}")
    if config.has_class_names and config.task != "classify" and names != classes:
        i = next(i for i, (one, other) in enumerate(zip(names, classes, strict=True)) if one != other)
        raise ValueError(f"class {i} of the model is {names[i]!r}, but that of {splits.name} is {classes[i]!r}")
