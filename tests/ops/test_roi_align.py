"""Multi-scale RoIAlign: gradients, level selection and errors."""

import pytest
import torch

from tokamix.ops.roi_align.op import multiscale_roi_align

BOXES = torch.tensor([[2.0, 3, 17, 19], [0, 0, 40, 30], [-5, 4, 9, 50]])
IMAGE, LEVEL = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])


def test_gradients() -> None:
    maps = [torch.randn(2, 3, 12 >> i, 10 >> i, dtype=torch.float64, requires_grad=True) for i in range(2)]
    torch.autograd.gradcheck(lambda *maps: multiscale_roi_align(maps, BOXES.double(), IMAGE, LEVEL, 3, (4, 8)), maps)


def test_boxes_are_pooled_from_their_image_and_level() -> None:
    maps = [torch.full((2, 1, 12 >> i, 10 >> i), 10.0 * i) + torch.arange(2.0).view(2, 1, 1, 1) for i in range(2)]
    pooled = multiscale_roi_align(maps, BOXES[:2], IMAGE[:2], LEVEL[:2], 3, (4, 8))
    assert pooled.flatten(1).tolist() == [[0.0] * 9, [11.0] * 9]


def test_errors() -> None:
    with pytest.raises(ValueError, match="got 2 feature maps and 1 strides"):
        multiscale_roi_align([torch.zeros(1, 1, 4, 4)] * 2, BOXES, IMAGE, LEVEL, 3, (4,))
