"""Mean intersection over union, and accuracies of pixels."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from tokamix.tasks import IGNORE_INDEX


class MeanIoU:
    """How well classes of pixels are told apart, counted on the device; processes add their counts together.

    Classes that neither the truth nor a prediction has are left out of the means, as is usual.

    Args:
        classes: their names.
    """

    def __init__(self, classes: Sequence[str]) -> None:
        self.classes = tuple(classes)
        self.confusion: Tensor | None = None  # (true class, predicted class)

    def update(self, prediction: Tensor, target: Tensor) -> None:
        """Count the pixels of an image (H, W), or of several; those whose target is 255 do not count."""
        if prediction.shape != target.shape:
            raise ValueError(f"a prediction of {tuple(prediction.shape)} pixels for a target of {tuple(target.shape)}")
        count = len(self.classes)
        counted = target != IGNORE_INDEX
        true, predicted = target[counted].long(), prediction.to(target.device)[counted].long()
        if len(true):
            low, high = torch.stack([*true.aminmax(), *predicted.aminmax()]).view(2, 2).t().tolist()
            if min(low) < 0 or max(high) >= count:
                wrong = "a target" if not 0 <= low[0] <= high[0] < count else "a prediction"
                found = (low if min(low) < 0 else high)[wrong == "a prediction"]
                raise ValueError(
                    f"{wrong} has class {found}, but there are {count} (0 to {count - 1}, {IGNORE_INDEX}: ignored)"
                )
        pairs = torch.bincount(true * count + predicted, minlength=count * count).view(count, count)
        self.confusion = pairs if self.confusion is None else self.confusion.to(pairs.device) + pairs

    def compute(self) -> dict[str, float]:
        """`miou`, `pixel_accuracy`, `mean_accuracy` and `iou/<class>`, in percent, over all processes."""
        confusion = self.confusion
        if confusion is None:
            confusion = torch.zeros(len(self.classes), len(self.classes), dtype=torch.int64)
        if dist.is_initialized() and dist.get_world_size() > 1:
            # a process without a single image does not know the device of the others
            confusion = confusion.clone().to("cuda" if "nccl" in dist.get_backend() else "cpu")
            dist.all_reduce(confusion)
        counts = confusion.double().cpu()
        right, true, predicted = counts.diag(), counts.sum(1), counts.sum(0)
        if not counts.sum():
            raise ValueError("nothing was counted: no image has come, or every pixel is ignored")
        iou, accuracy = 100 * right / (true + predicted - right), 100 * right / true
        result = {
            "miou": iou.nanmean().item(),
            "pixel_accuracy": (100 * right.sum() / counts.sum()).item(),
            "mean_accuracy": accuracy.nanmean().item(),
        }
        known = zip(self.classes, iou.tolist(), iou.isnan().tolist(), strict=True)
        return result | {f"iou/{name}": value for name, value, absent in known if not absent}
