"""Your own task in tokamix's training loop: a different loss and a different metric for classification.

A task creates its model and loaders, computes the loss of a batch, and evaluates (`tokamix.train.tasks.task.Task`).
This one inherits the rest from `Classify`.
"""

import torch
from torch import Tensor, nn

import tokamix
from tokamix.train.tasks.classify import Classify
from tokamix.train.tasks.task import Logs, Position


class BalancedClassify(Classify):
    """Focal loss, and the mean of the classes' accuracies as the metric: for classes of very different sizes."""

    metric = "balanced"  # selects the best weights; higher is better
    metric_names = {"balanced": "balanced accuracy"}  # noqa: RUF012

    def loss(self, model: nn.Module, images: Tensor, labels: Tensor, position: Position) -> tuple[Tensor, Logs]:
        log_probability = model(images).float().log_softmax(1).gather(1, labels[:, None])
        loss = -((1 - log_probability.exp()) ** 2 * log_probability).mean()
        return loss, {"loss": loss}

    def evaluate(self, model: nn.Module, loader, pad_to: int | None = None) -> dict[str, float]:
        hits = torch.zeros(self.splits.num_classes, 2)  # correct and all images of each class
        with torch.no_grad():
            for images, labels in loader.epoch(0):
                correct = (model(images).argmax(1) == labels).float()
                hits.index_add_(0, labels.cpu(), torch.stack([correct, torch.ones_like(correct)], 1).cpu())
        return {"balanced": 100 * (hits[:, 0] / hits[:, 1].clamp(min=1)).mean().item()}


if __name__ == "__main__":
    result = tokamix.train(
        "columnar_tiny_sima",
        "digits",
        "digits",
        "runs/own_task",
        task=BalancedClassify,
        overrides={"epochs": 2},
        quiet=True,
    )
    print(f"balanced accuracy {result.score:.1f} % after two epochs")
