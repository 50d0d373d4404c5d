"""Models as CUDA graphs give what the models give."""

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.dense.detectors import CLASSES, small
from tokamix.dense import GraphedModel, create_segmenter
from tokamix.dense.graphed import _compiled
from tokamix.dense.segmenter import Segmenter


def segmenter() -> Segmenter:
    return create_segmenter("semantic_fpn", "test_resnet", CLASSES, width=16, neck_width=16).eval()


def test_what_cannot_be_recorded() -> None:
    with pytest.raises(ValueError, match="on a GPU and in evaluation mode, this one is on cpu, evaluating"):
        GraphedModel(segmenter(), torch.randn(1, 3, 64, 64))


def test_copies_have_their_own_weights() -> None:
    """What is compiled while a segmenter is recorded does not stay with it."""
    model = segmenter()
    with _compiled(model):
        assert "decode" in vars(model)
    copied = copy.deepcopy(model)
    for weight in copied.head.parameters():
        weight.data.zero_()
    maps = [torch.randn(1, c, 8 >> i, 8 >> i) for i, c in enumerate(copied.backbone.channels)]
    assert not copied.decode(maps, (8, 8)).any()
    assert pickle.loads(pickle.dumps(model)).decode(maps, (8, 8)).any()


def assert_same(got: Tensor | list, expected: Tensor | list) -> None:
    if isinstance(expected, Tensor):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
        return
    for a, b in zip(got, expected, strict=True):
        assert a.keys() == b.keys()
        scores = b["scores"]
        torch.testing.assert_close(a["scores"], scores, rtol=1e-4, atol=1e-5)
        apart = (scores[:-1] - scores[1:] > 1e-4).float()  # others may change places
        alone = torch.cat([apart.new_ones(1), apart]) * torch.cat([apart, apart.new_zeros(1)]) > 0
        assert alone.sum() > 2  # few in bfloat16, where many scores are equal
        torch.testing.assert_close(a["boxes"][alone], b["boxes"][alone], rtol=1e-3, atol=1e-2)
        torch.testing.assert_close(a["labels"][alone], b["labels"][alone])
        if "masks" in b:
            assert (a["masks"][alone] ^ b["masks"][alone]).float().mean() < 1e-2


@pytest.fixture(autouse=True)
def without_tf32() -> Iterator[None]:
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


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
    recorded = GraphedModel(model, first, compiled)
    recorded(first)
    assert_same(recorded(second), expected[1])
    assert_same(recorded(first), expected[0])
    for weight in model.backbone.parameters():
        weight.mul_(1.01)
    assert_same(recorded(first), model(first))
    assert len(pickle.dumps(model)) > 1000
    with torch.autocast("cuda", torch.bfloat16):
        assert_same(GraphedModel(model, first, compiled=False)(second), model(second))
    with pytest.raises(ValueError, match="record again"):
        recorded(first[:1])
    if method != "semantic_fpn":
        sizes = [(48, 64), (192, 256)]
        assert_same(recorded(first, sizes), model(first, sizes=sizes))
        with pytest.raises(ValueError, match="multiples of 32"):
            GraphedModel(model, first[..., :100], compiled)
