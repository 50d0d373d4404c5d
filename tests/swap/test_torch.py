"""SimA in place of nn.MultiheadAttention in PyTorch's transformers."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import nn

from tests.swap.hosts import broadcast, change_inputs, change_outputs, submodules, weights
from tokamix.layers import merge_heads, split_heads
from tokamix.mixers import SimA
from tokamix.swap import insert_context_broadcast, remove_context_broadcast, swap_mixer


def transformer(kind: str, **kwargs: object) -> nn.Module:
    options = {"batch_first": True, "dropout": 0.0, "dtype": torch.float64, **kwargs}
    if kind == "encoder":
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, **options), 2)
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, **options), 2)


def test_transformer_encoder_in_eval_mode() -> None:
    """PyTorch's fast paths for eval mode (fused, nested tensors) support softmax only and must not be taken."""
    model = transformer("encoder")
    x, padding = torch.randn(3, 6, 16, dtype=torch.float64), torch.arange(6) >= torch.tensor([[6], [4], [2]])
    softmax = model.eval()(x)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    report = swap_mixer(model)
    assert list(report.replaced) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert not report.dropped
    torch.testing.assert_close(weights(model), state)
    with torch.no_grad():
        for mask in (None, padding):
            expected = x
            for layer in model.layers:  # as in the transformer's paper, norms after the sums
                attended = layer.self_attn(expected, expected, expected, mask, need_weights=False)[0]
                expected = layer.norm1(expected + attended)
                expected = layer.norm2(expected + layer.linear2(F.relu(layer.linear1(expected))))
            for training in (False, True):
                out = model.train(training)(x, src_key_padding_mask=mask)
                torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(model.eval()(x), softmax)


def test_norm_of_sima() -> None:
    """`norm` is that of SimA's own class, with and without masks."""
    x = torch.randn(2, 6, 16, dtype=torch.float64)
    host = nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64)
    swap_mixer(host, mixer_kwargs={"norm": "l2"})
    q, k, v = (
        split_heads(F.linear(x, w, b), 4)
        for w, b in zip(host.in_proj_weight.chunk(3), host.in_proj_bias.chunk(3), strict=True)
    )
    expected = F.normalize(q, dim=2) @ F.normalize(k, dim=2).mT @ v
    everything = torch.zeros(6, 6, dtype=torch.bool)  # a mask that excludes nothing
    for mask in (None, everything):
        torch.testing.assert_close(host(x, x, x, attn_mask=mask)[0], host.out_proj(merge_heads(expected)))


def test_softmax_keeps_masks() -> None:
    """With the host's own product: padding, biases of the logits for each head, and causal masks."""
    x, padding = torch.randn(2, 6, 16, dtype=torch.float64), torch.arange(6) >= torch.tensor([[6], [4]])
    causal = torch.ones(6, 6, dtype=torch.bool).triu(1)
    for masks in (
        {"key_padding_mask": padding},
        {"attn_mask": torch.randn(6, 6, dtype=torch.float64)},
        {"attn_mask": torch.randn(4, 6, 6, dtype=torch.float64), "key_padding_mask": padding.double() * -1e9},
        {"attn_mask": causal},
        {"attn_mask": causal, "is_causal": True, "need_weights": False},
    ):
        host = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
        expected = host(x, x, x, **masks)[0]
        swap_mixer(host, "softmax")
        torch.testing.assert_close(host(x, x, x, **masks)[0], expected)


@pytest.mark.parametrize(("to", "norm"), [("sima", "l1"), ("sima", "l2"), ("performer", None)])
def test_masks_that_have_no_meaning_are_refused(to: str, norm: str | None) -> None:
    """Biases of logits, and causal masks; SimA also takes additive masks that exclude pairs."""
    x = torch.randn(2, 6, 16)
    host = nn.MultiheadAttention(16, 2, batch_first=True)
    swap_mixer(host, to, mixer_kwargs={} if norm is None else {"norm": norm})
    with pytest.raises(ValueError, match="has no logits to add a bias to"):
        host(x, x, x, attn_mask=torch.randn(6, 6))
    with pytest.raises(ValueError, match="has no causal form"):
        host(x, x, x, attn_mask=nn.Transformer.generate_square_subsequent_mask(6))
    if norm:
        excluded = torch.eye(6, dtype=torch.bool)
        additive = torch.zeros(6, 6).masked_fill(excluded, -100.0)
        torch.testing.assert_close(host(x, x, x, attn_mask=additive)[0], host(x, x, x, attn_mask=excluded)[0])


def test_compiled_graphs_refuse_causal_masks() -> None:
    """The graph of a mask that is not causal raises an error when it runs with one that is."""
    torch.compiler.reset()
    attention, x = Attention(16, 2).eval(), torch.randn(1, 6, 16)
    swap_mixer(attention)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    mask = ~torch.eye(6, dtype=torch.bool)
    with torch.no_grad():
        torch.testing.assert_close(compiled(x, attn_mask=mask), attention(x, attn_mask=mask))
        with pytest.raises(RuntimeError, match="has no causal form"):
            compiled(x, attn_mask=mask.tril())


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_padding_between_two_sets_of_tokens(norm: str) -> None:
    """As many queries as keys: the padding of the keys does not exclude queries."""
    x, y = (torch.randn(2, 6, 16, dtype=torch.float64) for _ in range(2))
    padding = torch.arange(6) >= torch.tensor([[6], [4]])
    host = nn.MultiheadAttention(16, 2, batch_first=True, dtype=torch.float64)
    swap_mixer(host, mixer_kwargs={"norm": norm})
    q, k, v = (
        split_heads(F.linear(t, w, b), 2)
        for t, w, b in zip((x, y, y), host.in_proj_weight.chunk(3), host.in_proj_bias.chunk(3), strict=True)
    )
    k, v = (t.masked_fill(padding[:, None, :, None], 0) for t in (k, v))
    q, k = (F.normalize(t, p=int(norm[1]), dim=2) for t in (q, k))
    expected = host.out_proj(merge_heads(q @ (k.mT @ v)))
    torch.testing.assert_close(host(x, y, y, key_padding_mask=padding)[0], expected)


def test_broadcast_in_transformer_encoders() -> None:
    """At the ends of the MLP and of the attention; only with the batch first, or the mean would be over images."""
    model, x = transformer("encoder").eval(), torch.randn(3, 6, 16, dtype=torch.float64)
    for options, pattern, change in (
        ({}, r"dropout2$", change_outputs),
        ({"position": "mid"}, r"linear2$", change_inputs),
        ({"position": "front"}, r"linear1$", change_inputs),
    ):
        expected = change(model, submodules(model, pattern), broadcast)(x)
        insert_context_broadcast(model, **options)
        torch.testing.assert_close(model(x), expected)
        remove_context_broadcast(model)
    insert_context_broadcast(model, block="msa")
    torch.testing.assert_close(model(x)[:1], model(x[:1]))
    with pytest.raises(ValueError, match=r"TransformerEncoderLayer has nn\.MultiheadAttention with the batch second"):
        insert_context_broadcast(nn.TransformerEncoderLayer(16, 4, 32))


def test_transformer_decoder() -> None:
    model = transformer("decoder", activation="gelu").eval()
    queries, memory = (torch.randn(2, n, 16, dtype=torch.float64) for n in (5, 9))
    report = swap_mixer(model, num_heads=2, relu=True)
    assert len(report.replaced) == 4
    assert report.activations == ["layers.0.activation", "layers.1.activation"]
    assert {m.num_heads for m in model.modules() if isinstance(m, SimA)} == {2}
    padding = torch.arange(9) >= torch.tensor([[9], [3]])
    out = model(queries, memory, memory_key_padding_mask=padding)
    assert out.shape == queries.shape
    memory[padding] = torch.nan
    torch.testing.assert_close(model(queries, memory, memory_key_padding_mask=padding), out)
