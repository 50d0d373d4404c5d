"""Every registered mixer in a host: projections, prefix tokens, grids, the choice of blocks, and the report."""

import copy
import importlib
import json

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import tokamix
from tests.swap.hosts import create, host, images
from tokamix.mixers import Site, SuperTokenAttention, list_mixers
from tokamix.swap import swap_mixer
from tokamix.swap.product import Call, create_product

NAME = "vit_tiny_patch16_224"
swap_module = importlib.import_module("tokamix.swap.mixer")
WITH_PROJECTIONS = (
    "softmax",
    "xca",
    "sima",
    "linformer",
    "performer",
    "nystrom",
    "efficient",
    "cosformer",
    "super_token",
)
ON_GRID = ("linformer", "super_token")  # with the host's projections
WHOLE = ("active_token", "weight_mixing", "soft", "pooling", "identity")


def test_every_mixer_is_tested() -> None:
    assert {*WITH_PROJECTIONS, *WHOLE} == set(list_mixers())


@pytest.mark.parametrize("to", list_mixers())
def test_mixers_in_a_vit(to: str) -> None:
    """Two sizes, one of them not square, gradients of all parameters, and copies."""
    model = host()
    names = dict(model.named_parameters())
    report = swap_mixer(model, to)
    assert list(report.replaced) == ["blocks.0.attn", "blocks.1.attn"]
    kept = {"qkv", "proj"} if to in WITH_PROJECTIONS else set() if to in ("pooling", "identity") else {"proj"}
    for part in ("qkv", "proj"):
        name = f"blocks.0.attn.{part}.weight"
        assert (dict(model.named_parameters()).get(name) is names[name]) == (part in kept)
    assert all(name.startswith(("blocks.0.attn.mixer.", "blocks.1.attn.mixer.", "tokamix_ch")) for name in report.added)
    for size in ((64, 64), (64, 96)):
        x = torch.randn(2, 3, *size, dtype=torch.float64)
        out = model(x)
        assert out.shape == (2, 5)
        torch.testing.assert_close(copy.deepcopy(model)(x), out)
        torch.testing.assert_close(model(x[:1]), out[:1])
    out.square().sum().backward()
    unused = [n for n, p in model.named_parameters() if p.grad is None and p.requires_grad]
    assert not unused


@pytest.mark.parametrize("to", list_mixers())
def test_mixers_in_windows_and_maps(to: str) -> None:
    """Swin's windows of tokens, and a map with the channels first."""
    swin = create("swin_tiny_patch4_window7_224").eval()
    assert len(swap_mixer(swin, to).replaced) == 4
    assert swin(images()).isfinite().all()
    attention = timm.models.visformer.Attention(24, 2)
    model = nn.Sequential(nn.Conv2d(3, 24, 3, stride=4, padding=1), attention).eval()
    if to == "softmax":
        before = model(images())
    swap_mixer(model, to, image_size=64)
    out = model(torch.randn(2, 3, 64, 96))
    assert out.shape == (2, 24, 16, 24)
    if to == "softmax":
        torch.testing.assert_close(model(images() * 0 + 1).shape, before.shape)


@pytest.mark.parametrize("to", [*ON_GRID, *WHOLE])
def test_prefix_tokens(to: str) -> None:
    """Patch tokens do not depend on prefix tokens; prefix tokens attend to all tokens, or receive the mean."""
    model = host(reg_tokens=2)
    attention = model.blocks[0].attn
    x = torch.randn(2, 3 + 16, 24, dtype=torch.float64)
    q, k, v = attention.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4).unbind(0)
    softmax = attention.proj((q @ k.mT * 8**-0.5).softmax(-1).matmul(v).transpose(1, 2).flatten(2))
    swap_mixer(model, to)
    assert attention.prefix == 3
    out = attention(x)
    changed = torch.cat([torch.randn_like(x[:, :3]), x[:, 3:]], dim=1)
    torch.testing.assert_close(attention(changed)[:, 3:], out[:, 3:])
    if to in ON_GRID:
        torch.testing.assert_close(out[:, :3], softmax[:, :3])
    elif to == "pooling":
        torch.testing.assert_close(out[:, :3], x[:, 3:].mean(1, keepdim=True) - x[:, :3])
    else:
        torch.testing.assert_close(out[:, :3], out[:, 3:].mean(1, keepdim=True).expand(-1, 3, -1))


def test_super_tokens_equal_the_mixer() -> None:
    """With the host's projections inside, it is STViT's attention."""
    model = host(class_token=False, global_pool="avg")
    mixer = SuperTokenAttention(24, 3, cell=2).double()
    attention = model.blocks[0].attn
    mixer.refine.qkv.load_state_dict(attention.qkv.state_dict())
    mixer.refine.proj = nn.Identity()
    projection = attention.proj
    swap_mixer(model, "super_token")
    x = torch.randn(2, 16, 24, dtype=torch.float64)
    torch.testing.assert_close(attention(x), projection(mixer(x, (4, 4))))


def test_super_tokens_with_wide_values() -> None:
    """The values of LeViT are wider than its keys: twice the same values give twice the same output."""
    site = Site(24, 2, (4, 4))
    product, tokens = create_product("super_token", site), torch.randn(2, 16, 24, dtype=torch.float64)
    q, k, v = torch.randn(3, 2, 2, 16, 12, dtype=torch.float64)
    call = Call(tokens, None, None, None, False, 0, lambda count: (4, 4))
    out = product(q, k, v, call)
    torch.testing.assert_close(product(q, k, torch.cat([v, v], dim=-1), call), torch.cat([out, out], dim=-1))
    levit = timm.create_model("levit_128s", num_classes=5, img_size=64, depth=(1, 1, 1)).eval()
    assert len(swap_mixer(levit, "super_token", partial=True, image_size=64).replaced) == 3


def test_options_of_the_mixer() -> None:
    model = host()
    swap_mixer(model, "linformer", mixer_kwargs={"projected": 5})
    assert model.blocks[0].attn.mixer.mixer.projection.shape == (2, 5, 4, 4)
    with pytest.raises(TypeError, match="projectd"):
        swap_mixer(host(), "linformer", mixer_kwargs={"projectd": 5})
    for to, options, message in (
        ("linformer", {"projected": 0}, "at least one projected key, got projected=0"),
        ("super_token", {"cell": 0}, "super tokens need a cell from 1 on and n_iter from 0 on, got 0"),
        ("super_token", {"qk_norm": True}, "'qk_norm', but super_token has no such option.*cell, n_iter, backend"),
        ("softmax", {"window": 7}, "'window', but softmax has no such option between the projections of a host"),
    ):
        with pytest.raises(ValueError, match=message):
            swap_mixer(host(), to, mixer_kwargs=options)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        (["blocks.1"], [1]),
        (["blocks.0.attn", "blocks.2"], [0, 2]),
        ([0, -1], [0, 3]),
        ("every_other", [0, 2]),
        ("global", [0, 1, 2, 3]),
    ],
)
def test_choice_of_blocks(where: object, expected: list[int]) -> None:
    report = swap_mixer(host(depth=4), where=where)
    assert list(report.replaced) == [f"blocks.{i}.attn" for i in expected]
    assert report.kept == {f"blocks.{i}.attn": "as chosen" for i in range(4) if i not in expected}


def test_global_only() -> None:
    sam = {"img_size": 64, "embed_dim": 24, "num_heads": 2, "depth": 2, "window_size": 2, "neck_chans": 8}
    model = timm.create_model("samvit_base_patch16", global_attn_indexes=(1,), **sam)
    assert list(swap_mixer(model, where="global").replaced) == ["blocks.1.attn"]
    with pytest.raises(ValueError, match=r"where='global' selects none of the 4 attentions"):
        swap_mixer(create("swin_tiny_patch4_window7_224"), where="global")
    for where, message in (
        ("first", "unknown choice where='first': use global, every_other, or a list of names or indices"),
        (
            ["blocks.9"],
            r"where='blocks\.9' matches no attention: there are 2, such as blocks\.0\.attn, blocks\.1\.attn",
        ),
        ([7], "where=7 matches no attention"),
    ):
        with pytest.raises(ValueError, match=message):
            swap_mixer(host(), where=where)


def test_nothing_is_half_swapped() -> None:
    """Keys of another number than queries: XCA cannot; the model stays as it was unless partial=True."""
    options = {"depths": (1, 1, 1, 1), "embed_dims": (8, 16, 40, 64)}
    model = timm.create_model("pvt_v2_b0", num_classes=5, **options).eval()
    x = images()
    expected = model(x)
    with pytest.raises(
        ValueError, match=r"3 attentions cannot become xca, such as stages\.0\.blocks\.0\.attn: its quer"
    ):
        swap_mixer(model, "xca")
    assert torch.equal(model(x), expected)
    report = swap_mixer(model, "xca", partial=True)
    assert list(report.replaced) == ["stages.3.blocks.0.attn"]
    assert len(report.kept) == 3
    assert str(report).count("1 kept, its queries") == 3
    with pytest.raises(ValueError, match=r"cannot become pooling, such as blocks\.0: it does not map tokens of a grid"):
        swap_mixer(
            timm.create_model("test_vit2", block_fn=timm.models.vision_transformer.ParallelScalingBlock), "pooling"
        )


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("sam2_hiera_tiny", {"stages": (1, 2, 2, 1), "global_att_blocks": (4,)}, ["blocks.4.attn"]),
        ("hiera_tiny_224", {"stages": (1, 1, 1, 1)}, ["blocks.3.attn"]),
        ("nest_tiny", {}, [f"levels.2.transformer_encoder.{i}.attn" for i in range(8)]),
        ("coatnet_0_rw_224", {"depths": (1, 1, 1, 1)}, ["stages.2.blocks.0.attn", "stages.3.blocks.0.attn"]),
        ("tnt_s_patch16_224", {"depth": 1}, ["blocks.0.attn_out"]),
    ],
)
def test_global_attentions_of_hosts_with_both(name: str, options: dict, expected: list[str]) -> None:
    model = timm.create_model(name, device="meta", **options)
    assert list(swap_mixer(model, where="global").replaced) == expected


class Custom(nn.Module):
    """An attention without adapter."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ x.mT).softmax(-1) @ x


class Subclass(timm.layers.Attention):
    """timm's pattern by subclass: its own forward calls PyTorch's attention."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        out = torch.nn.functional.scaled_dot_product_attention(q * 2, k, v)
        return self.proj(out.transpose(1, 2).flatten(2))


class Wrapper(timm.layers.Attention):
    """A subclass whose forward calls that of its base."""

    def forward(self, x: Tensor, **kwargs: object) -> Tensor:
        return 2 * super().forward(x, **kwargs)


class Manual(timm.layers.Attention):
    """A subclass with a softmax of its own: there is no call that could be replaced."""

    def forward(self, x: Tensor) -> Tensor:
        return weigh_tokens(x)


def weigh_tokens(x: Tensor) -> Tensor:
    return (x @ x.mT).softmax(-1) @ x


class Helped(nn.Module):
    """Its softmax is in a function."""

    def forward(self, x: Tensor) -> Tensor:
        return weigh_tokens(x)


class Layered(nn.Module):
    """Its softmax is a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        return self.attend(x @ x.mT) @ x


class Functional(nn.Module):
    """OpenAI's attention pool calls PyTorch's function."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.multi_head_attention_forward(x, x, x, 8, 2, *[None] * 5)[0]


def test_no_attention_is_overlooked() -> None:
    """What computes a softmax and cannot be replaced is an error, or stands in the report."""
    for other in (Helped(), Layered(), Functional(), Manual(8, 2), type("Sub", (nn.MultiheadAttention,), {})(8, 2)):
        model = nn.Sequential(timm.layers.Attention(8, 2), other)
        if type(other).__name__ == "Sub":  # it has the forward of nn.MultiheadAttention
            assert list(swap_mixer(model).replaced) == ["0", "1"]
            continue
        with pytest.raises(ValueError, match=r"1 attentions cannot become sima, such as 1: "):
            swap_mixer(model)
        assert list(swap_mixer(model, where=[0]).kept) == ["1"]
    wrapper, x = Wrapper(8, 2), torch.randn(2, 5, 8)
    plain, swapped = copy.deepcopy(wrapper), timm.layers.Attention(8, 2)
    swapped.load_state_dict(wrapper.state_dict())
    swap_mixer(wrapper)
    swap_mixer(swapped)
    torch.testing.assert_close(wrapper(x), 2 * swapped(x))
    assert not torch.allclose(wrapper(x), plain(x))


def test_attentions_of_others() -> None:
    model = nn.Sequential(timm.layers.Attention(8, 2), Custom())
    with pytest.raises(ValueError, match=r"1 attentions cannot become sima, such as 1: Custom computes a softmax"):
        swap_mixer(model)
    report = swap_mixer(model, partial=True)
    assert list(report.replaced) == ["0"]
    assert list(report.kept) == ["1"]
    x = torch.randn(2, 5, 8)
    own = Subclass(8, 2)
    plain = own(x)
    swap_mixer(own, "softmax")
    torch.testing.assert_close(own(x), plain)


def test_report() -> None:
    report = swap_mixer(host(), relu=True, image_size=64)
    data = json.loads(json.dumps(report.to_dict()))
    assert data["before"]["exp"]["softmax"] == 2 * 3 * 17 * 17
    assert not data["after"]["exp"]
    assert data["after"]["macs"] < data["before"]["macs"]
    assert data["before"]["parameters"] == data["after"]["parameters"]
    assert "at 64x64: parameters" in str(report)
    swiglu = timm.create_model("eva02_tiny_patch14_224", img_size=56, depth=1, embed_dim=24, num_heads=3)
    assert swap_mixer(swiglu, relu=True).activations == ["blocks.0.mlp.act"]
    assert not tokamix.count_exp(swiglu, 56)


def test_sigmoids_of_gates_are_reported() -> None:
    gated = nn.Sequential(timm.layers.Attention(24, 3, gated=True), nn.SiLU())
    report = swap_mixer(gated, relu=True)
    assert report.activations == ["1"]
    assert report.notes == ["exp remains in 1 modules, such as 0 (sigmoid)"]


def test_padding_of_naflex() -> None:
    """Images of different grids in one batch: each has the outputs that it has alone."""
    options = {"depth": 2, "embed_dim": 24, "num_heads": 3}
    model = timm.create_model("naflexvit_base_patch16_gap", num_classes=5, **options).double().eval()
    swap_mixer(model)
    patches = torch.randn(2, 16, 16 * 16 * 3, dtype=torch.float64)
    rows, columns = (grid.flatten() for grid in torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij"))
    places = torch.stack([rows, columns], dim=1).expand(2, -1, -1)
    valid = torch.arange(16) < torch.tensor([[16], [8]])
    places = places * valid.unsqueeze(-1)
    out = model(patches, places, valid)
    for image, count in enumerate((16, 8)):
        alone = (part[image : image + 1, :count] for part in (patches, places, valid))
        torch.testing.assert_close(model(*alone)[0], out[image])


def test_torchvision_models() -> None:
    """ViT has nn.MultiheadAttention, Swin shifted windows of maps."""
    vit = torchvision.models.VisionTransformer(64, 16, 2, 3, 24, 48, num_classes=5)
    swin = torchvision.models.SwinTransformer([4, 4], 24, [2], [2], [4, 4], num_classes=5)
    x = images()
    for model in (vit.eval(), swin.eval()):
        nn.init.normal_((model.heads[0] if model is vit else model.head).weight)
        plain = model(x)
        same, other = copy.deepcopy(model), copy.deepcopy(model)
        swap_mixer(same, "softmax")
        torch.testing.assert_close(same(x), plain)
        assert len(swap_mixer(other).replaced) == 2
        assert not tokamix.count_exp(other, 64)["softmax"]
        assert not torch.allclose(other(x), plain, atol=1e-4)


def test_padding_and_causal_masks() -> None:
    """Padded tokens change nothing; a causal mask is refused, because norms are over all tokens."""
    attention = timm.layers.Attention(24, 3).double().eval()
    swap_mixer(attention)
    x = torch.randn(2, 9, 24, dtype=torch.float64)
    valid = torch.arange(9) < torch.tensor([[9], [6]])
    for mask in (valid[:, None, None, :], valid[:, None, None, :] & valid[:, None, :, None]):
        out = attention(x, attn_mask=mask)
        other = torch.where(valid.unsqueeze(-1), x, torch.randn_like(x))
        torch.testing.assert_close(attention(other, attn_mask=mask)[valid], out[valid])
        torch.testing.assert_close(out[1, :6], attention(x[1:, :6])[0])
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    for mask in (causal, torch.zeros(9, 9, dtype=torch.float64).masked_fill(~causal, -torch.inf)):
        with pytest.raises(ValueError, match="no causal form"):
            attention(x, attn_mask=mask)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    swap_mixer(encoder)
    with pytest.raises(ValueError, match="no causal form"):
        encoder(torch.randn(2, 5, 8), src_mask=nn.Transformer.generate_square_subsequent_mask(5))
    for to in ("performer", "super_token", "pooling"):
        model = timm.layers.Attention(24, 3).double()
        other = nn.Sequential(nn.Conv2d(3, 24, 4, 4), nn.Flatten(2), Transposed(), model).double()
        swap_mixer(other, to, image_size=16)
        with pytest.raises(ValueError, match="cannot exclude masked tokens"):
            model(x[:, :9], attn_mask=valid[:, None, None, :])


class Transposed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2)


def test_compiles() -> None:
    """One host of each kind: its own forward with another product, and a forward of ours."""
    torch.compiler.reset()
    options = {"img_size": 56, "depth": 1, "embed_dim": 24, "num_heads": 3, "num_classes": 5}
    model = timm.create_model("eva02_tiny_patch14_224", **options).eval()
    swap_mixer(model)
    x = torch.randn(2, 3, 56, 56)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    exported = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},)).module()
    torch.testing.assert_close(exported(x[:1]), expected[:1])


@pytest.mark.parametrize(("name", "prefix"), [("cait_xxs24_224", 0), ("crossvit_9_240", 1)])
def test_class_tokens_of_other_hosts(name: str, prefix: int) -> None:
    """CaiT's class token comes after its self-attention; CrossViT's tokens have names of their own."""
    options = {"img_size": 64, "depth": 1, "embed_dim": 24, "num_heads": 3} if prefix == 0 else {}
    model = timm.create_model(name, num_classes=5, **options).eval()
    report = swap_mixer(model, "linformer")
    module = model.get_submodule(next(iter(report.replaced)))
    assert module.prefix == prefix
    size = 64 if prefix == 0 else 240
    assert model(torch.randn(1, 3, size, size)).isfinite().all()


def test_more_keys_than_queries() -> None:
    """An attention pool has one query: Nyström's product is then exact."""
    pool = timm.layers.AttentionPoolLatent(24, num_heads=3).double()
    x = torch.randn(2, 100, 24, dtype=torch.float64)
    expected = pool(x)
    swap_mixer(pool, "nystrom")
    torch.testing.assert_close(pool(x), expected)


def test_unknown_class_tokens() -> None:
    """7 x 7 patches and a token that is not known as a class token are no grid of 5 x 10."""

    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.attn = nn.Conv2d(3, 8, 4, 4), timm.layers.Attention(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            tokens = self.embed(x).flatten(2).mT
            return self.attn(torch.cat([tokens[:, :1], tokens], dim=1))

    model, x = Unknown(), torch.randn(1, 3, 28, 28)
    plain = model(x)
    for to in ("pooling", "linformer"):
        with pytest.raises(ValueError, match=rf"its 50 tokens do not form a grid of the image, which {to} needs"):
            swap_mixer(model, to, image_size=28)
    assert torch.equal(model(x), plain)


def test_masks_given_by_position() -> None:
    """Mixers with their own projections refuse a mask however it is given, and attention between two sets of tokens."""

    class Net(nn.Module):
        def __init__(self, cross: bool) -> None:
            super().__init__()
            self.embed, self.cross = nn.Conv2d(3, 8, 4, 4), cross
            self.attn = nn.MultiheadAttention(8, 2, batch_first=True)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = self.embed(x).flatten(2).mT
            return self.attn(x, x + self.cross, x + self.cross, mask)[0] if self.cross else self.attn(x, x, x, mask)[0]

    with pytest.raises(ValueError, match="pooling needs self-attention, one tensor as query, key and value"):
        swap_mixer(Net(cross=True), "pooling", image_size=16)
    model, x = Net(cross=False), torch.randn(1, 3, 16, 16)
    swap_mixer(model, "pooling", image_size=16)
    assert model(x).shape == (1, 16, 8)
    with pytest.raises(ValueError, match="Pooling cannot exclude masked tokens"):
        model(x, torch.zeros(1, 16, dtype=torch.bool))


def test_a_second_swap_and_an_attention_alone() -> None:
    model = host()
    swap_mixer(model)
    with pytest.raises(ValueError, match=r"it was changed by swap_mixer\(to='sima'\); swap a new model"):
        swap_mixer(model, "xca")
    with pytest.raises(ValueError, match=r"pooling needs the grid of its tokens.*swap it in that model, with where="):
        swap_mixer(timm.layers.Attention(8, 2), "pooling")
    with pytest.raises(ValueError, match="Attention does not run on an image of 64x64, so that its cost cannot be"):
        swap_mixer(timm.layers.Attention(8, 2), image_size=64)


def test_relu_in_other_activations() -> None:
    """What is not replaced is named: here a SiLU that is no module, found by running the model."""

    class Gated(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * torch.nn.functional.silu(x)

    model = nn.Sequential(nn.Conv2d(3, 8, 4, 4), nn.Flatten(2), Transposed(), timm.layers.Attention(8, 2), Gated())
    report = swap_mixer(model, relu=True, image_size=16)
    assert report.notes == ["exp remains in 1 modules, such as 4 (sigmoid)"]
    layer = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True).eval()
    report = swap_mixer(nn.Sequential(layer, timm.layers.Attention(8, 2)), relu=True, where=["1"])
    x = torch.randn(2, 5, 8)
    with torch.no_grad():  # PyTorch's fast path reads another attribute
        fast = layer(x)
    torch.testing.assert_close(fast, layer(x.requires_grad_()))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": 5}, r"where=5 must be 'global', 'every_other', or a list of names and indices"),
        ({"where": [1.5]}, r"where=\[1\.5\] must be"),
        ({"where": [True, False]}, r"where=\[True, False\] must be"),
        ({"image_size": "64"}, "image_size='64' must be the side of images in pixels"),
        ({"image_size": (1, 2, 3)}, r"image_size=\(1, 2, 3\) must be"),
        ({"image_size": 63}, "does not run on an image of 63x63, so that its cost cannot be counted"),
        ({"num_heads": 2.0}, "num_heads=2.0 must be a whole number from 1 on"),
        ({"mixer_kwargs": [1]}, r"mixer_kwargs=\[1\] must be a mapping"),
        ({"mixer_kwargs": {"norm": "l3"}}, "SimA has no norm 'l3'"),
        ({"mixer_kwargs": {"qkv_bias": False}}, "mixer_kwargs has 'qkv_bias', but sima has no such option between"),
        ({"calibrate": 3}, r"calibration needs images \(B, C, H, W\) without labels, got int"),
        ({"calibrate": torch.full((2, 3, 64, 64), torch.nan)}, "have values that are not finite"),
        ({"calibrate": [images(), images()[..., :32]]}, r"does not take the images for calibration, \(2, 3, 64, 32\)"),
        ({"mixer_kwargs": {"norm": torch.tensor(1)}}, "mixer_kwargs must be numbers, texts and lists"),
        ({"calibrate": torch.zeros(0, 3, 64, 64)}, "calibration needs images, got none"),
        ({"calibrate": torch.zeros(2, 3, 60, 64)}, r"does not take the images for calibration, \(2, 3, 60, 64\)"),
        ({"calibrate": [(images(), torch.zeros(2))]}, "without labels, got tuple"),
    ],
)
def test_options_that_fail_leave_the_model_unchanged(options: dict, message: str) -> None:
    model = create(NAME)
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(ValueError, match=message):
        swap_mixer(model, "sima", **options)
    assert [(name, type(module)) for name, module in model.named_modules()] == before
    assert "tokamix_changes" not in model.state_dict()


def test_a_failed_swap_is_undone(monkeypatch) -> None:
    """Whatever fails after the first change, the model is as before: modules, weights, hooks, configuration."""
    model, x = create(NAME, drop_path_rate=0.1).eval(), images()
    plain, cfg = model(x), model.pretrained_cfg

    def fail(*args: object) -> None:
        with torch.no_grad():
            model.blocks[0].attn.proj.weight.zero_()
        raise RuntimeError("no convergence")

    monkeypatch.setattr(swap_module, "calibrate_mixers", fail)
    with pytest.raises(RuntimeError, match="no convergence"):
        swap_mixer(model, relu=True, calibrate=x)
    assert torch.equal(model(x), plain)
    assert type(model.blocks[0].attn) is timm.layers.Attention
    assert type(model.blocks[0].mlp.act) is nn.GELU
    assert model.pretrained_cfg is cfg
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_blocks_by_range() -> None:
    model = host(depth=4)
    assert len(swap_mixer(model, where=range(1, 3)).replaced) == 2
