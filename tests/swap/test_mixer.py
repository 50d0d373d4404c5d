"""`swap_mixer`: the formulas of the replaced attention, kept parameters, and errors."""

import copy
import pickle
import re
from typing import Any

import pytest
import timm
import torch
from timm.layers import Attention
from torch import Tensor, nn

import tokamix
from tests.swap.hosts import CLASSES, HOSTS, SIZE, broadcast, change_outputs, create, images, submodules, weights
from tokamix.swap import insert_context_broadcast, swap_mixer
from tokamix.swap.attention import Swapped

# number of attentions, and a pattern for the parameters that SimA drops
SWAPPED: dict[str, tuple[int, str]] = {
    "vit_tiny_patch16_224": (2, "$"),
    "deit_tiny_patch16_224": (2, "$"),
    "deit_tiny_distilled_patch16_224": (2, "$"),
    "xcit_nano_12_p16_224": (4, r"blocks\.\d\.attn\.temperature$"),
    "cait_xxs24_224": (4, r"blocks\.\d\.attn\.proj_[lw]\."),
    "pit_ti_224": (3, "$"),
    "swin_tiny_patch4_window7_224": (4, r"layers\.\d\.blocks\.\d\.attn\.relative_position_bias_table$"),
    "cvt_13": (3, "$"),
    "pvt_tiny": (4, "$"),
    "localvit_tiny": (2, "$"),
}


def simple_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """SimA as in the paper; q, k, v (B, H, N, D)."""
    q, k = (x / x.abs().sum(-2, keepdim=True) for x in (q, k))
    return q @ (k.transpose(-2, -1) @ v)


def heads(x: Tensor, number: int) -> Tensor:
    return x.unflatten(-1, (number, -1)).transpose(1, 2)


@pytest.mark.parametrize("name", SWAPPED)
def test_swap_keeps_shapes_parameters_and_gradients(name: str) -> None:
    attentions, dropped = SWAPPED[name]
    model = create(name).train()
    before = dict(model.named_parameters())
    x = images()
    expected = model.eval()(x).shape
    report = swap_mixer(model.train())
    after = dict(model.named_parameters())
    assert sorted(before.keys() - after.keys()) == report.dropped == [n for n in sorted(before) if re.match(dropped, n)]
    assert all(parameter is before[name] for name, parameter in after.items())
    assert len(report.replaced) == attentions
    assert f"{attentions} mixers replaced by sima" in str(report)
    assert all(module.training for module in model.modules())
    assert tokamix.count_exp(model.eval(), SIZE)["softmax"] == 0
    out = model.train()(x)
    assert out.shape == expected
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    model(x).square().sum().backward()
    gradients = {n: p.grad for n, p in model.named_parameters()}
    assert not [n for n, g in gradients.items() if g is None or not g.isfinite().all() or not g.any()]
    with pytest.raises(ValueError, match=f"{type(model).__name__} has no attention that swap_mixer can replace"):
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


def test_an_empty_batch() -> None:
    """As timm's own attention takes it: a filter in front of the model may leave no image."""
    model = create("vit_tiny_patch16_224")
    for mixer in ("sima", "super_token"):
        swapped = copy.deepcopy(model)
        swap_mixer(swapped, to=mixer)
        assert swapped.eval()(images(0)).shape == (0, CLASSES)


def test_class_attention() -> None:
    """The class token's row of SimA over all tokens, including itself."""
    x = torch.randn(2, 10, 24, dtype=torch.float64)
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


def test_swapped_xcit_equals_xcit_sima() -> None:
    """timm's XCiT after a swap equals our XCiT with SimA, which is tested against the authors' numbers."""
    host = create("xcit_nano_12_p16_224").double()
    with torch.no_grad():
        for tensor in [*host.parameters(), *(b for b in host.buffers() if b.is_floating_point())]:
            tensor.add_(0.1 * torch.rand_like(tensor))
    swap_mixer(host.eval())
    state = weights(host)
    for name in [name for name in state if re.match(r"cls_attn_blocks\.\d\.attn\.q\.", name)]:
        parts = [state.pop(name.replace(".attn.q.", f".attn.{part}.")) for part in "qkv"]
        state[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)  # the authors project to all three at once
    ours = (
        timm.create_model("xcit_nano_12_p16_sima", **HOSTS["xcit_nano_12_p16_224"], num_classes=CLASSES).double().eval()
    )
    tokamix.load_checkpoint(ours, state)
    x = images(dtype=torch.float64)
    torch.testing.assert_close(host(x), ours(x), rtol=1e-6, atol=1e-9)  # timm encodes positions in float32


def test_shifted_windows() -> None:
    """In shifted windows, pairs across the border get weight 0; each window is normalised on its own."""
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
    swap_mixer(model)
    seen: list[tuple[Tensor, ...]] = []
    attention.attend.register_forward_hook(lambda _, args, out: seen.append((*args, out)))
    model(images(1, torch.float64))
    q, k, v, out = seen[0]
    assert q.shape[2] > k.shape[2]
    torch.testing.assert_close(out, simple_attention(q, k, v), rtol=1e-10, atol=1e-12)


def test_optional_parts_of_timm_attention() -> None:
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
        swap_mixer(nn.Sequential(Attention(12, 3, qk_norm=True, norm_layer=nn.LayerNorm)), num_heads=1)


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
    assert isinstance(model[0], Swapped)
    assert [type(m) for m in model[1:]] == [nn.ReLU, nn.Linear, nn.ReLU]


def test_swapped_models_copy_and_pickle() -> None:
    """tests/models/test_swapped.py compiles and exports the registered models."""
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


def test_errors_leave_the_model_unchanged() -> None:
    model = create("deit_tiny_patch16_224")
    with pytest.raises(TypeError, match=r"swap_mixer changes a model, not 'deit_tiny_patch16_224'; create it first"):
        swap_mixer("deit_tiny_patch16_224")
    with pytest.raises(ValueError, match=r"there is no mixer 'simba'; did you mean"):
        swap_mixer(model, to="simba")
    with pytest.raises(ValueError, match=r"24 channels of blocks\.0\.attn do not divide into 5 heads"):
        swap_mixer(model, num_heads=5)
    with pytest.raises(ValueError, match="num_heads=0 must be a whole number from 1 on"):
        swap_mixer(model, num_heads=0)
    with pytest.raises(ValueError, match="ResNet has no attention that swap_mixer can replace"):
        swap_mixer(timm.create_model("resnet18", device="meta"))
    with pytest.raises(ValueError, match="adds a token to keys and values"):
        swap_mixer(nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, add_bias_kv=True)}))
    insert_context_broadcast(model, block="msa")
    with pytest.raises(ValueError, match=r"blocks\.0\.attn has context broadcasting"):
        swap_mixer(model)
    assert sum(type(m) is Attention for m in model.modules()) == 2


def test_broadcast_after_a_swap() -> None:
    model, x = create("deit_tiny_patch16_224").double().eval(), images(dtype=torch.float64)
    swap_mixer(model)
    expected = change_outputs(model, submodules(model, r"\.(mlp|attn)$"), broadcast)(x)
    insert_context_broadcast(model, block="both")
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("options", [{"qk_norm": True}, {"window": 2}])
def test_softmax_in_a_body_is_unchanged(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    body = tokamix.create_body("columnar_tiny", "softmax", dim=16, depth=2, num_heads=2, mixer_kwargs=options).eval()
    for parameter in body.parameters():
        nn.init.normal_(parameter, std=0.3)
    images = torch.randn(2, 3, 64, 64)
    expected = body(images)
    report = swap_mixer(body, to="softmax")
    torch.testing.assert_close(body(images), expected)
    assert "dropped" not in str(report)
