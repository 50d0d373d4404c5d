"""Batched NMS: hand-computed cases and comparison with torchvision."""

import pytest
import torch
from torchvision import ops as torchvision_ops

from tokamix.ops.nms.op import batched_nms


def test_by_hand() -> None:
    """The first box suppresses the second; the second is gone and so does not suppress the third."""
    boxes = torch.tensor([[0.0, 0, 10, 10], [3, 0, 13, 10], [6, 0, 16, 10], [0, 0, 10, 20], [0, 0, 0, 0]])
    everything = torch.ones(1, 5, dtype=torch.bool)
    assert batched_nms(boxes[None], everything, 0.5).tolist() == [
        [True, False, True, True, True]
    ]  # an IoU of exactly 0.5
    assert batched_nms(boxes[None], everything, 0.49).tolist() == [[True, False, True, False, True]]
    without_first = everything.clone()
    without_first[0, 0] = False
    assert batched_nms(boxes[None], without_first, 0.5).tolist() == [[False, True, False, True, True]]


def test_lists_are_independent() -> None:
    torch.manual_seed(0)
    boxes = torch.rand(2, 3, 40, 4) * 20
    boxes[..., 2:] += boxes[..., :2]
    valid = torch.rand(2, 3, 40) > 0.3
    got = batched_nms(boxes, valid, 0.4)
    lists = torch.arange(6).view(2, 3, 1).expand_as(valid)
    order = torch.arange(40, 0, -1.0).expand_as(valid)
    expected = torch.zeros(valid.numel(), dtype=torch.bool)
    index = valid.flatten().nonzero()[:, 0]
    rows = boxes.view(-1, 4)[index], order.flatten()[index], lists.flatten()[index]
    expected[index[torchvision_ops.batched_nms(*rows, 0.4)]] = True
    assert torch.equal(got, expected.view_as(valid))


def test_opcheck_of_the_reference() -> None:
    valid = torch.ones(7, 5, dtype=torch.bool).T
    torch.library.opcheck(torch.ops.tokamix.batched_nms, (torch.rand(5, 7, 4), valid, 0.5, False))


def test_one_list() -> None:
    boxes = torch.tensor([[0.0, 0, 10, 10], [1, 0, 11, 10]])
    assert batched_nms(boxes, torch.tensor([True, True]), 0.5).tolist() == [True, False]


def test_no_valid_boxes_and_no_boxes() -> None:
    assert not batched_nms(torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.bool), 0.5).any()
    assert batched_nms(torch.zeros(2, 0, 4), torch.zeros(2, 0, dtype=torch.bool), 0.5).shape == (2, 0)


def test_compiles_without_graph_break() -> None:
    call = torch.compile(lambda boxes, valid: batched_nms(boxes, valid, 0.5), backend="aot_eager", fullgraph=True)
    boxes = torch.tensor([[[0.0, 0, 10, 10], [1, 0, 11, 10]]])
    assert call(boxes, torch.ones(1, 2, dtype=torch.bool)).tolist() == [[True, False]]


def test_errors() -> None:
    with pytest.raises(ValueError, match=r"needs boxes \(..., N, 4\) and valid \(..., N\)"):
        batched_nms(torch.zeros(2, 3, 4), torch.zeros(2, 4, dtype=torch.bool), 0.5)
