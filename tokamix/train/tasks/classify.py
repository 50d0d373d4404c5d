"""Image classification."""

from collections.abc import Mapping
from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.data import Loader, mix
from tokamix.evaluate.accuracy import measure_accuracy
from tokamix.recipes import Recipe
from tokamix.train.tasks import Logs, Moment


class Classify:
    """Cross-entropy with label smoothing; on mixed images and labels where the recipe mixes."""

    metric = "top1"
    shown: Mapping[str, str] = MappingProxyType({"top1": "top-1"})

    def __init__(self, recipe: Recipe, num_classes: int) -> None:
        self.recipe = recipe
        self.num_classes = num_classes

    def prepare(self, model: nn.Module) -> None:
        """Nothing to do."""

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, moment: Moment) -> tuple[Tensor, Logs]:
        """The loss of a batch, and what to report of it."""
        images, target = self.mixed(images, labels, moment)
        logits = model(images)
        loss = self.cross_entropy(logits, target)
        return loss, {"loss": loss, **self.report(logits, target)}

    def mixed(self, images: Tensor, labels: Tensor, moment: Moment) -> tuple[Tensor, Tensor]:
        """The batch after mixup and CutMix: labels become distributions; both stay as they are without."""
        if not (self.recipe.mixup or self.recipe.cutmix):
            return images, labels
        return mix(images, labels, self.recipe, self.num_classes, seed=tuple(moment))

    def cross_entropy(self, logits: Tensor, target: Tensor) -> Tensor:
        """Against class numbers, which are smoothed here, or distributions, which are smoothed already."""
        smoothing = 0.0 if target.is_floating_point() else self.recipe.label_smoothing
        return F.cross_entropy(logits.float(), target, label_smoothing=smoothing)

    def report(self, logits: Tensor, target: Tensor) -> Logs:
        """The accuracy in percent on this batch, unless its images are mixed and have no one right answer."""
        if target.is_floating_point():
            return {}
        return {"top1": 100.0 * (logits.detach().argmax(1) == target).float().mean()}

    def evaluate(self, model: nn.Module, loader: Loader, batch_size: int | None = None) -> dict[str, float]:
        """Accuracy and loss on a validation set."""
        return measure_accuracy(model, loader, batch_size)

    def picture(self, model: nn.Module) -> None:
        """Nothing to show."""
