"""CvT against transformers' CvT, and against a plain formula on the authors' parameter names."""

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tokamix import count_macs
from tokamix.models.cvt import ConvAttention, CvT, checkpoint_filter_fn

DIMS, HEADS = (64, 192, 384), (1, 3, 6)
State = dict[str, Tensor]


def official_shapes(depths: tuple[int, ...], num_classes: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes in the checkpoints of microsoft/CvT."""
    shapes: dict[str, tuple[int, ...]] = {}

    def affine(name: str, dim: int) -> None:
        shapes.update({f"{name}.weight": (dim,), f"{name}.bias": (dim,)})

    def linear(name: str, out: int, *fan_in: int) -> None:
        shapes.update({f"{name}.weight": (out, *fan_in), f"{name}.bias": (out,)})

    for i, (dim, depth, before, kernel) in enumerate(zip(DIMS, depths, (3, *DIMS), (7, 3, 3), strict=False)):
        linear(f"stage{i}.patch_embed.proj", dim, before, kernel, kernel)
        affine(f"stage{i}.patch_embed.norm", dim)
        for j in range(depth):
            block = f"stage{i}.blocks.{j}"
            affine(f"{block}.norm1", dim)
            affine(f"{block}.norm2", dim)
            for part in "qkv":
                shapes[f"{block}.attn.conv_proj_{part}.conv.weight"] = (dim, 1, 3, 3)
                bn = f"{block}.attn.conv_proj_{part}.bn"
                affine(bn, dim)
                shapes |= {f"{bn}.running_mean": (dim,), f"{bn}.running_var": (dim,), f"{bn}.num_batches_tracked": ()}
                linear(f"{block}.attn.proj_{part}", dim, dim)
            linear(f"{block}.attn.proj", dim, dim)
            linear(f"{block}.mlp.fc1", 4 * dim, dim)
            linear(f"{block}.mlp.fc2", dim, 4 * dim)
    shapes["stage2.cls_token"] = (1, 1, DIMS[-1])
    affine("norm", DIMS[-1])
    linear("head", num_classes, DIMS[-1])
    return shapes


def formula(w: State, x: Tensor, depths: tuple[int, ...]) -> Tensor:
    """Logits by the paper's equations, pixel maps channels first, with the authors' names."""
    for i, (dim, depth, heads) in enumerate(zip(DIMS, depths, HEADS, strict=True)):
        embed = f"stage{i}.patch_embed"
        stride, padding = (4, 2) if i == 0 else (2, 1)
        x = F.conv2d(x, w[f"{embed}.proj.weight"], w[f"{embed}.proj.bias"], stride, padding)
        height, width = x.shape[-2:]
        x = x.flatten(2).mT
        x = F.layer_norm(x, (dim,), w[f"{embed}.norm.weight"], w[f"{embed}.norm.bias"], 1e-5)
        token = w["stage2.cls_token"].expand(len(x), 1, dim) if i == 2 else x[:, :0]
        x = torch.cat([token, x], dim=1)
        for j in range(depth):
            block = f"stage{i}.blocks.{j}"
            y = F.layer_norm(x, (dim,), w[f"{block}.norm1.weight"], w[f"{block}.norm1.bias"], 1e-5)
            token, patches = y[:, : token.shape[1]], y[:, token.shape[1] :].mT.unflatten(2, (height, width))
            parts = []
            for part, stride in zip("qkv", (1, 2, 2), strict=True):
                name = f"{block}.attn.conv_proj_{part}"
                z = F.conv2d(patches, w[f"{name}.conv.weight"], None, stride, 1, groups=dim)
                z = F.batch_norm(z, *(w[f"{name}.bn.{s}"] for s in ("running_mean", "running_var", "weight", "bias")))
                z = torch.cat([token, z.flatten(2).mT], dim=1)
                z = z @ w[f"{block}.attn.proj_{part}.weight"].T + w[f"{block}.attn.proj_{part}.bias"]
                parts.append(z.unflatten(2, (heads, dim // heads)))
            q, k, v = parts
            weights = (torch.einsum("bnhd,bmhd->bhnm", q, k) / dim**0.5).softmax(-1)
            y = torch.einsum("bhnm,bmhd->bnhd", weights, v).flatten(2)
            x = x + y @ w[f"{block}.attn.proj.weight"].T + w[f"{block}.attn.proj.bias"]
            y = F.layer_norm(x, (dim,), w[f"{block}.norm2.weight"], w[f"{block}.norm2.bias"], 1e-5)
            y = y @ w[f"{block}.mlp.fc1.weight"].T + w[f"{block}.mlp.fc1.bias"]
            y = y / (1 + torch.exp(-1.702 * y))
            x = x + y @ w[f"{block}.mlp.fc2.weight"].T + w[f"{block}.mlp.fc2.bias"]
        token, x = x[:, : token.shape[1]], x[:, token.shape[1] :].mT.unflatten(2, (height, width))
    y = F.layer_norm(token[:, 0], (DIMS[-1],), w["norm.weight"], w["norm.bias"], 1e-5)
    return y @ w["head.weight"].T + w["head.bias"]


def create(**kwargs: object) -> CvT:
    torch.manual_seed(0)
    return timm.create_model("cvt_13", num_classes=5, **kwargs).double().eval()


def test_parameters_and_macs() -> None:
    model = timm.create_model("cvt_13", device="meta").eval()
    assert sum(p.numel() for p in model.parameters()) == 19_997_480
    assert count_macs(model) == 4_566_089_216  # 4.5 G in the paper


def test_official_names_load_completely() -> None:
    model = timm.create_model("cvt_13", device="meta")
    official = {name: torch.empty(shape) for name, shape in official_shapes((1, 2, 10), 1000).items()}
    loaded = checkpoint_filter_fn(official, model)
    assert {n: t.shape for n, t in loaded.items()} == {n: t.shape for n, t in model.state_dict().items()}


@pytest.mark.parametrize("size", [(32, 48), (37, 54)])
def test_formula(size: tuple[int, int], random_weights) -> None:
    depths = (1, 2, 2)
    weights = random_weights(official_shapes(depths, 5))
    model = create(depths=depths)
    model.load_state_dict(checkpoint_filter_fn(weights, model))
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    torch.testing.assert_close(model(x), formula(weights, x, depths), rtol=1e-9, atol=1e-11)


def test_transformers(random_weights) -> None:
    """transformers has the exact GELU; its drop-path rates need a last stage of three blocks."""
    transformers = pytest.importorskip("transformers")
    depths = (1, 2, 3)
    theirs = transformers.CvtForImageClassification(transformers.CvtConfig(num_labels=5, depth=depths)).double().eval()
    theirs.load_state_dict(random_weights({n: t.shape for n, t in theirs.state_dict().items()}))
    ours = create(depths=depths, act_layer=nn.GELU)
    ours.load_state_dict(checkpoint_filter_fn(theirs.state_dict(), ours))
    inputs = [torch.randn(2, 3, 50, 36, dtype=torch.float64, requires_grad=True)]
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
    model = create(depths=(1, 1, 1))
    state = model.state_dict()
    passed = checkpoint_filter_fn(state, model)
    assert all(passed[name] is tensor for name, tensor in state.items())


def test_attend_can_be_replaced() -> None:
    """A replacement of `attend` gets different numbers of queries and keys."""
    seen: list[tuple[torch.Size, torch.Size]] = []

    class Average(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            seen.append((q.shape[1:], k.shape[1:]))
            return v.mean(2, keepdim=True).expand_as(q)

    model = timm.create_model("cvt_13", depths=(1, 1, 1), device="meta")
    before = list(model.state_dict())
    for module in model.modules():
        if isinstance(module, ConvAttention):
            module.attend = Average()
    assert model(torch.empty(2, 3, 224, 224, device="meta")).shape == (2, 1000)
    assert seen == [((1, 3136, 64), (1, 784, 64)), ((3, 784, 64), (3, 196, 64)), ((6, 197, 64), (6, 50, 64))]
    assert list(model.state_dict()) == before


def test_drop_path_rises_in_the_last_stage_only() -> None:
    stages = timm.create_model("cvt_13", drop_path_rate=0.1, device="meta").stages
    rates = [[block.drop_path.drop_prob for block in stage.blocks] for stage in stages]
    assert rates[:2] == [[0], [0, 0]]
    assert rates[2] == pytest.approx([0.1 * i / 9 for i in range(10)])


def test_features_exclude_the_class_token() -> None:
    model = create(depths=(1, 1, 1))
    x = torch.randn(1, 3, 40, 56, dtype=torch.float64)
    features, maps = model.forward_intermediates(x, norm=True, output_fmt="NHWC")
    assert features.shape == (1, 1 + 3 * 4, 384)
    torch.testing.assert_close(maps[-1].flatten(1, 2), features[:, 1:])
    assert [m.shape[1:] for m in maps] == [(10, 14, 64), (5, 7, 192), (3, 4, 384)]
    model.reset_classifier(0, "avg")
    torch.testing.assert_close(model(x), features[:, 1:].mean(1))
