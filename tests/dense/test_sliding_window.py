"""Sliding windows, scales and flips."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.models.test_atmnet import TINY
from tokamix.dense import create_segmenter, sliding_window
from tokamix.dense.sliding_window import predict_classes, predict_probabilities, sliding_window_logits
from tokamix.models.atmnet import ATMNet


def pixelwise(images: Tensor) -> Tensor:
    """A model whose logits depend only on the colour of the pixel."""
    return torch.cat([images, -images.sum(1, keepdim=True)], dim=1)


@pytest.mark.parametrize("size", [(37, 53), (16, 16), (5, 9), (1, 400), (16, 17)])
def test_windows_do_not_change_a_pixelwise_model(size: tuple[int, int]) -> None:
    images = torch.randn(2, 3, *size)
    torch.testing.assert_close(sliding_window_logits(pixelwise, images, 16, 11), pixelwise(images))
    torch.testing.assert_close(sliding_window_logits(pixelwise, images, (16, 8)), pixelwise(images))
    torch.testing.assert_close(predict_probabilities(pixelwise, images, window=16), pixelwise(images).softmax(1))


def test_windows_are_averaged_where_they_overlap() -> None:
    """Width 10, windows of 6 at strides of 3: from 0, 3 and 4. The logits of each window are its number."""
    windows: list[tuple[int, int]] = []

    def model(images: Tensor) -> Tensor:
        windows.append((int(images[0, 0, 0, 0]), images.shape[-1]))
        return torch.full((1, 1, *images.shape[-2:]), float(len(windows)))

    images = torch.arange(10.0).repeat(1, 3, 4, 1)
    out = sliding_window_logits(model, images, 6, 3)
    assert windows == [(0, 6), (3, 6), (4, 6)]
    assert out[0, 0, 0].tolist() == [1, 1, 1, 1.5, 2, 2, 2.5, 2.5, 2.5, 3]


def test_scales_and_flip() -> None:
    """A model that predicts class 0 on the left half and class 1 on the right: averaged with its flip, both are 0.5."""

    def halves(images: Tensor) -> Tensor:
        logits = torch.zeros(1, 2, *images.shape[-2:])
        logits[:, 0, :, : images.shape[-1] // 2] = 50
        logits[:, 1, :, images.shape[-1] // 2 :] = 50
        return logits

    images = torch.randn(1, 3, 8, 12)
    torch.testing.assert_close(predict_probabilities(halves, images, flip=True), torch.full((1, 2, 8, 12), 0.5))
    sizes: list[tuple[int, int]] = []

    def record_size(images: Tensor) -> Tensor:
        sizes.append(tuple(images.shape[-2:]))
        return pixelwise(images)

    out = predict_probabilities(record_size, images, scales=(0.5, 1.0, 1.75), flip=True, size=(20, 30))
    assert sizes == [(4, 6), (4, 6), (8, 12), (8, 12), (14, 21), (14, 21)]
    assert out.shape == (1, 4, 20, 30)
    torch.testing.assert_close(out.sum(1), torch.ones(1, 20, 30))


def test_probabilities_are_averaged() -> None:
    logits = iter([torch.tensor([4.0, 0.0]), torch.tensor([0.0, 1.0])])

    def model(images: Tensor) -> Tensor:
        return next(logits).view(1, 2, 1, 1).expand(1, 2, *images.shape[-2:])

    out = predict_probabilities(model, torch.zeros(1, 3, 4, 4), scales=(1.0, 2.0))
    expected = (torch.tensor([4.0, 0.0]).softmax(0) + torch.tensor([0.0, 1.0]).softmax(0)) / 2
    torch.testing.assert_close(out[0, :, 2, 1], expected)


@torch.no_grad()
def test_with_a_segmenter() -> None:
    """A window larger than the image is the whole image; small scales of a small image work."""
    model = create_segmenter("semantic_fpn", ATMNet(**TINY), 4, width=8, neck_width=8).eval()
    images = torch.randn(1, 3, 45, 70)
    whole = predict_probabilities(model, images)
    assert whole.shape == (1, 4, 45, 70)
    torch.testing.assert_close(predict_probabilities(model, images, window=100), whole)
    assert not torch.allclose(predict_probabilities(model, images, window=32, stride=20), whole)
    assert predict_probabilities(model, images[..., :1, :], scales=(0.25, 1.0), flip=True).shape == (1, 4, 1, 70)


class LargestTensor(TorchDispatchMode):
    """Number of values of the largest tensor that is created."""

    values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            self.values = max(self.values, out.numel())
        return out


OPTIONS = [
    {},
    {"size": (45, 70)},
    {"size": (101, 203)},
    {"size": (7, 300)},
    {"size": (201, 303), "flip": True},
    {"size": (20, 31), "scales": (0.5, 1.3), "flip": True},
    {"size": (201, 303), "scales": (0.5, 1.3), "window": 30},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("strip", [1, 2000, 2**23])
def test_classes_are_the_argmax_of_the_probabilities(monkeypatch: pytest.MonkeyPatch, options: Any, strip: int) -> None:
    """Except where two classes have equal probabilities up to rounding."""
    monkeypatch.setattr(sliding_window, "STRIP_VALUES", strip)
    images = torch.randn(2, 3, 45, 70)
    classes = predict_classes(pixelwise, images, **options)
    best, order = predict_probabilities(pixelwise, images, **options).topk(2, dim=1)
    assert classes.dtype == torch.int64
    assert classes.shape == order[:, 0].shape
    assert ((classes == order[:, 0]) | (best[:, 0] - best[:, 1] < 1e-5)).all()
    assert (classes == order[:, 0]).float().mean() > 0.999


@pytest.mark.parametrize("options", [{}, {"flip": True}, {"scales": (0.5, 1.5)}], ids=str)
def test_classes_of_a_large_image_need_little_memory(monkeypatch: pytest.MonkeyPatch, options: Any) -> None:
    """No tensor has more values than pixels; the probabilities would have four times as many."""
    monkeypatch.setattr(sliding_window, "STRIP_VALUES", 2**14)
    with LargestTensor() as largest:
        classes = predict_classes(pixelwise, torch.randn(1, 3, 30, 40), size=(600, 800), **options)
    assert largest.values == classes.numel() == 600 * 800


def test_bad_arguments() -> None:
    images = torch.zeros(1, 3, 8, 8)
    with pytest.raises(ValueError, match="windows of 4x4 px need strides from 1 px to their own size, got 6x6 px"):
        sliding_window_logits(pixelwise, images, 4, 6)
    with pytest.raises(ValueError, match=r"scales must be one or more positive numbers, got \(\)"):
        predict_probabilities(pixelwise, images, scales=())
    with pytest.raises(ValueError, match=r"scales must be one or more positive numbers, got \(\)"):
        predict_classes(pixelwise, images, scales=())
    with pytest.raises(ValueError, match=r"positive numbers, got \(0.5, -1\)"):
        predict_probabilities(pixelwise, images, scales=(0.5, -1))
