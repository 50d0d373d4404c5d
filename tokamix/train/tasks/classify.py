"""Image classification."""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from textwrap import shorten
from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix._construction import read_record
from tokamix.checkpoint import load_checkpoint
from tokamix.compile import compile_blocks
from tokamix.data import DatasetSplits, ImageDataset, Loader, create_dataset, mix
from tokamix.data.decode import first_line
from tokamix.data.images.loader import create_eval_loader, create_train_loader
from tokamix.evaluate.accuracy import measure_accuracy
from tokamix.evaluate.report import write_report
from tokamix.inference import UNKNOWN, InferenceConfig, create_saved_classifier, evaluation_mode
from tokamix.recipes import Recipe
from tokamix.train.output.reload import check_reload, compare_models, compare_structure
from tokamix.train.setup.accelerator import Accelerator
from tokamix.train.setup.model import create_classifier
from tokamix.train.tasks.task import LoaderOptions, Logs, Position

_log = logging.getLogger("tokamix")
# keys of timm's pretrained_cfg that describe a download, not the model
DOWNLOAD_KEYS = frozenset(
    ("url", "file", "source", "hf_hub_id", "hf_hub_filename", "state_dict", "tag", "architecture", "notes")
)


class Classify:
    """Cross-entropy with label smoothing, on mixed images and labels where the recipe has mixup or CutMix."""

    metric = "top1"
    metric_names: Mapping[str, str] = MappingProxyType({"top1": "top-1"})
    optional_arguments: Mapping[str, Any] = MappingProxyType({})  # of the model; left out if it has no such argument
    inference: InferenceConfig

    def __init__(self, recipe: Recipe, data: str | DatasetSplits) -> None:
        self.recipe = recipe
        self.unmixed = recipe.replace(mixup_prob=0.0)  # labels stay distributions when mixing ends
        self.splits = create_dataset(data, seed=recipe.seed) if isinstance(data, str) else data
        if self.splits.task != "classify":
            raise ValueError(
                f"the recipe {recipe.name} is for task classify, but {self.splits.name} was opened for another task"
            )
        self.num_outputs = self.splits.num_classes
        if self.num_outputs < 2:
            raise ValueError(
                f"{self.splits.name} has only the classes {list(self.splits.classes)}, and a classifier needs at least"
                " two; add a folder for each further class, or learn without labels (--task dino)"
            )
        if recipe.start_size is not None:
            self.optional_arguments = {"dynamic_img_size": True, "strict_img_size": False}  # timm's ViTs and Swins

    def create_model(self, model: str | nn.Module | None, checkpoint: str | Path | None, pretrained: bool) -> Any:
        """Create the classifier from the recipe, or take the given module."""
        self.in_chans = self.recipe.model_kwargs.get("in_chans", 3)
        if isinstance(model, nn.Module):
            num_classes = getattr(model, "num_classes", self.num_outputs)
            if num_classes != self.num_outputs:
                raise ValueError(f"the model has {num_classes} classes, but the data has {self.num_outputs}")
            if checkpoint is not None:
                load_checkpoint(model, checkpoint)
            network: Any = model
            self.construction = read_record(network)
        else:
            network, arguments = create_classifier(
                model, self.recipe, self.num_outputs, self.in_chans, checkpoint, pretrained, self.optional_arguments
            )
            self.construction = read_record(network) | {"arguments": arguments}
        self.kind = type(network).__name__
        self.pretrained_cfg = getattr(network, "pretrained_cfg", None) or {}
        self.num_features = getattr(network, "num_features", None)
        self.inference = self._inference_config(network)
        if isinstance(model, nn.Module):
            self._check_forward(network, self.recipe.image_size, "image_size")
            self._check_construction(network)
        if start_size := getattr(self.recipe, "start_size", None):  # DINO's recipes have none
            self._check_forward(network, start_size, "start_size")
        return network

    def _check_forward(self, network: nn.Module, size: int, key: str) -> None:
        """Find out before training whether a module takes images of a size."""
        like = next(network.parameters(), torch.empty(0))
        shape = (2, self.in_chans, size, size)
        try:
            with torch.no_grad(), torch.random.fork_rng(devices=[]), evaluation_mode(network):
                network(torch.zeros(shape, device=like.device, dtype=like.dtype))
        except (RuntimeError, ValueError, TypeError, AssertionError) as error:
            reason = shorten(first_line(error), 200)
            raise ValueError(
                f"the model cannot process images of shape {shape} ({reason}); train with another {key}, or change the"
                " model"
            ) from error

    def _check_construction(self, network: nn.Module) -> None:
        """Find out before training whether config.json can describe a given module; otherwise mark it as unknown."""
        problem = "it is not a registered model"
        if self.construction["name"] is not None:
            try:
                with torch.random.fork_rng(devices=[]):
                    again = create_saved_classifier(json.loads(json.dumps(self.config())))
                problem = compare_structure(network, again)
                if not problem:
                    again.load_state_dict(network.state_dict())
                    problem = compare_models(network, again, self.inference)
            except Exception as error:  # whatever it is, this is not the way to create the module
                problem = shorten(str(error), 200)
        if problem:
            self.construction = {"name": None, "arguments": {}, "steps": []}
            _log.warning(
                "config.json cannot describe this %s (%s): to load the run, create the module yourself and use"
                " tokamix.load_checkpoint; tokamix.create_model, create_body and swap_mixer record what they create",
                self.kind,
                problem,
            )

    def _inference_config(self, network: nn.Module) -> InferenceConfig:
        """The model's preprocessing with the recipe's values; small images that are held as arrays are not cropped."""
        options: dict[str, Any] = {"image_size": self.recipe.image_size, "interpolation": self.recipe.interpolation}
        val = self.splits.val
        if self.recipe.crop_pct is not None:
            options["crop_pct"] = self.recipe.crop_pct
        elif isinstance(val, ImageDataset) and val.arrays() is not None:
            options["crop_pct"] = 1.0
        return InferenceConfig.from_model(network, self.splits.classes, in_chans=self.in_chans, **options)

    def title(self) -> str:
        """The model's name, and the changes made to it."""
        changes = dict.fromkeys(step["function"] for step in self.construction["steps"])
        name = self.construction["name"] or self.kind
        return f"{name} with {' and '.join(changes)}" if changes else name

    def config(self) -> dict[str, Any]:
        """config.json as timm and the Hub read it, plus the inference config."""
        inference = self.inference
        cfg = {k: v for k, v in self.pretrained_cfg.items() if v is not None and k not in DOWNLOAD_KEYS}
        shared = ("mean", "std", "interpolation", "crop_pct", "crop_mode", "num_classes")
        cfg |= {key: getattr(inference, key) for key in shared}
        cfg |= {"input_size": (inference.in_chans, inference.image_size, inference.image_size)}
        # timm must not load another network in silence: it does not find these names, and prints them
        if self.construction["name"] is None:
            construction: dict[str, Any] = {"construction": UNKNOWN}
            architecture = f"{self.kind}, a module of unknown construction"
        elif self.construction["steps"]:
            construction = {"construction": self.construction}
            architecture = f"{self.title()}, which tokamix.inference.load_model loads"
        else:
            construction, architecture = {}, self.construction["name"]
        return {
            "architecture": architecture,
            **construction,
            "num_classes": inference.num_classes,
            "num_features": self.num_features,
            "label_names": list(inference.class_names),
            "model_args": self.construction["arguments"],
            "pretrained_cfg": cfg,
            "inference": inference.to_dict(),
        }

    def create_loaders(self, options: LoaderOptions) -> tuple[Loader, Loader]:
        """Create the training and the validation loader."""
        inference, common = self.inference, options._asdict()
        preprocessing: Any = {"in_chans": inference.in_chans, "mean": inference.mean, "std": inference.std}
        preprocessing |= {"crop_pct": inference.crop_pct, "crop_mode": inference.crop_mode}
        train_loader = create_train_loader(self.splits.train, self.recipe, **common, **preprocessing)
        return train_loader, create_eval_loader(self.splits.val, inference, **common)

    def prepare(self, model: nn.Module, accelerator: Accelerator | None) -> None:
        """Nothing to prepare."""

    def compile(self, model: nn.Module, graphs: bool) -> None:
        """Compile the blocks of the model."""
        compile_blocks(model, graphs)

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, position: Position) -> tuple[Tensor, Logs]:
        """Compute the loss of a batch, and the scalars to log."""
        images, target = self.mix(images, labels, position)
        logits = model(images)
        self.check_outputs(logits)
        loss = self.cross_entropy(logits, target)
        return loss, {"loss": loss, **self.accuracy(logits, target)}

    def check_outputs(self, logits: Any) -> None:
        """Refuse a module whose outputs are not one number per class."""
        if not isinstance(logits, Tensor) or logits.shape[1:] != (self.splits.num_classes,):
            outputs = f"the shape {tuple(logits.shape)}" if isinstance(logits, Tensor) else type(logits).__name__
            raise ValueError(
                f"the model's output has {outputs}, but must be (batch, {self.splits.num_classes}): one number for each"
                " class of the data"
            )

    def mix(self, images: Tensor, labels: Tensor, position: Position) -> tuple[Tensor, Tensor]:
        """Shrink the images while the run grows them, and apply mixup and CutMix: labels become distributions."""
        if (size := self.recipe.size_at(position.progress)) != self.recipe.image_size:
            images = F.interpolate(images, (size, size), mode="bilinear", antialias=True)
        if not (self.recipe.mixup or self.recipe.cutmix):
            return images, labels
        recipe = self.unmixed if position.progress >= 1 - self.recipe.mixup_off else self.recipe
        return mix(images, labels, recipe, self.splits.num_classes, seed=position[:3])

    def cross_entropy(self, logits: Tensor, target: Tensor) -> Tensor:
        """Cross-entropy against class indices, which are smoothed here, or distributions, which already are."""
        smoothing = 0.0 if target.is_floating_point() else self.recipe.label_smoothing
        return F.cross_entropy(logits.float(), target, label_smoothing=smoothing)

    def accuracy(self, logits: Tensor, target: Tensor) -> Logs:
        """Accuracy in percent on this batch, unless its images are mixed and have no single label."""
        if target.is_floating_point():
            return {}
        return {"top1": 100.0 * (logits.detach().argmax(1) == target).float().mean()}

    def evaluate(self, model: nn.Module, loader: Loader, pad_to: int | None = None) -> dict[str, float]:
        """Accuracy and loss on a validation set."""
        return measure_accuracy(model, loader, pad_to)

    def draw_predictions(self, model: nn.Module) -> None:
        """Nothing to draw."""

    def check_saved(self, folder: Path, model: nn.Module) -> None:
        """Reload the folder of a finished run and compare outputs; not for modules of unknown construction."""
        if self.construction["name"] is not None:
            check_reload(folder, model, self.inference)

    def write_report(self, folder: Path, model: nn.Module) -> None:
        """Write confusion matrix, accuracy of each class and the worst mistakes; a failure does not end the run."""
        if (folder / "mistakes.png").exists():  # the last of its files
            return
        try:
            write_report(folder, model, self.splits.val, self.inference)
        except Exception as error:  # metrics and weights matter more than a report
            _log.warning("the report cannot be written: %s: %s", type(error).__name__, error)
