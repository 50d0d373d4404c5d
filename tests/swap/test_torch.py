"""SimA in place of nn.MultiheadAttention in PyTorch's transformers."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.swap.hosts import weights
from tokamix.layers import merge_heads, split_heads
from tokamix.mixers import SimA
from tokamix.swap import swap_mixer


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
