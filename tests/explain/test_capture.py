"""Capturing: what is found, that nothing stays behind, and bad input."""

import pytest
import timm
import torch
from torch import nn

import tokamix
from tests.explain.models import captured, column, images, pyramid
from tokamix.explain.capture import capture

# name: arguments, number of layers, kind, grid and prefix tokens of the last layer, for images of 64 px
HOSTS = {
    "deit_tiny_distilled_patch16_224": ({"img_size": 64, "depth": 2}, 2, "softmax", (4, 4), 2),
    "deit_small_sima": ({"img_size": 64, "depth": 2}, 2, "sima", (4, 4), 1),
    "swin_tiny_patch4_window7_224": ({"img_size": 64, "depths": (1, 1)}, 2, "WindowAttention", (8, 8), 0),
    "pvt_small": ({"depths": (1, 1, 1, 1)}, 4, "softmax", (2, 2), 1),
    "cvt_13_sima": ({"depths": (1, 1, 1)}, 3, "sima", (4, 4), 1),
    "poolformer_s12": ({}, 12, "Pooling", (2, 2), 0),
    "atmnet_xtiny": ({"depths": (1, 1)} | {"dims": (8, 8), "shares": (2, 2)}, 2, "active_token", (8, 8), 0),
}


@pytest.mark.parametrize("name", HOSTS)
def test_hosts(name: str) -> None:
    kwargs, count, kind, grid, prefix = HOSTS[name]
    result = capture(timm.create_model(name, **kwargs).eval(), torch.randn(2, 3, 64, 64))
    last = result[-1]
    assert (len(result), last.layer.kind, last.grid, last.prefix) == (count, kind, grid, prefix)
    tokens = (2, prefix + grid[0] * grid[1])
    assert last.x.shape[:2] == last.tokens.shape[:2] == last.mix(last.x).shape[:2] == tokens
    torch.testing.assert_close(last.mix(last.x[:1].expand(3, -1, -1), image=0)[2], last.mix(last.x)[0])


def test_wide_images_and_labels() -> None:
    result = capture(pyramid("softmax"), images(1, 32, 48))
    assert [layer.grid for layer in result] == [(8, 12), (4, 6), (4, 6)]
    assert [layer.layer.label for layer in result] == ["stage 1, block 1", "stage 2, block 1", "stage 2, block 2"]
    assert result[0].stride == (4, 4)
    assert result["stages.1.blocks.1.mixer"] is result[2] is result[-1]
    assert result[2].token_at(0.99, 0.0) == (3, 0)
    assert result[2].token_at(1.0, 1.0) == (3, 5)


def test_the_output_and_the_tokens_are_those_of_a_plain_pass() -> None:
    model, batch = column("sima"), images()
    result = capture(model, batch)
    torch.testing.assert_close(result.output, model(batch))
    last = model.forward_intermediates(batch, indices=[-1], intermediates_only=True, output_fmt="NLC")[0]
    torch.testing.assert_close(result[-1].tokens, last)


def hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_nothing_stays_behind() -> None:
    model = column("softmax").train()
    model.norm.eval()
    capture(model, images())
    assert hooks(model) == 0
    assert model.training
    assert not model.norm.training
    with pytest.raises(ValueError, match=r"needs images of shape \(B, 3, H, W\)"):
        capture(model, torch.zeros(1, 4, 32, 32))
    assert hooks(model) == 0
    assert model.training
    assert all(p.grad is None for p in model.parameters())


def test_compiled_models_are_captured_and_not_compiled_again() -> None:
    graphs = []

    def count_graphs(graph, inputs):
        graphs.append(graph)
        return graph.forward

    model, batch = column("softmax"), images()
    compiled = torch.compile(model, backend=count_graphs, fullgraph=True)
    expected = compiled(batch)
    before = len(graphs)
    assert before > 0
    result = capture(compiled, batch)
    assert len(result) == 2
    torch.testing.assert_close(result.output, expected)
    torch.testing.assert_close(compiled(batch), expected)
    assert len(graphs) == before


def test_inference_mode_outside() -> None:
    with torch.inference_mode():
        result = capture(column("active_token"), images())
    assert not result[0].x.is_inference()


def test_swapped_models() -> None:
    model = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=2)
    tokamix.swap_mixer(model)
    assert {layer.layer.kind for layer in capture(model, torch.randn(1, 3, 64, 64))} == {"sima"}


def test_bad_input() -> None:
    result = captured("softmax")
    with pytest.raises(ValueError, match=r"there is no layer 2: the model has 2, 0 to 1, from blocks\.0\.mixer to"):
        result[2]
    with pytest.raises(ValueError, match=r"position \(1.5, 0\) is outside of the image"):
        result[0].token_at(1.5, 0)
    with pytest.raises(ValueError, match=r"capture needs a batch of images \(B, C, H, W\), got shape \(3, 32, 32\)"):
        capture(column("softmax"), torch.zeros(3, 32, 32))
    with pytest.raises(ValueError, match="ResNet has no token mixers that tokamix finds"):
        capture(timm.create_model("resnet10t"), torch.zeros(1, 3, 32, 32))
