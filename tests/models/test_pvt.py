"""PVT against transformers' PVT, and against a plain formula on the authors' parameter names."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from tokamix import count_macs
from tokamix.models.pvt import DEPTHS, PVT, checkpoint_filter_fn

DIMS, HEADS, RATIOS, REDUCTIONS = (64, 128, 320, 512), (1, 2, 5, 8), (8, 8, 4, 4), (8, 4, 2, 1)
State = dict[str, Tensor]
ONE_EACH = (1, 1, 1, 1)


def official_shapes(depths: tuple[int, ...], num_classes: int, img_size: int = 224) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the checkpoints of whai362/PVT."""
    shapes: dict[str, tuple[int, ...]] = {}

    def affine(name: str, dim: int) -> None:
        shapes.update({f"{name}.weight": (dim,), f"{name}.bias": (dim,)})

    def linear(name: str, out: int, *fan_in: int) -> None:
        shapes.update({f"{name}.weight": (out, *fan_in), f"{name}.bias": (out,)})

    for i, (dim, depth, before, patch) in enumerate(zip(DIMS, depths, (3, *DIMS), (4, 2, 2, 2), strict=False)):
        linear(f"patch_embed{i + 1}.proj", dim, before, patch, patch)
        affine(f"patch_embed{i + 1}.norm", dim)
        shapes[f"pos_embed{i + 1}"] = (1, (img_size // (4 * 2**i)) ** 2 + (i == 3), dim)
        for j in range(depth):
            block = f"block{i + 1}.{j}"
            affine(f"{block}.norm1", dim)
            affine(f"{block}.norm2", dim)
            linear(f"{block}.attn.q", dim, dim)
            linear(f"{block}.attn.kv", 2 * dim, dim)
            linear(f"{block}.attn.proj", dim, dim)
            if REDUCTIONS[i] > 1:
                linear(f"{block}.attn.sr", dim, dim, REDUCTIONS[i], REDUCTIONS[i])
                affine(f"{block}.attn.norm", dim)
            linear(f"{block}.mlp.fc1", RATIOS[i] * dim, dim)
            linear(f"{block}.mlp.fc2", dim, RATIOS[i] * dim)
    shapes["cls_token"] = (1, 1, DIMS[-1])
    affine("norm", DIMS[-1])
    linear("head", num_classes, DIMS[-1])
    return shapes


def formula(w: State, x: Tensor, depths: tuple[int, ...], img_size: int) -> Tensor:
    """Logits by the paper's equations, pixel maps channels first, with the authors' names."""

    def linear(name: str, x: Tensor) -> Tensor:
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(name: str, x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], w[f"{name}.weight"], w[f"{name}.bias"], eps)

    for i, (dim, depth, heads) in enumerate(zip(DIMS, depths, HEADS, strict=True)):
        embed = f"patch_embed{i + 1}"
        x = F.conv2d(x, w[f"{embed}.proj.weight"], w[f"{embed}.proj.bias"], stride=4 if i == 0 else 2)
        height, width = x.shape[-2:]
        x = norm(f"{embed}.norm", x.flatten(2).mT, 1e-5)
        positions = w[f"pos_embed{i + 1}"]
        side = img_size // (4 * 2**i)
        grid = positions[:, -side * side :].mT.unflatten(2, (side, side))
        grid = F.interpolate(grid, size=(height, width), mode="bilinear").flatten(2).mT
        if i == 3:
            x = torch.cat([w["cls_token"].expand(len(x), 1, dim), x], dim=1)
            grid = torch.cat([positions[:, :1], grid], dim=1)
        x = x + grid
        for j in range(depth):
            block = f"block{i + 1}.{j}"
            y = source = norm(f"{block}.norm1", x, 1e-6)
            if REDUCTIONS[i] > 1:
                source = y.mT.unflatten(2, (height, width))
                sr = f"{block}.attn.sr"
                source = F.conv2d(source, w[f"{sr}.weight"], w[f"{sr}.bias"], stride=REDUCTIONS[i]).flatten(2).mT
                source = norm(f"{block}.attn.norm", source, 1e-5)
            q = linear(f"{block}.attn.q", y).unflatten(2, (heads, 64))
            k, v = linear(f"{block}.attn.kv", source).unflatten(2, (2, heads, 64)).unbind(2)
            weights = (torch.einsum("bnhd,bmhd->bhnm", q, k) / 8).softmax(-1)
            x = x + linear(f"{block}.attn.proj", torch.einsum("bhnm,bmhd->bnhd", weights, v).flatten(2))
            y = linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x, 1e-6))
            x = x + linear(f"{block}.mlp.fc2", y * (1 + torch.erf(y / 2**0.5)) / 2)
        if i < 3:
            x = x.mT.unflatten(2, (height, width))
    return linear("head", norm("norm", x[:, 0], 1e-6))


def create(**kwargs: object) -> PVT:
    torch.manual_seed(0)
    return timm.create_model("pvt_tiny", **{"num_classes": 5, "depths": ONE_EACH, **kwargs}).double().eval()


@pytest.mark.parametrize(
    ("name", "parameters", "macs"),
    [
        ("pvt_tiny", 13_229_288, 1_932_911_616),
        ("pvt_small", 24_485_864, 3_815_701_504),
        ("pvt_medium", 44_208_104, 6_659_175_424),
        ("pvt_large", 61_369_320, 9_813_765_632),
    ],
)
def test_parameters_macs_and_official_names(name: str, parameters: int, macs: int) -> None:
    model = timm.create_model(name, device="meta").eval()
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert count_macs(model) == macs
    official = {n: torch.empty(s, device="meta") for n, s in official_shapes(DEPTHS[name], 1000).items()}
    loaded = checkpoint_filter_fn(official, model)
    assert {n: t.shape for n, t in loaded.items()} == {n: t.shape for n, t in model.state_dict().items()}


@pytest.mark.parametrize("size", [(64, 64), (96, 70), (32, 128)])
def test_formula(size: tuple[int, int], random_weights) -> None:
    """At the size of the position embeddings, at others, and for a different shape with as many tokens."""
    depths = (2, 1, 1, 2)
    weights = random_weights(official_shapes(depths, 5, img_size=64))
    model = create(depths=depths, img_size=64)
    model.load_state_dict(checkpoint_filter_fn(weights, model))
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(model(x), formula(weights, x, depths, 64), rtol=1e-9, atol=1e-11)


def test_transformers(random_weights) -> None:
    """transformers has one epsilon for all norms."""
    transformers = pytest.importorskip("transformers")
    config = transformers.PvtConfig(num_labels=5, image_size=64, depths=ONE_EACH)
    theirs = transformers.PvtForImageClassification(config).double().eval()
    theirs.load_state_dict(random_weights({n: t.shape for n, t in theirs.state_dict().items()}))
    ours = create(img_size=64, embed_eps=1e-6)
    ours.load_state_dict(checkpoint_filter_fn(theirs.state_dict(), ours))
    inputs = [torch.randn(2, 3, 64, 64, dtype=torch.float64, requires_grad=True)]
    inputs.append(inputs[0].detach().clone().requires_grad_())
    logits = [theirs(inputs[0]).logits, ours(inputs[1])]
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-9, atol=1e-11)
    for y in logits:
        y.square().sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, rtol=1e-9, atol=1e-11)
    expected = checkpoint_filter_fn({n: p.grad for n, p in theirs.named_parameters()}, ours)
    # the key's bias shifts all scores of a query equally: its gradient is zero up to rounding
    torch.testing.assert_close({n: p.grad for n, p in ours.named_parameters()}, expected, rtol=1e-9, atol=1e-10)


def test_own_state_dict_passes_unchanged() -> None:
    model = create(img_size=64)
    state = model.state_dict()
    passed = checkpoint_filter_fn(state, model)
    assert all(passed[name] is tensor for name, tensor in state.items())


def test_positions_are_resized_once_or_each_time() -> None:
    """Resizing the model, loading a checkpoint and resizing on the fly give equal results."""
    model = create(img_size=64)
    x = torch.randn(1, 3, 96, 128, dtype=torch.float64)
    logits = model(x)
    loaded = create(img_size=(96, 128))
    loaded.load_state_dict(checkpoint_filter_fn(model.state_dict(), loaded))
    assert loaded.stages[0].pos_embed.table.shape == (1, 24 * 32, 64)
    torch.testing.assert_close(loaded(x), logits)
    model.set_input_size((96, 128))
    assert model.stages[3].pos_embed.table.shape == (1, 1 + 3 * 4, 512)
    torch.testing.assert_close(model(x), logits)
    assert all(p.requires_grad and p.dtype == torch.float64 for p in model.parameters())


def test_bad_sizes() -> None:
    with pytest.raises(ValueError, match=r"at least 32 px, got img_size=64x31"):
        create(img_size=(64, 31))
    wide = create(img_size=(64, 96))
    with pytest.raises(ValueError, match="384 tokens, 0 of them prefix tokens, has no square grid"):
        checkpoint_filter_fn(wide.state_dict(), create(img_size=64))


def test_only_the_class_token_is_not_decayed() -> None:
    assert create(img_size=64).no_weight_decay() == {"stages.3.cls_token"}


def test_features_exclude_the_class_token() -> None:
    model = create(img_size=64)
    features, maps = model.forward_intermediates(torch.randn(1, 3, 64, 96, dtype=torch.float64), norm=True)
    assert features.shape == (1, 1 + 2 * 3, 512)
    torch.testing.assert_close(maps[-1].flatten(2).mT, features[:, 1:])
    assert [m.shape[1:] for m in maps] == [(64, 16, 24), (128, 8, 12), (320, 4, 6), (512, 2, 3)]
