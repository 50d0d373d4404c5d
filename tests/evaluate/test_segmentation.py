"""Mean intersection over union, compared with counting by hand."""

import numpy as np
import pytest
import torch

from tokamix.evaluate import MeanIoU

CLASSES = ("a", "b", "c", "d")


def random_pair(i: int, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """A random prediction and target; some target pixels are 255 (ignored)."""
    draw = torch.Generator().manual_seed(i)
    size = (5 + i, 7)
    target = torch.randint(classes, size, generator=draw)
    prediction = torch.where(
        torch.rand(size, generator=draw) < 0.6, target, torch.randint(classes, size, generator=draw)
    )
    target[torch.rand(size, generator=draw) < 0.2] = 255
    return prediction, target


def count_by_hand(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    predicted = np.concatenate([p.flatten().numpy() for p, _ in pairs])
    true = np.concatenate([t.flatten().numpy() for _, t in pairs])
    predicted, true = predicted[true != 255], true[true != 255]
    iou, accuracy = {}, []
    for n, name in enumerate(CLASSES):
        union = ((predicted == n) | (true == n)).sum()
        if union:
            iou[name] = 100 * ((predicted == n) & (true == n)).sum() / union
        if (true == n).any():
            accuracy.append(100 * (predicted[true == n] == n).mean())
    means = {"miou": np.mean(list(iou.values())), "mean_accuracy": np.mean(accuracy)}
    return means | {"pixel_accuracy": 100 * (predicted == true).mean()} | {f"iou/{k}": v for k, v in iou.items()}


def test_agrees_with_counting() -> None:
    pairs = [random_pair(i) for i in range(6)]
    metric = MeanIoU(CLASSES)
    for prediction, target in pairs:
        metric.update(prediction, target)
    result = metric.compute()
    assert result == pytest.approx(count_by_hand(pairs), abs=1e-9)
    assert "iou/d" not in result  # it does not occur: left out of the mean
    assert result == metric.compute()


def test_integer_types_and_batches() -> None:
    pairs = [random_pair(3), random_pair(3)]
    one, other = MeanIoU(CLASSES), MeanIoU(CLASSES)
    for prediction, target in pairs:
        one.update(prediction, target)
    other.update(torch.stack([p for p, _ in pairs]).to(torch.uint8), torch.stack([t for _, t in pairs]).to(torch.uint8))
    assert one.compute() == other.compute()


def test_a_class_that_is_only_predicted_counts() -> None:
    metric = MeanIoU(CLASSES)
    metric.update(torch.tensor([[0, 3]]), torch.tensor([[0, 0]]))
    assert metric.compute() == {"miou": 25, "mean_accuracy": 50, "pixel_accuracy": 50, "iou/a": 50, "iou/d": 0}


def test_invalid_input() -> None:
    metric = MeanIoU(CLASSES)
    with pytest.raises(ValueError, match="there are no pixels to measure: no images, or every pixel is ignored"):
        metric.compute()
    metric.update(torch.zeros(2, 2, dtype=torch.int64), torch.full((2, 2), 255))
    with pytest.raises(ValueError, match="there are no pixels to measure"):
        metric.compute()
    with pytest.raises(ValueError, match=r"the prediction has shape \(2, 2\), but the target \(2, 3\)"):
        metric.update(torch.zeros(2, 2), torch.zeros(2, 3))
    zeros = torch.zeros(2, 2, dtype=torch.int64)
    for value in (4, -1):
        with pytest.raises(ValueError, match=f"a target has class {value}, but there are 4"):
            metric.update(zeros, zeros + value)
        with pytest.raises(ValueError, match=f"a prediction has class {value}, but there are 4"):
            metric.update(zeros + value, zeros)
