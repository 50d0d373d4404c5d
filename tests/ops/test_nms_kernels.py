"""The NMS kernel against torchvision, under Triton's interpreter or on a GPU."""

import pytest
import torch

from tests.ops.kernels import DEVICE
from tokamix.ops.nms.op import batched_nms


@pytest.mark.parametrize(("lists", "count"), [(1, 1), (3, 7), (5, 65), (2, 300)])
@pytest.mark.parametrize("iou_threshold", [0.3, 0.7])
def test_against_torchvision(lists: int, count: int, iou_threshold: float, poison_empty: None) -> None:
    torch.manual_seed(0)
    boxes = torch.rand(lists, count, 4, device=DEVICE) * 20
    boxes[..., 2:] += boxes[..., :2]
    valid = torch.rand(lists, count, device=DEVICE) > 0.2
    got, expected = (batched_nms(boxes, valid, iou_threshold, backend=backend) for backend in ("triton", "eager"))
    assert torch.equal(got, expected)
    assert expected.any()


def test_expanded_and_degenerate(poison_empty: None) -> None:
    """Boxes shared by lists; zero-area boxes, whose IoU is 0 / 0; a list without valid boxes; an IoU of exactly 0.5."""
    boxes = torch.tensor([[0.0, 0, 10, 10], [0, 0, 0, 0], [0, 0, 0, 0], [0, 0, 10, 20]], device=DEVICE)
    valid = torch.tensor([[True] * 4, [False] * 4, [False, True, True, True]], device=DEVICE)
    got = batched_nms(boxes.expand(3, -1, -1), valid, 0.5, backend="triton")
    assert torch.equal(got, valid)
    assert batched_nms(boxes[None, :0], valid[:1, :0], 0.5, backend="triton").shape == (1, 0)


def test_a_long_chain() -> None:
    """Each kept box suppresses the next one, so every second box is kept."""
    left = torch.arange(150.0, device=DEVICE) * 3
    boxes = torch.stack([left, left * 0, left + 10, left * 0 + 10], 1)[None]
    keep = batched_nms(boxes, torch.ones(1, 150, dtype=torch.bool, device=DEVICE), 0.5, backend="triton")
    assert keep[0].tolist() == [True, False] * 75


def test_opcheck() -> None:
    boxes = torch.tensor([[[0.0, 0, 10, 10], [1, 0, 11, 10]]], device=DEVICE)
    valid = torch.ones(1, 2, dtype=torch.bool, device=DEVICE)
    torch.library.opcheck(torch.ops.tokamix.batched_nms, (boxes, valid, 0.5, True))
