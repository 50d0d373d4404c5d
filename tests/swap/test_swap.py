"""Swapping mixers and inserting context broadcasting: what changes, what stays, and what is refused."""

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import timm
import torch
import torch.nn.functional as F
from timm.layers import Attention
from torch import Tensor, nn

import tokamix
from tokamix.mixers import SimA
from tokamix.swap import QKVSimA, insert_context_broadcast, remove_context_broadcast, swap_mixer

SIZE, CLASSES = 64, 5
# host, options that make it small, attentions, and the parameters that SimA has no use for
HOSTS: dict[str, tuple[dict[str, object], int, str]] = {
    "vit_tiny_patch16_224": ({"img_size": SIZE, "depth": 2}, 2, "$"),
    "deit_tiny_patch16_224": ({"img_size": SIZE, "depth": 2}, 2, "$"),
    "deit_tiny_distilled_patch16_224": ({"img_size": SIZE, "depth": 2}, 2, "$"),
    "xcit_nano_12_p16_224": ({"depth": 2}, 4, r"blocks\.\d\.attn\.temperature$"),
    "cait_xxs24_224": ({"img_size": SIZE, "depth": 2}, 4, r"blocks\.\d\.attn\.proj_[lw]\."),
    "pit_ti_224": ({"img_size": SIZE, "depth": [1, 1, 1]}, 3, "$"),
    "swin_tiny_patch4_window7_224": (
        {"img_size": SIZE, "embed_dim": 24, "depths": (2, 2), "num_heads": (2, 4), "window_size": 4},
        4,
        r"layers\.\d\.blocks\.\d\.attn\.relative_position_bias_table$",
    ),
    "cvt_13": ({"depths": (1, 1, 1)}, 3, "$"),
    "pvt_tiny": ({"img_size": SIZE, "depths": (1, 1, 1, 1)}, 4, "$"),
    "localvit_tiny": ({"img_size": SIZE, "depth": 2, "global_pool": "avg"}, 2, "$"),
}


def create(name: str, **kwargs: object) -> nn.Module:
    options = HOSTS[name][0] if name in HOSTS else BROADCAST_HOSTS[name]
    return timm.create_model(name, num_classes=CLASSES, **{**options, **kwargs})


def images(batch: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(batch, 3, SIZE, SIZE, dtype=dtype)


def simple_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SimA as the paper writes it: (B, H, N, D) each."""
    q, k = (x / x.abs().sum(-2, keepdim=True) for x in (q, k))
    return q @ (k.transpose(-2, -1) @ v)


def heads(x: Tensor, number: int) -> Tensor:
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


@pytest.mark.parametrize("name", HOSTS)
def test_swap_keeps_shapes_parameters_and_gradients(name: str) -> None:
    _, attentions, gone = HOSTS[name]
    model = create(name).train()
    before = dict(model.named_parameters())
    x = images()
    expected = model.eval()(x).shape
    report = swap_mixer(model.train())
    after = dict(model.named_parameters())
    assert sorted(before.keys() - after.keys()) == report.dropped == [n for n in sorted(before) if re.match(gone, n)]
    assert all(parameter is before[name] for name, parameter in after.items())
    assert len(report.replaced) == attentions
    assert f"{attentions} mixers replaced" in str(report)
    assert all(module.training for module in model.modules())
    assert not any(isinstance(m, Attention | nn.Softmax) for m in model.modules())
    assert tokamix.count_exp(model.eval(), SIZE)["softmax"] == 0
    out = model.train()(x)
    assert out.shape == expected
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model(x).square().sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert not [n for n, g in gradients.items() if g is None or not g.isfinite().all() or not g.any()]
    with pytest.raises(ValueError, match=f"{type(model).__name__} has no attention left that swap_mixer knows"):
        swap_mixer(model)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "xcit_nano_12_p16_224", "cait_xxs24_224"])
@pytest.mark.parametrize("num_heads", [None, 1])
def test_fused_projections(name: str, num_heads: int | None) -> None:
    model = create(name).double().eval()
    number = num_heads or model.blocks[0].attn.num_heads
    swap_mixer(model, num_heads=num_heads)
    attention, x = model.blocks[0].attn, torch.randn(2, 17, model.embed_dim, dtype=torch.float64)
    q, k, v = (heads(y, number) for y in attention.qkv(x).chunk(3, dim=-1))
    expected = attention.proj(simple_attention(q, k, v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x), expected, rtol=1e-10, atol=1e-12)


def test_class_attention() -> None:
    """The class token's row of SimA over all tokens, its own included."""
    x = torch.randn(2, 10, 192, dtype=torch.float64)
    model = create("cait_xxs24_224").double().eval()
    swap_mixer(model)
    attention = model.blocks_token_only[0].attn
    q, k, v = (heads(layer(x), 4) for layer in (attention.q, attention.k, attention.v))
    expected = attention.proj(simple_attention(q, k, v).transpose(1, 2).flatten(2))[:, :1]
    torch.testing.assert_close(attention(x), expected, rtol=1e-10, atol=1e-12)

    model = create("cait_xxs24_224").double().eval()
    tokens, token = x[:, 1:], x[:, :1]
    expected = model.blocks_token_only[0](tokens, token)
    report = swap_mixer(model, keep_class_attention=True)
    assert list(report.replaced) == ["blocks.0.attn", "blocks.1.attn"]
    torch.testing.assert_close(model.blocks_token_only[0](tokens, token), expected)


def test_xcit_becomes_the_authors_network() -> None:
    """timm's XCiT, swapped, computes what our port of the authors' SimA computes, which is held to their numbers."""
    host = create("xcit_nano_12_p16_224").double()
    with torch.no_grad():
        for tensor in [*host.parameters(), *(b for b in host.buffers() if b.is_floating_point())]:
            tensor.add_(0.1 * torch.rand_like(tensor))
    swap_mixer(host.eval())
    state = host.state_dict()
    for name in [name for name in state if re.match(r"cls_attn_blocks\.\d\.attn\.q\.", name)]:
        parts = [state.pop(name.replace(".attn.q.", f".attn.{part}.")) for part in "qkv"]
        state[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)  # the authors project to all three at once
    ours = timm.create_model("xcit_nano_12_p16_sima", depth=2, num_classes=CLASSES).double().eval()
    tokamix.load_checkpoint(ours, state)
    x = images(dtype=torch.float64)
    torch.testing.assert_close(host(x), ours(x), rtol=1e-6, atol=1e-9)  # timm encodes positions in float32


def test_windows_are_the_token_sets() -> None:
    """In shifted windows, pairs from different sides of the border weigh nothing; norms are the window's."""
    model = create("swin_tiny_patch4_window7_224").double().eval()
    swap_mixer(model)
    block = model.layers[0].blocks[1]
    assert any(block.shift_size)
    x = torch.randn(2, 16, 16, 24, dtype=torch.float64)
    shifted = torch.roll(x, (-2, -2), (1, 2))
    side = (torch.arange(16) >= 14).long() + (torch.arange(16) >= 12).long()  # timm's regions, here along one axis
    region = side[:, None] * 3 + side
    out = torch.zeros_like(x)
    for top in range(0, 16, 4):
        for left in range(0, 16, 4):
            window = (slice(None), slice(top, top + 4), slice(left, left + 4))
            q, k, v = (heads(y, 2) for y in block.attn.qkv(shifted[window].flatten(1, 2)).chunk(3, dim=-1))
            q, k = (y / y.abs().sum(-2, keepdim=True) for y in (q, k))
            regions = region[window[1:]].flatten()
            weights = (q @ k.transpose(-2, -1)) * (regions[:, None] == regions)
            out[window] = block.attn.proj((weights @ v).transpose(1, 2).flatten(2)).unflatten(1, (4, 4))
    torch.testing.assert_close(block._attn(x), torch.roll(out, (2, 2), (1, 2)), rtol=1e-10, atol=1e-12)

    model.set_input_size((96, 96), window_size=(6, 6))
    assert model(torch.randn(1, 3, 96, 96, dtype=torch.float64)).isfinite().all()


@pytest.mark.parametrize("name", ["cvt_13", "pvt_tiny"])
def test_queries_and_keys_of_different_number(name: str) -> None:
    model = create(name).double().eval()
    attention = model.stages[-2].blocks[0].attn
    swap_mixer(model, num_heads=1)
    seen: list[tuple[Tensor, ...]] = []
    attention.attend.register_forward_hook(lambda _, args, out: seen.append((*args, out)))
    model(images(1, torch.float64))
    q, k, v, out = seen[0]
    assert q.shape[1] == 1
    assert q.shape[2] > k.shape[2]
    torch.testing.assert_close(out, simple_attention(q, k, v), rtol=1e-10, atol=1e-12)


def test_what_else_timm_attention_has() -> None:
    """Norms of queries, keys and output, a gate, and masks."""
    host = Attention(12, 3, qk_norm=True, scale_norm=True, gated=True, norm_layer=nn.LayerNorm, dtype=torch.float64)
    with torch.no_grad():
        for parameter in host.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model = nn.Sequential(host)
    swap_mixer(model)
    x, mask = torch.randn(2, 7, 12, dtype=torch.float64), torch.rand(7, 7) < 0.6
    q, k, v = (heads(y, 3) for y in host.qkv(x).chunk(3, dim=-1))
    q, k = host.q_norm(q), host.k_norm(k)
    q, k = (y / y.abs().sum(-2, keepdim=True) for y in (q, k))
    weights = q @ k.transpose(-2, -1)

    def finish(weights: Tensor) -> Tensor:
        out = host.norm((weights @ v).transpose(1, 2).flatten(2))
        return host.proj(out * host.gate(x).sigmoid())

    torch.testing.assert_close(model[0](x), finish(weights), rtol=1e-10, atol=1e-12)
    additive = torch.zeros(7, 7, dtype=torch.float64).masked_fill(~mask, -torch.inf)
    for form in (mask, additive):
        torch.testing.assert_close(model[0](x, attn_mask=form), finish(weights * mask), rtol=1e-10, atol=1e-12)
    with pytest.raises(ValueError, match="no causal form"):
        model[0](x, is_causal=True)
    with pytest.raises(ValueError, match="0 normalises the queries of 3 heads, so it cannot have 1"):
        swap_mixer(nn.Sequential(host), num_heads=1)


@pytest.mark.parametrize("name", ["deit_tiny_patch16_224", "xcit_nano_12_p16_224", "cvt_13"])
def test_relu_leaves_no_exponential(name: str) -> None:
    model = create(name).eval()
    assert sum(tokamix.count_exp(model, SIZE).values()) > 0
    report = swap_mixer(model, relu=True)
    assert report.activations
    assert not any(isinstance(m, nn.GELU) for m in model.modules())
    assert sum(tokamix.count_exp(model, SIZE).values()) == 0


def test_shared_activations_are_all_replaced() -> None:
    act = nn.GELU()
    model = nn.Sequential(Attention(8, 2), act, nn.Linear(8, 8), act)
    report = swap_mixer(model, relu=True)
    assert report.activations == ["1", "3"]
    assert [type(m) for m in model] == [QKVSimA, nn.ReLU, nn.Linear, nn.ReLU]


def transformer(kind: str, **kwargs: object) -> nn.Module:
    options = {"batch_first": True, "dropout": 0.0, "dtype": torch.float64, **kwargs}
    if kind == "encoder":
        return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, **options), 2)
    return nn.TransformerDecoder(nn.TransformerDecoderLayer(16, 4, 32, **options), 2)


def test_transformer_encoder_in_eval_mode() -> None:
    """PyTorch's short cuts for eval mode, which know only softmax, are not taken: neither fused nor nested."""
    model = transformer("encoder")
    x, padding = torch.randn(3, 6, 16, dtype=torch.float64), torch.arange(6) >= torch.tensor([[6], [4], [2]])
    softmax = model.eval()(x)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    report = swap_mixer(model)
    assert list(report.replaced) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert not report.dropped
    torch.testing.assert_close(model.state_dict(), state)
    with torch.no_grad():
        for mask in (None, padding):
            expected = x
            for layer in model.layers:  # as written in the transformer's paper, norms after the sums
                attended = layer.self_attn(expected, expected, expected, mask, need_weights=False)[0]
                expected = layer.norm1(expected + attended)
                expected = layer.norm2(expected + layer.linear2(F.relu(layer.linear1(expected))))
            for training in (False, True):
                out = model.train(training)(x, src_key_padding_mask=mask)
                torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    assert not torch.allclose(model.eval()(x), softmax)


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


def test_swapped_models_travel() -> None:
    """Copied and pickled; compiling and exporting is tested with the registered ones."""
    model = create("swin_tiny_patch4_window7_224").eval()
    swap_mixer(model)
    x = images()
    expected = model(x)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(x), expected)


def test_half_precision() -> None:
    for name in ("deit_tiny_patch16_224", "swin_tiny_patch4_window7_224", "cait_xxs24_224"):
        model = create(name).eval()
        swap_mixer(model)
        x = images(1)
        for dtype in (torch.bfloat16, torch.float16):
            assert copy.deepcopy(model).to(dtype)(x.to(dtype)).isfinite().all(), (name, dtype)
        expected = model(x)
        with torch.autocast("cpu", torch.bfloat16):
            assert (model(x) - expected).norm() < 0.05 * expected.norm(), name


def test_swap_refuses_and_changes_nothing() -> None:
    model = create("deit_tiny_patch16_224")
    with pytest.raises(ValueError, match=r"unknown mixer 'simba': .* swap_mixer can use sima"):
        swap_mixer(model, to="simba")
    with pytest.raises(ValueError, match=r"192 channels of blocks\.0\.attn do not divide into 5 heads"):
        swap_mixer(model, num_heads=5)
    with pytest.raises(ValueError, match="do not divide into 0 heads"):
        swap_mixer(model, num_heads=0)
    with pytest.raises(ValueError, match="ResNet has no attention left that swap_mixer knows"):
        swap_mixer(timm.create_model("resnet18", device="meta"))
    with pytest.raises(ValueError, match="adds a token to keys and values"):
        swap_mixer(nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, add_bias_kv=True)}))
    insert_context_broadcast(model, block="msa")
    with pytest.raises(ValueError, match=r"blocks\.0\.attn carries context broadcasting"):
        swap_mixer(model)
    assert sum(isinstance(m, Attention) for m in model.modules()) == 2


# context broadcasting

BROADCAST_HOSTS: dict[str, dict[str, object]] = {
    "vit_tiny_patch16_224": {"img_size": SIZE, "depth": 2},
    "deit_tiny_distilled_patch16_224": {"img_size": SIZE, "depth": 2},
    "pit_ti_224": {"img_size": SIZE, "depth": [1, 1, 1]},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "swin_tiny_patch4_window7_224": HOSTS["swin_tiny_patch4_window7_224"][0],
    "twins_pcpvt_small": {"img_size": SIZE, "depths": (1, 1, 1, 1)},
    "twins_svt_small": {"img_size": SIZE, "depths": (1, 1, 2, 1)},
    "pvt_tiny": {"img_size": SIZE, "depths": (1, 1, 1, 1)},
    "localvit_tiny": {"img_size": SIZE, "depth": 2, "global_pool": "avg"},
}
CLASS_TOKEN_HOSTS = ("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "pit_ti_224")


def broadcast(x: Tensor, kind: str = "cb", scale: float | Tensor = 1.0) -> Tensor:
    """The supplement's formulas on tokens (B, N, C) or maps (B, H, W, C)."""
    tokens = x.reshape(x.shape[0], -1, x.shape[-1])
    cb = (tokens + scale * tokens.mean(1, keepdim=True)) / 2
    gate = tokens * (tokens[:, :1] + 1)
    hybrid = tokens * tokens[:, :1] + cb
    return {"cb": cb, "cbs": cb, "gate": gate, "hybrid": hybrid}[kind].reshape(x.shape)


def change_outputs(model: nn.Module, paths: list[str], change: Callable[[Tensor], Tensor]) -> nn.Module:
    """A copy of a model in which the outputs of some modules are changed."""
    model = copy.deepcopy(model)
    for path in paths:
        model.get_submodule(path).register_forward_hook(lambda _, args, out: change(out))
    return model


def change_inputs(model: nn.Module, paths: list[str], change: Callable[[Tensor], Tensor]) -> nn.Module:
    model = copy.deepcopy(model)
    for path in paths:
        model.get_submodule(path).register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]))
    return model


def submodules(model: nn.Module, pattern: str) -> list[str]:
    return [name for name, _ in model.named_modules() if re.search(pattern, name)]


@pytest.mark.parametrize("name", BROADCAST_HOSTS)
def test_broadcast_in_every_host(name: str) -> None:
    model = create(name).double().eval()
    mlps, attentions = submodules(model, r"blocks\.\d+(\.\d+)?\.mlp$"), submodules(model, r"blocks\.\d+(\.\d+)?\.attn$")
    state, x = copy.deepcopy(model.state_dict()), images(dtype=torch.float64)
    plain = model(x)
    expected = change_outputs(model, mlps, broadcast)(x)

    assert insert_context_broadcast(model) == mlps
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(expected, plain)
    torch.testing.assert_close(model.state_dict(), state)
    assert insert_context_broadcast(model) == mlps, "twice is once"
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-11)

    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(x), expected, rtol=1e-9, atol=1e-11)
        assert remove_context_broadcast(twin) == mlps
        torch.testing.assert_close(twin(x), plain)
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-11)

    if name.startswith("swin"):  # the whole map, not each window
        both = change_inputs(model, submodules(model, r"blocks\.\d+\.drop_path1$"), broadcast)
    else:
        both = change_outputs(model, attentions, broadcast)
    assert len(insert_context_broadcast(model, block="both")) == 2 * len(mlps)
    torch.testing.assert_close(model(x), both(x), rtol=1e-9, atol=1e-11)

    assert len(remove_context_broadcast(model)) == 2 * len(mlps)
    assert remove_context_broadcast(model) == []
    torch.testing.assert_close(model(x), plain)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", CLASS_TOKEN_HOSTS)
@pytest.mark.parametrize("kind", ["gate", "hybrid"])
def test_class_token_kinds(name: str, kind: str) -> None:
    model, x = create(name).double().eval(), images(dtype=torch.float64)
    for block, pattern in (("mlp", r"blocks\.\d+\.mlp$"), ("msa", r"blocks\.\d+\.attn$")):
        expected = change_outputs(model, submodules(model, pattern), lambda y: broadcast(y, kind))(x)
        insert_context_broadcast(model, kind, block=block)
        torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-11)
        remove_context_broadcast(model)


@pytest.mark.parametrize("kind", ["cb", "cbs", "gate", "hybrid"])
def test_positions(kind: str) -> None:
    model, x = create("vit_tiny_patch16_224").double().eval(), images(dtype=torch.float64)
    for block in model.blocks:
        nn.init.normal_(block.mlp.fc2.bias)
    outputs = {}
    for position, pattern in (("front", r"mlp$"), ("mid", r"mlp\.fc2$"), ("end", r"mlp$")):
        change = change_outputs if position == "end" else change_inputs
        scale = 0.5 if kind == "cbs" else 1.0
        expected = change(model, submodules(model, pattern), lambda y, s=scale: broadcast(y, kind, s))(x)
        insert_context_broadcast(model, kind, position, scale_init=0.5)
        outputs[position] = model(x)
        torch.testing.assert_close(outputs[position], expected, rtol=1e-9, atol=1e-11)
        remove_context_broadcast(model)
    # fc2 is affine and CB's weights sum to 1, so that mid and end are one function; a scaled mean's do not
    assert torch.allclose(outputs["mid"], outputs["end"], rtol=1e-9) == (kind == "cb")
    assert not torch.allclose(outputs["front"], outputs["end"])


def test_mid_and_end_send_the_same_gradients() -> None:
    """They are one function of the parameters, so where it is applied cannot matter to what the MLP learns."""
    x, gradients = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64), {}
    for position in ("mid", "end"):
        torch.manual_seed(0)
        model = create("vit_tiny_patch16_224").double()
        insert_context_broadcast(model, position=position)
        model(x).square().sum().backward()
        gradients[position] = [p.grad for p in model.parameters()]
    torch.testing.assert_close(gradients["mid"], gradients["end"], rtol=1e-7, atol=1e-10)


def test_scaled_broadcast_adds_its_scales_alone() -> None:
    model, x = create("swin_tiny_patch4_window7_224").double(), images(dtype=torch.float64)
    names, expected = set(model.state_dict()), create("swin_tiny_patch4_window7_224").double()
    expected.load_state_dict(model.state_dict())
    insert_context_broadcast(model, "cbs")
    insert_context_broadcast(expected, "cb")
    added = {name: value for name, value in model.state_dict().items() if name not in names}
    assert [len(value) for value in added.values()] == [24, 24, 48, 48]
    assert all(re.fullmatch(r"layers\.\d\.blocks\.\d\.mlp\.broadcast_after\.scale", name) for name in added)
    torch.testing.assert_close(model.eval()(x), expected.eval()(x))
    model.train()(x).square().sum().backward()
    scales = [p for n, p in model.named_parameters() if n in added]
    assert all(p.grad.any() and p.dtype == torch.float64 for p in scales)

    with torch.no_grad():
        for scale in scales:
            scale.fill_(0.25)
    insert_context_broadcast(model, "cbs")
    assert all((scale == 0.25).all() for scale in scales), "a second call keeps what was learned"
    other = create("swin_tiny_patch4_window7_224").double().eval()
    insert_context_broadcast(other, "cbs")
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), model.eval()(x))
    remove_context_broadcast(model)
    assert set(model.state_dict()) == names


@pytest.mark.parametrize(
    ("name", "options", "position"),
    [
        ("deit_tiny_distilled_patch16_224", {}, "front"),
        ("swin_tiny_patch4_window7_224", {"depths": (2,), "num_heads": (2,)}, "end"),
    ],
)
def test_broadcast_compiles_and_exports(name: str, options: dict[str, object], position: str) -> None:
    torch.compiler.reset()
    model, x = create(name, **options).eval(), images()
    insert_context_broadcast(model, "cbs", position)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    dims = ({0: torch.export.Dim.AUTO},)
    exported = torch.export.export(model, (images(3),), dynamic_shapes=dims).module()
    torch.testing.assert_close(exported(x), expected)


def test_broadcast_after_the_last_dropout() -> None:
    """What comes out of an MLP in training is an average of what dropout left: no token is dropped on its own."""
    model = create("vit_tiny_patch16_224", proj_drop_rate=0.5).train()
    insert_context_broadcast(model)
    dropped, seen = [], []
    model.blocks[0].mlp.drop2.register_forward_hook(lambda _, args, out: dropped.append(out))
    model.blocks[0].drop_path2.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(images())
    assert (dropped[0] == 0).float().mean() > 0.4
    torch.testing.assert_close(seen[0], broadcast(dropped[0]))


def test_broadcast_after_a_swap() -> None:
    model, x = create("deit_tiny_patch16_224").double().eval(), images(dtype=torch.float64)
    swap_mixer(model)
    expected = change_outputs(model, submodules(model, r"\.(mlp|attn)$"), broadcast)(x)
    insert_context_broadcast(model, block="both")
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-11)


def test_broadcast_refuses_and_changes_nothing() -> None:
    vit = create("vit_tiny_patch16_224")
    for kwargs, message in (
        ({"kind": "cba"}, "unknown kind 'cba' of context broadcasting: choose one of cb, cbs, gate, hybrid"),
        ({"position": "top"}, "unknown position 'top' of context broadcasting: choose one of end, mid, front"),
        ({"block": "ffn"}, "unknown block 'ffn' of context broadcasting: choose one of mlp, msa, both"),
        ({"position": "mid", "block": "msa"}, "there is no 'mid' in attention"),
        ({"position": "front", "block": "both"}, "there is no 'front' in attention"),
    ):
        with pytest.raises(ValueError, match=message):
            insert_context_broadcast(vit, **kwargs)
    assert remove_context_broadcast(vit) == []
    with pytest.raises(ValueError, match="ResNet has no blocks that insert_context_broadcast knows"):
        insert_context_broadcast(timm.create_model("resnet18", device="meta"))
    for name in ("swin_tiny_patch4_window7_224", "pvt_v2_b0", "pvt_tiny", "localvit_tiny"):
        model = create(name, device="meta")
        with pytest.raises(ValueError, match=f"which {type(model).__name__} does not have in every block"):
            insert_context_broadcast(model, "gate")
    averaging = create("vit_tiny_patch16_224", class_token=False, global_pool="avg", device="meta")
    with pytest.raises(ValueError, match="'hybrid' multiplies by the class token"):
        insert_context_broadcast(averaging, "hybrid")
    insert_context_broadcast(vit, "cb")
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp has 'cb' already: call remove_context_broadcast"):
        insert_context_broadcast(vit, "gate")
    model = create("vit_tiny_patch16_224")
    model.blocks[1].mlp = nn.Identity()
    with pytest.raises(ValueError, match=r"position 'mid' does not exist in blocks\.1 \(Block\): mlp\.fc2 is missing"):
        insert_context_broadcast(model, position="mid")
    assert remove_context_broadcast(model) == []


# Hugging Face


def hugging_face_vit() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=32, patch_size=8
    )
    return transformers.ViTForImageClassification(config), {"pixel_values": torch.randn(2, 3, 32, 32)}


def hugging_face_vilt() -> tuple[nn.Module, dict[str, Tensor]]:
    transformers = pytest.importorskip("transformers")
    config = transformers.ViltConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=32,
        patch_size=8,
        vocab_size=50,
        num_labels=3,
        max_image_length=-1,
    )
    text = torch.randint(50, (2, 7))
    inputs = {"input_ids": text, "attention_mask": torch.ones_like(text), "pixel_values": torch.randn(2, 3, 32, 32)}
    return transformers.ViltForQuestionAnswering(config), {**inputs, "pixel_mask": torch.ones(2, 32, 32).long()}


@pytest.mark.parametrize("build", [hugging_face_vit, hugging_face_vilt])
@pytest.mark.parametrize("kind", ["cb", "cbs", "gate", "hybrid"])
def test_hugging_face(build: Callable[[], tuple[nn.Module, dict[str, Tensor]]], kind: str) -> None:
    model, inputs = build()
    model = model.double().eval()
    inputs = {n: x.double() if x.is_floating_point() else x for n, x in inputs.items()}
    state, plain = copy.deepcopy(model.state_dict()), model(**inputs).logits
    ends = submodules(model, r"layers?\.\d\.(mlp|output\.dropout)$")
    mids = submodules(model, r"layers?\.\d\.(mlp\.fc2|output\.dense)$")
    fronts = submodules(model, r"layers?\.\d\.(mlp|intermediate)$")
    attentions = submodules(model, r"layers?\.\d\.attention\.(o_proj|output)$")
    assert len(ends) == len(mids) == len(fronts) == len(attentions) == 2

    def change(y: Tensor) -> Tensor:
        return broadcast(y, kind)

    for position, block, reference in (
        ("end", "mlp", change_outputs(model, ends, change)),
        ("mid", "mlp", change_inputs(model, mids, change)),
        ("front", "mlp", change_inputs(model, fronts, change)),
        ("end", "msa", change_outputs(model, attentions, change)),
    ):
        expected = reference(**inputs).logits
        assert len(insert_context_broadcast(model, kind, position, block)) == 2
        insert_context_broadcast(model, kind, position, block)
        torch.testing.assert_close(model(**inputs).logits, expected, rtol=1e-9, atol=1e-11)
        assert not torch.allclose(expected, plain, rtol=1e-9, atol=1e-11)
        if kind != "cbs":
            torch.testing.assert_close(model.state_dict(), state)
        remove_context_broadcast(model)
    torch.testing.assert_close(model(**inputs).logits, plain)


def test_hugging_face_vit_exports() -> None:
    model, inputs = hugging_face_vit()
    insert_context_broadcast(model.eval(), "hybrid")
    expected = model(**inputs).logits
    program = torch.export.export(model, (), inputs)
    torch.testing.assert_close(program.module()(**inputs).logits, expected)
    twin = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(twin(**inputs).logits, expected)
