"""RoIAlign over a pyramid: gradients, and what it refuses."""

import pytest
import torch

from tokamix.ops.roi_align.op import align_regions

BOXES = torch.tensor([[2.0, 3, 17, 19], [0, 0, 40, 30], [-5, 4, 9, 50]])
IMAGE, LEVEL = torch.tensor([0, 1, 1]), torch.tensor([0, 1, 0])


def test_gradients() -> None:
    maps = [torch.randn(2, 3, 12 >> i, 10 >> i, dtype=torch.float64, requires_grad=True) for i in range(2)]
    torch.autograd.gradcheck(lambda *maps: align_regions(maps, BOXES.double(), IMAGE, LEVEL, 3, (4, 8)), maps)


def test_regions_come_from_their_image_and_level() -> None:
    maps = [torch.full((2, 1, 12 >> i, 10 >> i), 10.0 * i) + torch.arange(2.0).view(2, 1, 1, 1) for i in range(2)]
    pooled = align_regions(maps, BOXES[:2], IMAGE[:2], LEVEL[:2], 3, (4, 8))
    assert pooled.flatten(1).tolist() == [[0.0] * 9, [11.0] * 9]


def test_errors() -> None:
    with pytest.raises(ValueError, match="2 maps came with 1 strides"):
        align_regions([torch.zeros(1, 1, 4, 4)] * 2, BOXES, IMAGE, LEVEL, 3, (4,))
