"""The papers' quantities on constructed models with known answers."""

import math

import pytest
import timm
import torch
from torch import nn

from tests.explain.models import captured, column, first_layer, images, pyramid
from tokamix.explain import active_token, attention, depth, sima, super_token, weight_mixing
from tokamix.explain.capture import capture
from tokamix.explain.saliency import integrated_gradients
from tokamix.ops import super_token_sample


def with_offsets(across: float, down: float, **options):
    """A column whose tokens all sample at fixed offsets."""
    model = column("active_token", depth=1, mixer_kwargs=options)
    linear = model.blocks[0].mixer.offset[1]
    nn.init.zeros_(linear.weight)
    with torch.no_grad():
        contexts = linear.bias.view(options.get("contexts", 1), 2, -1)
        contexts[:, 0], contexts[:, 1] = across, down
    return capture(model, images())[0]


def test_fixed_offsets_give_their_positions() -> None:
    layer = with_offsets(2.25, -1.0)
    offsets = active_token.sampling_offsets(layer)
    assert offsets.shape == (2, 8, 8, 2, 8)
    assert (offsets[..., 0, :] == 2.25).all()
    assert (offsets[..., 1, :] == -1).all()
    counts = active_token.sampled_positions(layer, (4, 3))
    expected = torch.zeros(2, 8, 8, dtype=torch.float64)
    expected[0, 4, 5], expected[0, 4, 6] = 0.75, 0.25
    expected[1, 3, 3] = 1
    torch.testing.assert_close(counts, expected.expand(2, -1, -1, -1))
    assert active_token.sampled_positions(layer, (4, 7))[:, 0].sum() == 0  # beyond the border
    across, down = active_token.offset_histogram(layer)
    assert across.tolist() == [0, 0, 0, 0, 0, 0, 16, 0]  # 2 images, 8 groups of channels, bin 4 is offset 0
    assert down.tolist() == [0, 0, 0, 16, 0, 0, 0, 0]


def test_joint_offsets_and_several_contexts() -> None:
    counts = active_token.sampled_positions(with_offsets(1.0, 2.0, offsets="joint"), (4, 3))
    assert counts.shape == (2, 1, 8, 8)
    assert counts[0, 0, 6, 4] == 1
    layer = with_offsets(100.0, -1.0, contexts=3)
    assert active_token.sampling_offsets(layer).shape == (2, 8, 8, 2, 24)
    assert active_token.offset_histogram(layer)[0].tolist() == [0] * 7 + [48]  # far offsets count for the last bin


def test_offsets_of_atmnet_are_those_its_blocks_share() -> None:
    model = timm.create_model("atmnet_xtiny", depths=(2, 1), dims=(8, 8), shares=(2, 2)).eval()
    result = capture(model, torch.randn(1, 3, 32, 32))
    first, second = (active_token.sampling_offsets(layer) for layer in list(result)[:2])
    assert torch.equal(first, second)


def test_super_tokens_are_those_of_the_operator() -> None:
    layer = capture(column("super_token", mixer_kwargs={"cell": (3, 2), "n_iter": 2}), images())[0]
    tokens, near = super_token_sample(layer.x.unflatten(1, (8, 8)), (3, 2), 2)
    own, association, _ = super_token.super_tokens(layer)
    torch.testing.assert_close(own, tokens)
    assert super_token.super_token_grid(layer) == (3, 4)
    assert association.shape == (2, 64, 12)
    # token (4, 5) lies in cell (1, 2), whose neighbours are rows 0 to 2 and columns 1 to 3
    dense = association[:, 4 * 8 + 5].unflatten(1, (3, 4))
    torch.testing.assert_close(dense[:, :, 1:].flatten(1), near[:, 4, 5])
    assert (dense[:, :, 0] == 0).all()
    one = super_token.super_token_association(layer, (1, 2))
    torch.testing.assert_close(one[:, 4, 5], near[:, 4, 5, 4])


def test_regions_follow_a_boundary_in_the_tokens() -> None:
    """Left and right halves that differ strongly: no super token owns tokens of both in the middle of a cell."""
    model = column("super_token", mixer_kwargs={"cell": 3, "n_iter": 3})
    layer = capture(model, images(1))[0]
    tokens = torch.zeros(1, 8, 8, 16, dtype=torch.float64)
    tokens[:, :, :4, 0], tokens[:, :, 4:, 1] = 40, 40
    layer.x = tokens.flatten(1, 2)
    regions = super_token.super_token_regions(layer)[0]
    assert not set(regions[:, :4].flatten().tolist()) & set(regions[:, 4:].flatten().tolist())


def test_attention_of_equal_super_tokens_is_uniform() -> None:
    model = column("super_token", mixer_kwargs={"cell": 4})
    nn.init.zeros_(model.blocks[0].mixer.refine.qkv.weight)
    layer = capture(model, images())[0]
    association = super_token.super_tokens(layer)[1]
    seen = super_token.super_token_attention(layer, (0, 1))
    torch.testing.assert_close(seen, (association.sum(-1) / 4).unflatten(1, (8, 8))[:, None].expand(-1, 2, -1, -1))


def test_a_bank_that_is_a_delta() -> None:
    """Bank entry 0 is large for sources one row above: every token takes that one."""
    model = column("weight_mixing", depth=1, mixer_kwargs={"adaptive": False, "activation": "softmax"})
    mixer = model.blocks[0].mixer
    with torch.no_grad():
        mixer.bank.zero_()
        mixer.bank.unflatten(1, (15, 15))[0, 6, 7] = 1000  # the middle is (7, 7)
    layer = capture(model, images(1))[0]
    bank = weight_mixing.weight_bank(layer)
    assert bank.shape == (2, 15, 15)
    assert bank[0].argmax() == 6 * 15 + 7
    weights = weight_mixing.composed_weights(layer, torch.tensor([3 * 8 + 5]))[0, :, 0].unflatten(1, (8, 8))
    assert weights[0, 2, 5] == 1
    torch.testing.assert_close(weights[1], torch.full((8, 8), 1 / 64, dtype=torch.float64))


def test_norms_of_queries_and_keys() -> None:
    layer = first_layer("sima")
    q, _ = attention.queries_and_keys(layer)
    q_norm, k_norm = sima.query_key_norms(layer)
    torch.testing.assert_close(q_norm, (q / q.abs().sum(2, keepdim=True)).square().sum(-1).sqrt())
    assert q_norm.shape == k_norm.shape == (2, 2, 64)
    softmax = first_layer("softmax")
    plain = sima.query_key_norms(softmax, normalise=False)[1]
    torch.testing.assert_close(plain, attention.queries_and_keys(softmax)[1].norm(dim=-1))
    none = first_layer("sima", mixer_kwargs={"norm": None})
    torch.testing.assert_close(sima.query_key_norms(none)[0], attention.queries_and_keys(none)[0].norm(dim=-1))


def test_uniform_attention_has_entropy_log_n() -> None:
    model = timm.create_model("deit_tiny_patch16_224", img_size=64, depth=1, embed_dim=12).double().eval()
    nn.init.zeros_(model.blocks[0].attn.qkv.weight)
    layer = capture(model, images(2, 64, 64))[0]
    entropies = attention.attention_entropy(layer)
    assert entropies.shape == (2, 3, 17)  # with the class token
    torch.testing.assert_close(entropies, torch.full_like(entropies, math.log(17)))
    assert attention.highest_entropy(layer) == math.log(17)
    assert attention.entropy(torch.tensor([0.0, 1.0])) == 0
    maps = attention.attention_map(layer, "class")
    torch.testing.assert_close(maps, torch.full((2, 3, 4, 4), 1 / 17, dtype=torch.float64))


def test_entropy_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = first_layer("softmax")
    whole = attention.attention_entropy(layer)
    monkeypatch.setattr(attention, "CHUNK", 1000)
    torch.testing.assert_close(attention.attention_entropy(layer), whole)


def test_rollout() -> None:
    result = captured("softmax")
    a, b = (attention.attention_weights(layer).mean(1) for layer in result)
    eye = torch.eye(64, dtype=torch.float64)
    expected = (0.5 * eye + 0.5 * b) @ (0.5 * eye + 0.5 * a)
    torch.testing.assert_close(attention.rollout(result).flatten(2), expected)
    merged = attention.rollout(capture(pyramid("softmax"), images()))
    assert merged.shape == (2, 16, 8, 8)
    torch.testing.assert_close(merged.sum((-2, -1)), torch.ones(2, 16, dtype=torch.float64))
    # with the residual alone, a token of the second stage comes from its four children
    own = attention.rollout(capture(pyramid("softmax"), images()), residual=1.0)[0, 5]
    assert own[2:4, 2:4].flatten().tolist() == [0.25] * 4


def test_similarity_and_rank() -> None:
    same = torch.ones(1, 5, 7, dtype=torch.float64)
    assert float(depth.token_similarity(same)) == pytest.approx(1)
    assert float(depth.effective_rank(same)) == pytest.approx(1)
    orthogonal = torch.eye(5, dtype=torch.float64)[None]
    assert float(depth.token_similarity(orthogonal)) == pytest.approx(0)
    assert float(depth.effective_rank(orthogonal)) == pytest.approx(5)
    opposite = torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]])
    assert float(depth.token_similarity(opposite)) == pytest.approx(-1)


def test_integrated_gradients_of_a_linear_model_and_completeness() -> None:
    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.randn(2, 3, 8, 8)

        def forward(self, x):
            return (x[:, None] * self.weight).sum((2, 3, 4))

    linear, image = Linear(), torch.randn(3, 8, 8)
    torch.testing.assert_close(integrated_gradients(linear, image, 1, steps=3), linear.weight[1] * image)
    model, image = column("softmax").train(), images(1)[0]
    result = integrated_gradients(model, image, target=2, steps=64)
    assert model.training
    with torch.no_grad():
        ends = model.eval()(torch.stack([image, torch.zeros_like(image)]))[:, 2]
    assert float(result.sum()) == pytest.approx(float(ends[0] - ends[1]), abs=2e-3)
    best = int(model(image[None]).argmax())
    torch.testing.assert_close(
        integrated_gradients(model, image, steps=4), integrated_gradients(model, image, best, steps=4)
    )


def test_bad_input() -> None:
    softmax, sima_layer = captured("softmax"), first_layer("sima")
    with pytest.raises(ValueError, match=r"blocks.0.mixer \(softmax\) has no sampling offsets"):
        active_token.sampling_offsets(softmax[0])
    with pytest.raises(ValueError, match=r"\(softmax\) has no super tokens"):
        super_token.super_tokens(softmax[0])
    with pytest.raises(ValueError, match="cells of 1x1: every token is its own super token; choose an earlier layer"):
        super_token.super_token_regions(first_layer("super_token", mixer_kwargs={"cell": 1}))
    with pytest.raises(ValueError, match=r"\(sima\) has no weight bank"):
        weight_mixing.weight_bank(sima_layer)
    with pytest.raises(ValueError, match=r"\(sima\) is not softmax attention"):
        attention.attention_entropy(sima_layer)
    with pytest.raises(ValueError, match="has no class token"):
        attention.attention_map(softmax[0], "class")
    with pytest.raises(ValueError, match="built with offsets='zero'"):
        active_token.sampling_offsets(first_layer("active_token", mixer_kwargs={"offsets": "zero"}))
    with pytest.raises(ValueError, match="there is no class 3: the model has 3, from 0"):
        integrated_gradients(column("softmax"), images(1)[0], target=3)
    with pytest.raises(ValueError, match=r"needs one image \(C, H, W\)"):
        integrated_gradients(column("softmax"), images())
