"""Statistics over a folder of images."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from tests.explain.models import column, images
from tokamix.data.decode import DataError
from tokamix.explain import Explainer, Statistics, capture, collect_statistics
from tokamix.explain.mixing import mixing_distance
from tokamix.inference import InferenceConfig


def explainer(mixer: str) -> Explainer:
    model = column(mixer).float()
    return Explainer(model, InferenceConfig.from_model(model, ("a", "b", "c"), image_size=32), mixer)


@pytest.fixture
def folder(tmp_path):
    for i in range(5):
        noise = np.random.default_rng(i).integers(0, 255, (36, 40, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / f"{i}.png")
    (tmp_path / "6.png").write_bytes(b"no image")
    return tmp_path


def test_batches_do_not_matter(folder) -> None:
    seen = []
    small = collect_statistics(explainer("softmax"), folder, 2, lambda *numbers: seen.append(numbers))
    assert seen == [(2, 6), (4, 6), (6, 6)]
    assert small.images == 5
    assert len(small.skipped) == 1
    assert "6.png" in small.skipped[0]
    with pytest.raises(DataError, match=r"none of the 1 images could be read; the first: .*6\.png"):
        collect_statistics(explainer("softmax"), [folder / "6.png"])


def test_streams_equal_one_batch() -> None:
    model, batch = column("softmax"), images(4)
    whole, parts = Statistics(), Statistics()
    whole.update(capture(model, batch))
    for part in batch.split(1):
        parts.update(capture(model, part))
    for a, b in zip(whole.layers, parts.layers, strict=True):
        torch.testing.assert_close(a.distance, b.distance)
        assert torch.equal(a.entropies, b.entropies)
        assert a.similarity == pytest.approx(b.similarity)
        assert a.rank == pytest.approx(b.rank)
    torch.testing.assert_close(whole.layers[0].distance, mixing_distance(capture(model, batch)[0]).mean(0))


def test_uniform_attention_fills_the_last_bin() -> None:
    model = column("softmax")
    nn.init.zeros_(model.blocks[0].mixer.qkv.weight)
    result = Statistics()
    result.update(capture(model, images()))
    layer = result.layers[0]
    assert layer.highest == math.log(64)
    assert layer.entropies[:, -1].tolist() == [128, 128]  # 2 images of 64 tokens
    assert layer.entropies.sum() == 256
    assert float(layer.entropy[0]) == pytest.approx(math.log(64), rel=0.01)


def test_spread_of_offsets() -> None:
    model = column("active_token", depth=1)
    linear = model.blocks[0].mixer.offset[1]
    nn.init.zeros_(linear.weight)
    with torch.no_grad():
        linear.bias[:8] = torch.tensor([-2.0, 2.0] * 4)  # horizontally two away on both sides
    result = Statistics()
    result.update(capture(model, images()))
    assert result.layers[0].offset_spread == pytest.approx((2 / 8, 0))
    with pytest.raises(ValueError, match="is not softmax attention: it has no entropy"):
        _ = result.layers[0].entropy


def test_sizes_must_agree() -> None:
    model, result = column("softmax"), Statistics()
    result.update(capture(model, images()))
    with pytest.raises(ValueError, match=r"images of one size are needed: blocks.0.mixer had \(8, 8\), got \(8, 4\)"):
        result.update(capture(model, images(1, 32, 16)))
    with pytest.raises(ValueError, match="has no sampling offsets"):
        _ = result.layers[0].offset_spread
