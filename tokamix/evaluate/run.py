"""`evaluate`: the metrics of a trained model of any task on a data set."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn

from tokamix.data import DataError, DatasetSplits, create_dataset
from tokamix.data.annotated.loader import create_eval_loader as create_annotated_loader
from tokamix.data.images.loader import create_eval_loader as create_image_loader
from tokamix.distributed import rank_and_world_size
from tokamix.evaluate.accuracy import measure_accuracy
from tokamix.evaluate.classes import SelectClasses, match_classes
from tokamix.evaluate.detection import JoinedAnnotations, measure_ap
from tokamix.evaluate.report import write_report
from tokamix.evaluate.segmentation import measure_miou
from tokamix.inference import InferenceConfig, Precision, autocast, choose_device, load_model, read_precision
from tokamix.recipes import load_overrides
from tokamix.runtimes import ExportedModel

Split = Literal["val", "train", "all"]


@dataclass(frozen=True)
class EvaluationResult:
    """Metrics of a model, and what they were measured on; `result["top1"]` is a metric.

    Attributes:
        metrics: in percent, except the loss.
        num_images: images that were evaluated, over all processes.
        total_images: images of all splits of the data set.
        split: "val", "train" or "all".
        data: name of the data set.
        source: the model.
        task: "classify", "segment" or "detect".
        num_classes: classes among which the model chose: those of the data.
        precision: of the forward passes: "fp32", "bf16" or "fp16".
        device: "cpu" or "cuda".
        notes: sentences about the match of the classes and the precision.
    """

    metrics: dict[str, float]
    num_images: int
    total_images: int
    split: str
    data: str
    source: str
    task: str
    num_classes: int
    precision: str
    device: str
    notes: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> float:
        return self.metrics[name]


def evaluate(
    source: str | Path | nn.Module,
    data: str | Path | DatasetSplits,
    *,
    model: str | None = None,
    split: Split = "val",
    image_size: int | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    precision: Precision | None = None,
    batch_size: int | None = None,
    device: str | None = None,
    workers: int = 0,
    corrupt: Literal["raise", "skip"] = "raise",
    report: str | Path | None = None,
) -> EvaluationResult:
    """Evaluate a trained model of any task on a data set, over all processes of `torch.distributed`.

    Classes are matched by name: those of the data may be in a different order than the model's, or a subset of them.

    Args:
        source: a run's folder, a weights file, a timm name or `hf-hub:user/name`, see `tokamix.inference.load_model`;
            or a classifier as a module.
        data: a data set, as for `tokamix.create_dataset`.
        model: name of the architecture, for a checkpoint file.
        split: the part of the data to evaluate on: "val", "train", or "all".
        image_size: of a classifier, in pixels; default: the model's own.
        overrides: options of `InferenceConfig` to change, such as "test_flip=true".
        precision: of the forward passes; default: that of the run's evaluations, otherwise fp32.
        batch_size: images of one forward pass; default: 128 for classifiers, otherwise 1.
        device: "cpu" or "cuda"; default: a GPU if there is one.
        workers: processes that decode images.
        corrupt: for images that cannot be decoded: stop and name the first ("raise"), or skip them ("skip").
        report: a folder for the confusion matrix, the accuracy of each class and the worst mistakes of a classifier.
    """
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size is {batch_size}, but must be at least 1")
    where = choose_device(device)
    splits = data if isinstance(data, DatasetSplits) else None
    if isinstance(source, nn.Module):
        network, config = source, InferenceConfig.from_model(source)
    else:
        if splits is None and model is not None:
            splits = create_dataset(str(data))  # only checkpoints of classifiers need the name of their architecture
        network, config = load_model(
            source, model=model, num_classes=splits.num_classes if splits else None, device=device
        )
    splits = splits or create_dataset(str(data), config.task)
    if splits.task != config.task:
        raise ValueError(f"the model's task is {config.task}, but {splits.name} was opened for task {splits.task}")
    if report is not None and config.task != "classify":
        raise ValueError(f"reports are for classifiers, but the model's task is {config.task}; leave out the report")
    config = config.replace(**load_overrides(overrides) | ({} if image_size is None else {"image_size": image_size}))
    fixed = network.metadata.get("precision", "fp32") if isinstance(network, ExportedModel) else None
    if fixed is not None and precision is not None:
        raise ValueError(f"{source} is an exported file, whose precision is {fixed}; leave out the precision")
    index, note = match_classes(config, splits.classes, splits.name)
    network = (network if index is None else SelectClasses(network, index)).to(where)
    config = config.replace(class_names=tuple(splits.classes))
    notes = [note] if note else []
    chosen: str = precision or read_precision(source)
    if precision is None and chosen == "fp16" and where.type == "cpu":
        chosen = "fp32"
        notes.append("the run was evaluated in fp16, which needs a GPU: evaluated in fp32")
    both = [part for part in (splits.train, splits.val) if len(part)]  # a validation set may come alone
    parts = {"val": [splits.val], "train": [splits.train], "all": both}[split]
    if not any(map(len, parts)):
        raise DataError(f"{splits.name} has no images in the split {split}; choose another one, or all")
    rank, world_size = rank_and_world_size()
    loading: dict[str, Any] = {"rank": rank, "world_size": world_size, "device": where, "workers": workers}
    create: Any = create_image_loader if config.task == "classify" else create_annotated_loader
    size = batch_size or (128 if config.task == "classify" else 1)
    loader: Any = ChainedLoader(
        [create(part, config, batch_size=size, corrupt=corrupt, **loading) for part in parts], where
    )
    with autocast(where, chosen):
        if config.task == "classify":
            metrics = measure_accuracy(network, loader)
        elif config.task == "segment":
            metrics = measure_miou(network, loader, config)
        else:
            metrics = measure_ap(network, loader, parts[0] if len(parts) == 1 else JoinedAnnotations(parts))
        num_images = _sum(sum(map(len, parts)) if rank == 0 else 0, loader)
        if report is not None and rank == 0:
            alone = loading | {"rank": 0, "world_size": 1}
            loaders = [create(part, config, batch_size=size, corrupt="skip", **alone) for part in parts]
            write_report(report, network, ChainedLoader(loaders, where), config)
    name = type(source).__name__ if isinstance(source, nn.Module) else str(source)
    total = len(splits.train) + len(splits.val)
    described = (split, splits.name, name, config.task, config.num_classes, fixed or chosen, where.type)
    return EvaluationResult(metrics, num_images, total, *described, notes=tuple(notes))


class ChainedLoader:
    """The batches of several loaders, one after the other.

    Args:
        loaders: of the splits.
        device: of their batches.
    """

    def __init__(self, loaders: Sequence[Any], device: torch.device) -> None:
        self.loaders, self.device = loaders, device

    def epoch(self, number: int) -> Iterator[Any]:
        """Batches of all loaders; the `index` of an image counts over all of them."""
        offset = 0
        for loader in self.loaders:
            for images, targets in loader.epoch(number):
                for target in targets if isinstance(targets, list) else ():
                    target["index"] += offset
                yield images, targets
            offset += loader.dataset_size


def _sum(count: int, loader: ChainedLoader) -> int:
    """Number of evaluated images over all processes: all but the skipped ones of each."""
    count -= sum(len(part.skipped) for part in loader.loaders)
    if not (dist.is_initialized() and dist.get_world_size() > 1):
        return count
    total = torch.tensor(count, device="cuda" if "nccl" in dist.get_backend() else "cpu")
    dist.all_reduce(total)
    return int(total)
