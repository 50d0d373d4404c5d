"""SimA with the interface of nn.MultiheadAttention: its formula in float64, and the interface's semantics."""

import copy
import itertools
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix.mixers import SimA

B, L, S, C, H = 3, 5, 7, 12, 3


def formula(module: SimA, query: Tensor, key: Tensor, value: Tensor, keys: int | None = None) -> tuple[Tensor, Tensor]:
    """One unbatched example, head by head and pair by pair, of which the first `keys` keys are real."""
    if module.in_proj_weight is None:
        matrices = [module.q_proj_weight, module.k_proj_weight, module.v_proj_weight]
    else:
        matrices = list(module.in_proj_weight.split(module.embed_dim))
    biases = [0, 0, 0] if module.in_proj_bias is None else list(module.in_proj_bias.split(module.embed_dim))
    q, k, v = (x @ w.T + b for x, w, b in zip((query, key[:keys], value[:keys]), matrices, biases, strict=True))
    dim = module.embed_dim // module.num_heads
    out, weights = torch.zeros_like(q), q.new_zeros(module.num_heads, len(q), len(k))
    for head in range(module.num_heads):
        channels = range(head * dim, (head + 1) * dim)
        for i, j in itertools.product(range(len(q)), range(len(k))):
            weights[head, i, j] = sum(q[i, c] / q[:, c].abs().sum() * k[j, c] / k[:, c].abs().sum() for c in channels)
            out[i, channels] += weights[head, i, j] * v[j, channels]
    return module.out_proj(out), weights


def tokens(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def pair(**kwargs: object) -> tuple[SimA, nn.MultiheadAttention]:
    """SimA and nn.MultiheadAttention with the same weights."""
    original = nn.MultiheadAttention(C, H, batch_first=True, dtype=torch.float64, **kwargs).eval()
    module = SimA(C, H, batch_first=True, dtype=torch.float64, **kwargs).eval()
    nn.init.normal_(original.in_proj_bias) if original.in_proj_bias is not None else None
    module.load_state_dict(original.state_dict())
    return module, original


@pytest.mark.parametrize("kwargs", [{}, {"bias": False}, {"kdim": 8, "vdim": 10}])
def test_formula_in_float64(kwargs: dict[str, object]) -> None:
    module, original = pair(**kwargs)
    query, key, value = tokens(B, L, C), tokens(B, S, module.kdim), tokens(B, S, module.vdim)
    out, weights = module(query, key, value, average_attn_weights=False)
    assert out.shape == original(query, key, value)[0].shape
    for i in range(B):
        expected, expected_weights = formula(module, query[i], key[i], value[i])
        torch.testing.assert_close(out[i], expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(weights[i], expected_weights, rtol=1e-10, atol=1e-12)
    linear, none = module(query, key, value, need_weights=False)
    assert none is None
    torch.testing.assert_close(linear, out, rtol=1e-10, atol=1e-12)


def test_shapes_are_those_of_multihead_attention() -> None:
    for batch_first, batched in ((True, True), (False, True), (True, False)):
        modules = [kind(C, H, batch_first=batch_first) for kind in (SimA, nn.MultiheadAttention)]
        if not batched:
            inputs = [torch.randn(n, C) for n in (L, S, S)]
        else:
            inputs = [torch.randn((B, n, C) if batch_first else (n, B, C)) for n in (L, S, S)]
        for options in ({}, {"average_attn_weights": False}, {"need_weights": False}):
            (out, weights), (expected, expected_weights) = (module(*inputs, **options) for module in modules)
            assert out.shape == expected.shape
            assert (weights is None) == (expected_weights is None)
            assert weights is None or weights.shape == expected_weights.shape


def test_layouts_agree() -> None:
    module, _ = pair()
    query, key, value = tokens(B, L, C), tokens(B, S, C), tokens(B, S, C)
    padding = torch.arange(S) >= torch.tensor([[S], [4], [2]])
    expected, expected_weights = module(query, key, value, padding)
    sequence_first = copy.deepcopy(module)
    sequence_first.batch_first = False
    out, weights = sequence_first(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), padding)
    torch.testing.assert_close(out.transpose(0, 1), expected)
    torch.testing.assert_close(weights, expected_weights)
    out, weights = module(query[1], key[1], value[1], padding[1])
    torch.testing.assert_close(out, expected[1])
    torch.testing.assert_close(weights, expected_weights[1])


def test_padded_keys_have_no_effect() -> None:
    module, _ = pair()
    query, key, value = tokens(B, L, C), tokens(B, S, C), tokens(B, S, C)
    lengths = [S, 4, 1]
    padding = torch.arange(S) >= torch.tensor(lengths)[:, None]
    additive = torch.zeros(padding.shape, dtype=torch.float64).masked_fill(padding, float("-inf"))
    key[padding] = torch.nan  # arbitrary padding values
    for mask, need_weights in itertools.product((padding, additive), (True, False)):
        out, weights = module(query, key, value, key_padding_mask=mask, need_weights=need_weights)
        for i, length in enumerate(lengths):
            expected, expected_weights = formula(module, query[i], key[i], value[i], length)
            torch.testing.assert_close(out[i], expected, rtol=1e-10, atol=1e-12)
            if weights is not None:
                torch.testing.assert_close(weights[i, :, :length], expected_weights.mean(0), rtol=1e-10, atol=1e-12)
                assert not weights[i, :, length:].any()


def test_self_attention_is_independent_of_padding() -> None:
    """Padded queries are excluded from the norms of the queries, which nn.MultiheadAttention does not have."""
    module, original = pair()
    x = tokens(1, 4, C)
    padded = torch.cat([x, 100 * tokens(1, 3, C)], dim=1)
    mask = torch.arange(7)[None] >= 4
    for attention in (module, original):
        torch.testing.assert_close(attention(padded, padded, padded, mask)[0][:, :4], attention(x, x, x)[0])
    assert not torch.allclose(module(padded, padded.clone(), padded, mask)[0][:, :4], module(x, x, x)[0])


@pytest.mark.parametrize("per_head", [False, True])
def test_attn_mask_zeroes_pairs(per_head: bool) -> None:
    module, _ = pair()
    query, key, value = tokens(B, L, C), tokens(B, S, C), tokens(B, S, C)
    mask = torch.rand((B * H, L, S) if per_head else (L, S)) < 0.4
    out, weights = module(query, key, value, attn_mask=mask, average_attn_weights=False)
    free = module(query, key, value, average_attn_weights=False)[1]
    torch.testing.assert_close(weights, free.masked_fill(mask.unflatten(0, (B, H)) if per_head else mask, 0))
    values = F.linear(value, module.in_proj_weight[2 * C :], module.in_proj_bias[2 * C :])
    values = values.unflatten(-1, (H, -1)).transpose(1, 2)
    torch.testing.assert_close(out, module.out_proj((weights @ values).transpose(1, 2).flatten(2)))
    torch.testing.assert_close(module(query, key, value, attn_mask=mask, need_weights=False)[0], out)


def test_gradients_reach_everything() -> None:
    module, _ = pair()
    inputs = [tokens(2, n, C).requires_grad_() for n in (L, S, S)]
    padding = torch.arange(S) >= torch.tensor([[S], [4]])

    def run(*inputs: Tensor) -> Tensor:
        return module(*inputs, key_padding_mask=padding, need_weights=False)[0]

    assert torch.autograd.gradcheck(run, inputs)
    run(*inputs).sum().backward()
    assert all(p.grad is not None and p.grad.any() for n, p in module.named_parameters() if n != "in_proj_bias")


def test_copy_and_pickle() -> None:
    module, original = pair()
    assert module.state_dict().keys() == original.state_dict().keys()
    x = tokens(B, L, C)
    expected = module(x, x, x)[0]
    for twin in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        torch.testing.assert_close(twin(x, x, x)[0], expected)


def test_initial_values_are_those_of_multihead_attention() -> None:
    torch.manual_seed(1)
    module = SimA(C, H)
    torch.manual_seed(1)
    expected = nn.MultiheadAttention(C, H)
    torch.testing.assert_close(module.state_dict(), expected.state_dict())
    for each in (module, expected):
        torch.manual_seed(2)
        each._reset_parameters()
    torch.testing.assert_close(module.state_dict(), expected.state_dict())
    assert not module._qkv_same_embed_dim, "nn.TransformerEncoder would compute softmax attention"


def test_half_precision_keeps_its_accuracy() -> None:
    module, _ = pair()
    x = tokens(1, 600, C)
    expected = module(x, x, x)[0]
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        half = copy.deepcopy(module).to(dtype)
        for need_weights in (True, False):
            out = half(*[x.to(dtype)] * 3, need_weights=need_weights)[0].double()
            assert (out - expected).norm() <= tolerance * expected.norm(), (dtype, need_weights)


def test_compile_and_export() -> None:
    torch.compiler.reset()
    module, _ = pair()
    x, mask = tokens(B, S, C), torch.arange(S) >= torch.tensor([[S], [4], [2]])
    expected = module(x, x, x, mask, need_weights=False)[0]
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, x, x, mask, need_weights=False)[0], expected)

    class SelfAttention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = module

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.attention(x, x, x, mask, need_weights=False)[0]

    dims = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO}
    exported = torch.export.export(SelfAttention(), (x, mask), dynamic_shapes=(dims, dims)).module()
    torch.testing.assert_close(exported(x[:2, :6], mask[:2, :6]), SelfAttention()(x[:2, :6], mask[:2, :6]))


@pytest.mark.parametrize("norm_first", [False, True])
def test_transformer_encoder_does_not_bypass_it(norm_first: bool) -> None:
    """In eval mode without gradients, PyTorch would compute an encoder layer with softmax from its weights."""
    layer = nn.TransformerEncoderLayer(C, 4, 2 * C, batch_first=True, norm_first=norm_first, dtype=torch.float64)
    layer.self_attn = SimA(C, 4, batch_first=True, dtype=torch.float64)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    x, mask = tokens(B, S, C), torch.arange(S) >= torch.tensor([[S], [4], [2]])
    with torch.no_grad():
        slow = copy.deepcopy(encoder).train()
        for module in slow.modules():
            module.dropout = 0.0 if isinstance(module, nn.MultiheadAttention) else getattr(module, "dropout", None)
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        for padding in (None, mask):
            expected = slow(x, src_key_padding_mask=padding)
            torch.testing.assert_close(encoder.eval()(x, src_key_padding_mask=padding), expected)


def test_transformer_decoder_with_cross_attention() -> None:
    """As in DETR: queries attend to each other, then to an image of different length, partly padding."""
    layer = nn.TransformerDecoderLayer(C, H, 2 * C, batch_first=True)
    layer.self_attn, layer.multihead_attn = SimA(C, H, batch_first=True), SimA(C, H, batch_first=True)
    decoder = nn.TransformerDecoder(layer, 2).eval()
    queries, memory = torch.randn(B, L, C), torch.randn(B, S, C)
    mask = torch.arange(S) >= torch.tensor([[S], [4], [2]])
    out = decoder(queries, memory, memory_key_padding_mask=mask)
    assert out.shape == queries.shape
    memory[mask] = 1e3
    torch.testing.assert_close(decoder(queries, memory, memory_key_padding_mask=mask), out)
    with pytest.raises(ValueError, match="no causal form"):
        decoder(queries, memory, tgt_mask=nn.Transformer.generate_square_subsequent_mask(L))


def test_errors() -> None:
    x = torch.randn(1, 4, C)
    with pytest.raises(ValueError, match="12 channels do not divide into 5 heads"):
        SimA(C, 5)
    with pytest.raises(ValueError, match="does not support add_bias_kv and add_zero_attn"):
        SimA(C, H, add_zero_attn=True)
    with pytest.raises(ValueError, match="no causal form"):
        SimA(C, H)(x, x, x, is_causal=True)
    with pytest.raises(ValueError, match="needs plain tensors"):
        SimA(C, H)(x[None], x[None], x[None])
