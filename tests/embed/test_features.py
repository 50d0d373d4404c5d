"""Features: layers, pooling, effective rank, and chunked search."""

import pytest
import timm
import torch
import torch.distributed as dist
import torch.nn.functional as F

import tokamix
from tokamix.embed import FeatureExtractor, effective_rank, search
from tokamix.embed.features import feature_std, gather
from tokamix.embed.search import nearest

CPU = torch.device("cpu")
BODY = {"patch_size": 4, "dim": 16, "depth": 3, "num_heads": 2, "mlp_ratio": 2, "img_size": 16}


@torch.no_grad()
def test_pooling_of_columns_and_pyramids() -> None:
    images = torch.randn(2, 3, 16, 16)
    column = tokamix.create_model("columnar_tiny_sima", num_classes=5, **BODY).eval()
    own = FeatureExtractor(column)(images)
    torch.testing.assert_close(own, column.forward_head(column.forward_features(images), pre_logits=True))
    torch.testing.assert_close(FeatureExtractor(column, "avg")(images), own)  # it pools by the mean itself
    second = FeatureExtractor(column, "avg", layer=1)(images)
    torch.testing.assert_close(second, FeatureExtractor(column, "avg", layer=-2)(images))
    expected = column.forward_intermediates(images, indices=[1], norm=True, intermediates_only=True)[0]
    torch.testing.assert_close(second, expected.mean((2, 3)))
    vit = timm.create_model("test_vit", num_classes=5, img_size=16).eval()
    torch.testing.assert_close(FeatureExtractor(vit, "token")(images), vit.forward_features(images)[:, 0])
    last = vit.forward_intermediates(images, indices=1, norm=True, return_prefix_tokens=True, intermediates_only=True)
    torch.testing.assert_close(FeatureExtractor(vit, "token", layer=-1)(images), last[0][1][:, 0])
    assert FeatureExtractor(timm.create_model("test_resnet").eval(), "avg", layer=2)(images).shape[0] == 2


@pytest.mark.parametrize("name", ["xcit_nano_12_p16_sima", "xcit_nano_12_p16_224"])
@torch.no_grad()
def test_four_vectors_of_xcit(name: str) -> None:
    """Means of the last two blocks, class tokens of the two class-attention blocks; the last equals the class token."""
    model = tokamix.create_model(name, num_classes=0).eval()
    images = torch.randn(2, 3, 32, 32)
    extractor = FeatureExtractor(model, "concat")
    features = extractor(images)
    width = model.num_features
    assert features.shape == (2, 4 * width)
    torch.testing.assert_close(features[:, -width:], model.forward_features(images)[:, 0])
    blocks = model.forward_intermediates(images, indices=2, norm=True, intermediates_only=True)
    for i, block in enumerate(blocks):
        torch.testing.assert_close(features[:, i * width : (i + 1) * width], block.mean((2, 3)))
    torch.testing.assert_close(extractor(images[:1]), features[:1])  # outputs of an earlier batch are gone


def test_bad_layers_and_pools() -> None:
    column = tokamix.create_model("columnar_tiny_sima", num_classes=5, **BODY)
    for arguments, message in (
        (("sum", None), r"pool is 'sum', but must be one of model, token, avg, concat"),
        (("token", None), "ColumnarBody has no class token; use pool avg or model"),
        (("concat", None), "ColumnarBody has no two class-attention blocks"),
        (("model", 1), "pool 'model' has its own layers; leave out the layer"),
        (("avg", 3), "ColumnarBody has no layer 3: it has 3, 0 to 2"),
    ):
        with pytest.raises(ValueError, match=message):
            FeatureExtractor(column, *arguments)
    xcit = tokamix.create_model("xcit_nano_12_p16_sima", num_classes=0)
    with pytest.raises(ValueError, match="XCiTSimA has no class token in layer 0; use pool avg"):
        FeatureExtractor(xcit, "token", 0)(torch.randn(2, 3, 32, 32))


def test_rows_of_processes_are_in_the_order_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise the held-out images of a linear evaluation would depend on the number of processes."""
    rows = torch.arange(14).view(7, 2)
    assert torch.equal(gather([rows[:4], rows[4:]], CPU), rows)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 3)
    for split, expected in (
        ([rows[0::3].split(2), rows[1::3].split(2), rows[2::3].split(2)], rows),
        ([[rows[:5]], [rows[5:6]], [rows[6:]]], rows),  # of a stream: one after the other
        ([[rows[:5]], [], [rows[5:]]], rows),
    ):
        monkeypatch.setattr(
            dist, "all_gather_object", lambda out, own, split=split: out.__setitem__(slice(None), split)
        )
        assert torch.equal(gather([rows], CPU), expected)
    monkeypatch.setattr(dist, "all_gather_object", lambda out, own: out.__setitem__(slice(None), [[], [], []]))
    with pytest.raises(ValueError, match="there are no images to compute features of"):
        gather([], CPU)


def test_effective_rank_and_std() -> None:
    even = torch.cat([torch.eye(8), -torch.eye(8)])
    assert effective_rank(even) == pytest.approx(100.0, abs=1e-3)
    line = torch.arange(20.0)[:, None] * torch.ones(8)
    assert effective_rank(line) == pytest.approx(100 / 8, abs=0.1)
    assert effective_rank(torch.ones(20, 8)) == 0.0
    sphere = F.normalize(torch.randn(4000, 16), dim=1)
    assert float(feature_std(sphere)) == pytest.approx(1.0, abs=0.02)
    assert float(feature_std(torch.ones(20, 8))) == pytest.approx(0.0, abs=1e-6)


def test_search_in_chunks_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "CHUNK", 7)
    queries, features = torch.randn(5, 6), torch.randn(50, 6)
    similarity, index = nearest(queries, features.split([20, 3, 27]), 9)
    expected = (queries @ features.T).sort(dim=1, descending=True)
    torch.testing.assert_close(similarity, expected.values[:, :9])
    assert torch.equal(index, expected.indices[:, :9])
    assert nearest(queries, features[:4], 9)[0].shape == (5, 4)
