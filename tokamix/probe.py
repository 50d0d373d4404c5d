"""`probe`: how much the frozen features of a model tell about the classes of a data set."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tokamix.data import DatasetSplits, create_dataset
from tokamix.data.images.loader import create_eval_loader
from tokamix.distributed import rank_and_world_size
from tokamix.embed.features import FeatureExtractor, Pool, extract_features
from tokamix.embed.run import backbone_precision, load_backbone
from tokamix.evaluate.knn import TEMPERATURE, measure_knn
from tokamix.evaluate.linear import LinearResult, measure_linear
from tokamix.inference import InferenceConfig, Precision, autocast, choose_device
from tokamix.recipes import load_overrides
from tokamix.train import RunResult, train

METHODS = ("knn", "linear", "finetune")
NEIGHBOURS = (10, 20, 100, 200)
FINETUNE = {"lr": 1e-4, "epochs": 30}  # of the recipe `small`, which starts from random weights


@dataclass(frozen=True)
class ProbeResult:
    """Accuracies in percent on the validation images.

    Attributes:
        knn: of the weighted vote of k neighbours, by k.
        linear: of a linear classifier on the frozen features.
        finetune: the run that trained all weights; None if it was not asked for.
        dimensions: of the features.
        num_images: for training and validation.
        source: the model.
        data: name of the data set.
    """

    knn: dict[int, float]
    linear: LinearResult | None
    finetune: RunResult | None
    dimensions: int
    num_images: tuple[int, int]
    source: str
    data: str

    def rows(self) -> list[tuple[str, float, str]]:
        """Method, accuracy and settings of each result."""
        rows = [(f"{k}-NN", value, f"T {TEMPERATURE:g}") for k, value in self.knn.items()]
        if self.linear is not None:
            settings = f"lr {self.linear.lr:g}, weight decay {self.linear.weight_decay:g}"
            rows.append(("linear", self.linear.top1, f"{settings} (held-out images: {self.linear.held_out:.2f} %)"))
        if self.finetune is not None:
            last = self.finetune.last
            rows.append(("fine-tuned", last["top1"], f"last of {last['epoch']} epochs, in {self.finetune.folder}"))
        return rows


def probe(
    source: str | Path | nn.Module,
    data: str | Path | DatasetSplits,
    *,
    methods: Sequence[str] = ("knn", "linear"),
    model: str | None = None,
    k: Sequence[int] | None = None,
    pool: Pool = "model",
    layer: int | None = None,
    image_size: int | None = None,
    precision: Precision | None = None,
    batch_size: int = 128,
    device: str | None = None,
    workers: int = 0,
    recipe: str = "small",
    overrides: Sequence[str] = (),
    output: str | Path | None = None,
    quiet: bool = True,
) -> ProbeResult:
    """Measure the features of a model on a data set with labels, over all processes of `torch.distributed`.

    Training and validation images are both preprocessed as in evaluation, without augmentation. The validation images
    choose nothing: the settings of the linear classifier are chosen on a held-out fifth of the training images.

    Args:
        source: a run's folder, a weights file, a timm name or `hf-hub:user/name`, see `tokamix.inference.load_model`;
            or a timm model.
        data: a data set for classification, as for `tokamix.create_dataset`.
        methods: "knn" (weighted by exp(similarity / 0.07)), "linear", and "finetune", a training of all weights.
        model: name of the architecture, for a checkpoint file.
        k: numbers of neighbours; default: those of 10, 20, 100 and 200 that the training images suffice for.
        pool: see `tokamix.embed.FeatureExtractor`.
        layer: likewise.
        image_size: in pixels; default: the model's own.
        precision: of the forward passes; default: that of the run's evaluations, otherwise fp32.
        batch_size: images of one forward pass.
        device: "cpu" or "cuda"; default: a GPU if there is one.
        workers: processes that decode images.
        recipe: of the fine-tuning; `small` with lr 1e-4 and 30 epochs by default.
        overrides: values that replace the recipe's, such as "epochs=10".
        output: folder of the fine-tuning's run.
        quiet: print nothing while fine-tuning.
    """
    if unknown := [method for method in methods if method not in METHODS] or not methods:
        raise ValueError(f"methods are {unknown or 'missing'}, but must be some of {', '.join(METHODS)}")
    where = choose_device(device)
    splits = data if isinstance(data, DatasetSplits) else create_dataset(str(data))
    if splits.task != "classify" or splits.num_classes < 2:
        raise ValueError(f"probing needs images with labels of two or more classes, but {splits.name} has none")
    if "finetune" in methods and isinstance(source, nn.Module):
        raise ValueError("fine-tuning starts from a run, a checkpoint or a pretrained model, not from a module")
    network, config = load_backbone(source, model, image_size)
    extractor = FeatureExtractor(network, pool, layer).to(where)
    neighbours = _check_neighbours(k, len(splits.train)) if "knn" in methods else ()
    chosen = precision or backbone_precision(source, where)
    rank, world_size = rank_and_world_size()
    options: Any = {"rank": rank, "world_size": world_size, "device": where, "workers": workers}
    parts: list[torch.Tensor] = []
    with autocast(where, chosen):
        for split in (splits.train, splits.val):
            parts += extract_features(extractor, create_eval_loader(split, config, batch_size=batch_size, **options))
    bank, bank_labels, val, val_labels = parts
    linear = measure_linear(bank, bank_labels, val, val_labels) if "linear" in methods else None
    knn = measure_knn(bank, bank_labels, val, val_labels, neighbours) if neighbours else {}
    run = None
    if "finetune" in methods:
        run = _finetune(source, model, splits, config, recipe, overrides, output, device, workers, quiet)
    name = type(source).__name__ if isinstance(source, nn.Module) else str(source)
    return ProbeResult(knn, linear, run, bank.shape[1], (len(bank), len(val)), name, splits.name)


def _check_neighbours(k: Sequence[int] | None, images: int) -> Sequence[int]:
    """The given numbers of neighbours, or those of the default that there are enough images for."""
    if k is not None and max(k, default=0) > images:  # before the features are computed
        raise ValueError(f"{max(k)} neighbours cannot be found among {images} training images; use a smaller k")
    return k if k is not None else [one for one in NEIGHBOURS if one <= images] or [images]


def _finetune(
    source: Any,
    model: str | None,
    splits: DatasetSplits,
    config: InferenceConfig,
    recipe: str,
    overrides: Sequence[str],
    output: str | Path | None,
    device: str | None,
    workers: int,
    quiet: bool,
) -> RunResult:
    """Train all weights, starting from the source."""
    values = {"image_size": config.image_size, **(FINETUNE if recipe == "small" else {}), **load_overrides(overrides)}
    is_file = Path(str(source).removeprefix("local-dir:")).exists() or str(source).startswith("hf-hub:")
    start: Any = {"checkpoint": source} if is_file else {"pretrained": True}
    name = model if is_file else str(source)
    options: Any = {"device": device, "workers": workers, "quiet": quiet}
    return train(name, splits, recipe, output, overrides=values, **start, **options)
