"""A CUDA graph of a model gives the same outputs as the model."""

import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.dense.detectors import CLASSES, small_detector
from tokamix.dense import GraphedModel, create_segmenter
from tokamix.dense.graphed import _compiled
from tokamix.dense.segmenter import Segmenter


def segmenter() -> Segmenter:
    return create_segmenter("semantic_fpn", "test_resnet", CLASSES, width=16, neck_width=16).eval()


def test_needs_a_gpu() -> None:
    with pytest.raises(ValueError, match="images on a GPU and a model in evaluation mode, got cpu images"):
        GraphedModel(segmenter(), torch.randn(1, 3, 64, 64))


def test_copies_have_their_own_weights() -> None:
    """The compiled function is removed from the segmenter after the capture."""
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
        apart = (scores[:-1] - scores[1:] > 1e-4).float()  # close scores may swap
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
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("method", ["semantic_fpn", "mask_rcnn", "cascade_mask_rcnn", "retinanet"])
@torch.no_grad()
def test_graphed(method: str, compiled: bool) -> None:
    """Also for images other than those of the capture, and after the weights changed."""
    torch.manual_seed(0)
    model = (segmenter() if method == "semantic_fpn" else small_detector(method, spread=1.0)).cuda()
    if method != "semantic_fpn":
        model.score_threshold = 0.0
    first, second = torch.randn(2, 2, 3, 96, 128, device="cuda").unbind()
    expected = model(first), model(second)
    graphed = GraphedModel(model, first, compiled)
    graphed(first)
    assert_same(graphed(second), expected[1])
    assert_same(graphed(first), expected[0])
    for weight in model.backbone.parameters():
        weight.mul_(1.01)
    assert_same(graphed(first), model(first))
    assert len(pickle.dumps(model)) > 1000
    with torch.autocast("cuda", torch.bfloat16):
        assert_same(GraphedModel(model, first, compiled=False)(second), model(second))
    with pytest.raises(ValueError, match="create a new GraphedModel"):
        graphed(first[:1])
    if method != "semantic_fpn":
        sizes = [(48, 64), (192, 256)]
        assert_same(graphed(first, sizes), model(first, sizes=sizes))
        with pytest.raises(ValueError, match="multiples of 32"):
            GraphedModel(model, first[..., :100], compiled)
