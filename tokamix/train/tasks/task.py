"""The interface between the training engine and a task."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import torch
from PIL.Image import Image
from torch import Tensor, nn

from tokamix.data import DatasetSplits, Loader
from tokamix.inference import InferenceConfig
from tokamix.recipes import Recipe
from tokamix.train.setup.accelerator import Accelerator

Logs = dict[str, Tensor]


class Position(NamedTuple):
    """Position of a batch in the run; everything random about the batch is a function of seed, epoch and batch.

    Attributes:
        seed: of the run.
        epoch: counted from 0.
        batch: of the epoch, counted from 0.
        progress: fraction of the run that is finished.
    """

    seed: int
    epoch: int
    batch: int
    progress: float = 0.0


class LoaderOptions(NamedTuple):
    """Arguments that the loaders of every task share."""

    batch_size: int
    rank: int
    world_size: int
    device: torch.device
    workers: int = 0
    corrupt: Literal["raise", "skip"] = "raise"


class Task(Protocol):
    """One kind of training: creates its model and loaders, computes losses, evaluates."""

    metric: str
    """The metric that selects the best checkpoint; higher is better."""
    metric_names: Mapping[str, str]
    """Metrics in percent to show, with their display names."""
    splits: DatasetSplits
    inference: InferenceConfig
    """How the trained model is used; set by `create_model`."""

    def create_model(self, model: str | nn.Module | None, checkpoint: str | Path | None, pretrained: bool) -> nn.Module:
        """Create the model, or take the given module; the arguments are those of `tokamix.train`."""

    def title(self) -> str:
        """The model's name, for logs and the settings of the run."""

    def config(self) -> dict[str, Any]:
        """The content of config.json."""

    def create_loaders(self, options: LoaderOptions) -> tuple[Loader, Loader]:
        """Create the training and the validation loader."""

    def prepare(self, model: nn.Module, accelerator: Accelerator | None) -> None:
        """Prepare the model before the optimizer is created."""

    def compile(self, model: nn.Module, graphs: bool) -> None:
        """Compile the parts of the model that can be compiled, with CUDA graphs if `graphs`."""

    def loss(self, model: nn.Module, images: Any, targets: Any, position: Position) -> tuple[Tensor, Logs]:
        """Compute the loss of a batch, and scalars to log that stay on the device."""

    def evaluate(self, model: nn.Module, loader: Loader, pad_to: int | None) -> dict[str, float]:
        """Compute the metrics on a validation set; batches are padded to `pad_to` images if it is given."""

    def draw_predictions(self, model: nn.Module) -> Image | None:
        """Draw predictions on a few validation images, if the task can."""

    def write_report(self, folder: Path, model: nn.Module) -> None:
        """Write a report of the best model into the folder of a finished run."""

    # A task may also have
    # - `saved_module(model)`: the part of the model that is saved as the run's result; default: all of it;
    # - `before_step(position)`: changes gradients before they are clipped and the optimizer's step;
    # - `after_step(position)`: called after the optimizer's step;
    # - `check_saved(folder, model)`: raises ReloadError if the folder of a finished run does not load as the saved
    #   module, which has the best weights.


def create_task(recipe: Recipe, data: str | DatasetSplits) -> Task:
    """Create the task of a recipe and open its data."""
    # imported here: each task imports this module, and a run needs only one of them
    if recipe.task == "segment":
        from tokamix.train.tasks.segment import Segment

        return Segment(recipe, data)
    if recipe.task == "detect":
        from tokamix.train.tasks.detect import Detect

        return Detect(recipe, data)
    if recipe.task == "dino":
        from tokamix.train.tasks.dino.task import Dino

        return Dino(recipe, data)
    if recipe.distillation != "none":
        from tokamix.train.tasks.distill import Distill

        return Distill(recipe, data)
    from tokamix.train.tasks.classify import Classify

    return Classify(recipe, data)
