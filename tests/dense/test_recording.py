"""Models as CUDA graphs give what the models give."""

import pytest
import torch
from torch import Tensor

from tests.dense.detectors import CLASSES, small
from tokamix.dense import Recorded, create_segmenter
from tokamix.dense.segmenter import Segmenter


def segmenter() -> Segmenter:
    return create_segmenter("semantic_fpn", "test_resnet", CLASSES, width=16, neck_width=16).eval()


def test_what_cannot_be_recorded() -> None:
    with pytest.raises(ValueError, match="on a GPU and in evaluation mode, this one is on cpu, evaluating"):
        Recorded(segmenter(), torch.randn(1, 3, 64, 64))


def assert_same(got: Tensor | list, expected: Tensor | list) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
        return
    for a, b in zip(got, expected, strict=True):
        assert a.keys() == b.keys()
        assert len(b["scores"])
        torch.testing.assert_close(a["scores"], b["scores"], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(a["boxes"], b["boxes"], rtol=1e-3, atol=1e-1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", ["semantic_fpn", "mask_rcnn", "cascade_mask_rcnn", "retinanet"])
@torch.no_grad()
def test_recorded(method: str, compiled: bool) -> None:
    """Also of other images than those it was recorded with, and after the weights changed."""
    torch.manual_seed(0)
    model = (segmenter() if method == "semantic_fpn" else small(method, spread=1.0)).cuda()
    if method != "semantic_fpn":
        model.least_score = 0.0
    first, second = torch.randn(2, 2, 3, 96, 128, device="cuda").unbind()
    expected = model(first), model(second)
    recorded = Recorded(model, first, compiled)
    assert_same(recorded(second), expected[1])
    assert_same(recorded(first), expected[0])
    for weight in model.backbone.parameters():
        weight.mul_(1.01)
    assert_same(recorded(first), model(first))
    with pytest.raises(ValueError, match="record again"):
        recorded(first[:1])
    if method != "semantic_fpn":
        with pytest.raises(ValueError, match="multiples of 32"):
            Recorded(model, first[..., :100], compiled)
