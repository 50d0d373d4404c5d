"""Mean intersection over union (mIoU) and pixel accuracy of segmenters."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tokamix.evaluate.batches import group_by_size
from tokamix.inference import InferenceConfig, evaluation_mode
from tokamix.predict.predictor import segment_images
from tokamix.tasks import IGNORE_INDEX


@torch.no_grad()
def measure_miou(model: nn.Module, loader: Any, config: InferenceConfig) -> dict[str, float]:
    """Compute mean IoU, pixel and mean accuracy, and the IoU of each class, in percent over all processes."""
    metric = MeanIoU(config.class_names)
    with evaluation_mode(model):
        for images, targets in loader.epoch(0):
            for group in group_by_size(images, targets):
                batch = torch.stack([images[i] for i in group])
                class_maps = segment_images(model, batch, targets[group[0]]["size"], config)
                for i, class_map in zip(group, class_maps, strict=True):
                    metric.update(class_map, targets[i]["segmentation"])
    return metric.compute()


class MeanIoU:
    """Confusion matrix of pixel classes, counted on the device and summed over processes.

    Classes that occur neither in the ground truth nor in a prediction are left out of the means. torchmetrics' version
    would be a further dependency for the same bincount, and does not say which value of a wrong mask is out of range.

    Args:
        classes: their names.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = tuple(classes)
        self.confusion: Tensor | None = None  # (ground truth, prediction)

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Add the pixels of one or several images (..., H, W); pixels with target 255 are ignored."""
        if prediction.shape != target.shape:
            raise ValueError(
                f"the prediction has shape {tuple(prediction.shape)}, but the target {tuple(target.shape)}"
            )
        count = len(self.classes)
        valid = target != IGNORE_INDEX
        true, predicted = target[valid].long(), prediction.to(target.device)[valid].long()
        if len(true):
            low, high = torch.stack([*true.aminmax(), *predicted.aminmax()]).view(2, 2).t().tolist()
            if min(low) < 0 or max(high) >= count:
                wrong = "a target" if not 0 <= low[0] <= high[0] < count else "a prediction"
                value = (low if min(low) < 0 else high)[wrong == "a prediction"]
                raise ValueError(
                    f"{wrong} has class {value}, but there are {count} (0 to {count - 1}, {IGNORE_INDEX}: ignored)"
                )
        pairs = torch.bincount(true * count + predicted, minlength=count * count).view(count, count)
        self.confusion = pairs if self.confusion is None else self.confusion.to(pairs.device) + pairs

    def compute(self) -> dict[str, float]:
        """Return `miou`, `pixel_accuracy`, `mean_accuracy` and `iou/<class>`, in percent, over all processes."""
        confusion = self.confusion
        if confusion is None:
            confusion = torch.zeros(len(self.classes), len(self.classes), dtype=torch.int64)
        if dist.is_initialized() and dist.get_world_size() > 1:
            # a process without images has no confusion matrix to take the device from
            confusion = confusion.clone().to("cuda" if "nccl" in dist.get_backend() else "cpu")
            dist.all_reduce(confusion)
        counts = confusion.double().cpu()
        correct, true, predicted = counts.diag(), counts.sum(1), counts.sum(0)
        if not counts.sum():
            raise ValueError("there are no pixels to measure: no images, or every pixel is ignored")
        iou, accuracy = 100 * correct / (true + predicted - correct), 100 * correct / true
        result = {
            "miou": iou.nanmean().item(),
            "pixel_accuracy": (100 * correct.sum() / counts.sum()).item(),
            "mean_accuracy": accuracy.nanmean().item(),
        }
        per_class = zip(self.classes, iou.tolist(), iou.isnan().tolist(), strict=True)
        return result | {f"iou/{name}": value for name, value, absent in per_class if not absent}
