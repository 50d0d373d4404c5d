"""LocalViT against a plain formula on the authors' parameter names."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from tokamix import count_macs
from tokamix.models.localvit import LocalViT, checkpoint_filter_fn

DIM, HEADS = 192, 4
State = dict[str, Tensor]


def official_shapes(depth: int, num_classes: int, img_size: int = 224) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the checkpoint localvit_t.pth of ofsoundof/LocalViT."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, DIM),
        "pos_embed": (1, 1 + (img_size // 16) ** 2, DIM),
        "patch_embed.proj.weight": (DIM, 3, 16, 16),
        "patch_embed.proj.bias": (DIM,),
        "norm.weight": (DIM,),
        "norm.bias": (DIM,),
        "head.weight": (num_classes, DIM),
        "head.bias": (num_classes,),
    }
    for i in range(depth):
        block, conv = f"blocks.{i}", f"blocks.{i}.conv.conv"
        shapes |= {f"{block}.norm1.weight": (DIM,), f"{block}.norm1.bias": (DIM,)}
        shapes |= {f"{block}.attn.qkv.weight": (3 * DIM, DIM), f"{block}.attn.qkv.bias": (3 * DIM,)}
        shapes |= {f"{block}.attn.proj.weight": (DIM, DIM), f"{block}.attn.proj.bias": (DIM,)}
        shapes |= {f"{conv}.0.weight": (4 * DIM, DIM, 1, 1), f"{conv}.3.weight": (4 * DIM, 1, 3, 3)}
        shapes |= {f"{conv}.6.fc.0.weight": (4, 4 * DIM), f"{conv}.6.fc.0.bias": (4,)}
        shapes |= {f"{conv}.6.fc.2.weight": (4 * DIM, 4), f"{conv}.6.fc.2.bias": (4 * DIM,)}
        shapes |= {f"{conv}.7.weight": (DIM, 4 * DIM, 1, 1)}
        for bn, dim in ((1, 4 * DIM), (4, 4 * DIM), (8, DIM)):
            shapes |= {f"{conv}.{bn}.{s}": (dim,) for s in ("weight", "bias", "running_mean", "running_var")}
            shapes |= {f"{conv}.{bn}.num_batches_tracked": ()}
    return shapes


def formula(w: State, x: Tensor, depth: int) -> Tensor:
    """Normalised tokens by the paper's equations, pixel maps channels first, with the authors' names."""

    def batch_norm(name: str, x: Tensor) -> Tensor:
        mean, var, weight, bias = (
            w[f"{name}.{s}"][:, None, None] for s in ("running_mean", "running_var", "weight", "bias")
        )
        return (x - mean) / (var + 1e-5).sqrt() * weight + bias

    def gate(x: Tensor) -> Tensor:
        return (x + 3).clamp(0, 6) / 6

    x = F.conv2d(x, w["patch_embed.proj.weight"], w["patch_embed.proj.bias"], stride=16)
    height, width = x.shape[-2:]
    x = torch.cat([w["cls_token"].expand(len(x), 1, DIM), x.flatten(2).mT], dim=1) + w["pos_embed"]
    for i in range(depth):
        block, conv = f"blocks.{i}", f"blocks.{i}.conv.conv"
        y = F.layer_norm(x, (DIM,), w[f"{block}.norm1.weight"], w[f"{block}.norm1.bias"], 1e-6)
        qkv = y @ w[f"{block}.attn.qkv.weight"].T + w[f"{block}.attn.qkv.bias"]
        q, k, v = qkv.unflatten(2, (3, HEADS, DIM // HEADS)).unbind(2)
        weights = (torch.einsum("bnhd,bmhd->bhnm", q, k) / (DIM // HEADS) ** 0.5).softmax(-1)
        y = torch.einsum("bhnm,bmhd->bnhd", weights, v).flatten(2)
        x = x + y @ w[f"{block}.attn.proj.weight"].T + w[f"{block}.attn.proj.bias"]
        token, patches = x[:, :1], x[:, 1:].mT.unflatten(2, (height, width))
        y = batch_norm(f"{conv}.1", F.conv2d(patches, w[f"{conv}.0.weight"]))
        y = y * gate(y)
        y = batch_norm(f"{conv}.4", F.conv2d(y, w[f"{conv}.3.weight"], padding=1, groups=4 * DIM))
        y = y * gate(y)
        squeezed = y.mean((2, 3)) @ w[f"{conv}.6.fc.0.weight"].T + w[f"{conv}.6.fc.0.bias"]
        excited = squeezed.clamp_min(0) @ w[f"{conv}.6.fc.2.weight"].T + w[f"{conv}.6.fc.2.bias"]
        y = batch_norm(f"{conv}.8", F.conv2d(y * gate(excited)[:, :, None, None], w[f"{conv}.7.weight"]))
        x = torch.cat([token, (patches + y).flatten(2).mT], dim=1)
    return F.layer_norm(x, (DIM,), w["norm.weight"], w["norm.bias"], 1e-6)


def create(**kwargs: object) -> LocalViT:
    torch.manual_seed(0)
    return timm.create_model("localvit_tiny", **{"num_classes": 5, "depth": 2, **kwargs}).double().eval()


def test_parameters_macs_and_official_names() -> None:
    model = timm.create_model("localvit_tiny", device="meta").eval()
    assert sum(p.numel() for p in model.parameters()) == 5_908_696
    assert count_macs(model) == 1_266_475_008
    official = {n: torch.empty(s, device="meta") for n, s in official_shapes(12, 1000).items()}
    loaded = checkpoint_filter_fn(official, model)
    assert {n: t.shape for n, t in loaded.items()} == {n: t.shape for n, t in model.state_dict().items()}


def test_formula(random_weights) -> None:
    weights = random_weights(official_shapes(2, 5, img_size=64))
    model = create(img_size=64)
    model.load_state_dict(checkpoint_filter_fn(weights, model))
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    tokens = formula(weights, x, depth=2)
    torch.testing.assert_close(model.forward_features(x), tokens, rtol=1e-9, atol=1e-11)
    logits = tokens[:, 0] @ weights["head.weight"].T + weights["head.bias"]
    torch.testing.assert_close(model(x), logits, rtol=1e-9, atol=1e-11)


def test_own_state_dict_passes_unchanged() -> None:
    model = create(img_size=64)
    state = model.state_dict()
    passed = checkpoint_filter_fn(state, model)
    assert all(torch.equal(passed[name], tensor) for name, tensor in state.items())
    assert passed.keys() == state.keys()


def test_positions_are_resized_once_or_each_time() -> None:
    """Resizing the model, loading a checkpoint and resizing on the fly give equal results."""
    model = create(img_size=64)
    x = torch.randn(1, 3, 48, 96, dtype=torch.float64)
    logits = model(x)
    loaded = create(img_size=(48, 96))
    loaded.load_state_dict(checkpoint_filter_fn(model.state_dict(), loaded))
    torch.testing.assert_close(loaded(x), logits)
    model.set_input_size((48, 96))
    assert model.pos_embed.table.shape == (1, 1 + 3 * 6, DIM)
    torch.testing.assert_close(model(x), logits)
    with pytest.raises(ValueError, match="at least 16 px, got img_size=8x8"):
        model.set_input_size(8)


def test_class_token_bypasses_the_feed_forward_layers() -> None:
    """Without attention, a block does not change the class token, and the last feed-forward layer has no effect."""
    model = create(depth=1, img_size=64)
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    with torch.no_grad():
        model.blocks[0].attn.proj.weight.zero_()
        model.blocks[0].mlp.norm3.weight.fill_(2.0)
    token = model.cls_token[:, 0] + model.pos_embed.table[:, 0]
    torch.testing.assert_close(model.forward_features(x)[:, 0], model.norm(token).expand(2, -1))
    model(x).sum().backward()
    assert not any(p.grad.any() for p in model.blocks[0].mlp.parameters())


def test_intermediates_with_prefix_tokens() -> None:
    model = create(img_size=64)
    x = torch.randn(1, 3, 64, 80, dtype=torch.float64)
    features, pairs = model.forward_intermediates(x, norm=True, output_fmt="NLC", return_prefix_tokens=True)
    assert [(m.shape, p.shape) for m, p in pairs] == [((1, 20, DIM), (1, 1, DIM))] * 2
    torch.testing.assert_close(torch.cat(pairs[-1][::-1], dim=1), features)


def test_convolutions_are_initialised_as_such() -> None:
    """1x1 convolutions keep a convolution's uniform initialisation, as in the authors' code; Linear layers do not."""
    mlp = create(depth=1).blocks[0].mlp
    assert mlp.fc1.weight.abs().max().item() == pytest.approx(DIM**-0.5, rel=1e-2)
    assert mlp.se.fc1.weight.std().item() == pytest.approx(0.02, rel=0.1)
