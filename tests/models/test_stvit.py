"""STViT against the authors' numbers, names and sizes, and the supplement's Table II."""

import json
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.conftest import assert_golden, golden_cases, load_golden
from tokamix import count_macs
from tokamix.layers import DepthwiseConv, channels_first, channels_last
from tokamix.mixers import SuperTokenAttention
from tokamix.models.stvit import Block, ConvFFN, STViT, STViTStem, checkpoint_filter_fn
from tokamix.ops import dispatch

OFFICIAL = Path(__file__).parent / "official"
REFINE = {(True, True): "attention", (True, False): "conv", (False, True): "none"}


def build(name: str, ctor: dict[str, Any]) -> tuple[nn.Module, str, str]:
    """Our counterpart of one of the authors' classes, and its path in our model and in theirs."""
    dtype = torch.float64
    if name == "STViT":
        renamed = {"embed_dim": "dims", "stoken_size": "stoken_sizes"}
        kwargs = {renamed.get(k, k): v for k, v in ctor.items() if k not in ("layerscale", "init_values")}
        kwargs["n_iter"] = tuple(kwargs["n_iter"])
        kwargs["layer_scale"] = tuple(1e-6 if scaled else None for scaled in ctor["layerscale"])
        return STViT(**kwargs, dtype=dtype), "", ""
    if name == "PatchEmbed":
        return STViTStem(ctor["in_channels"], ctor["out_channels"], dtype=dtype), "stem", "patch_embed"
    if name == "Mlp":
        return ConvFFN(ctor["in_features"], ctor["hidden_features"], dtype=dtype), "mlp", "mlp2"
    if name == "Attention":
        return SuperTokenAttention(ctor["dim"], ctor["num_heads"], 1, dtype=dtype), "mixer", "attn.stoken_refine"
    cell, heads, n_iter = tuple(ctor["stoken_size"]), ctor.get("num_heads", 1), ctor["n_iter"]
    if name == "StokenAttention":
        refine = REFINE[ctor.get("refine", True), ctor.get("refine_attention", True)]
        return SuperTokenAttention(ctor["dim"], heads, cell, n_iter, refine, dtype=dtype), "mixer", "attn"
    assert name == "StokenAttentionLayer"
    scale = 1.0 if ctor["layerscale"] else None
    mixer = {"num_heads": heads, "cell": cell, "n_iter": n_iter}
    return Block(ctor["dim"], ctor["mlp_ratio"], True, True, scale, 0.0, dtype=dtype, **mixer), "block", "block"


class Host(nn.Module):
    """Puts a part of the model at its path in the whole, so that the authors' names can be translated."""

    def __init__(self, part: nn.Module, place: str, theirs: str) -> None:
        super().__init__()
        self.part, self.ours, self.theirs, host = part, "", "", part
        if place == "stem":
            host, self.ours, self.theirs = nn.ModuleDict({"stem": part}), "stem.", "patch_embed."
        elif place:
            block = part if place == "block" else nn.ModuleDict({place: part})
            host = nn.ModuleDict({"stages": nn.ModuleList([nn.ModuleDict({"blocks": nn.ModuleList([block])})])})
            prefix = "" if place == "block" else f"{place}."
            self.ours = f"stages.0.blocks.0.{prefix}"
            self.theirs = "layers.0.blocks.0." + ("" if place == "block" else f"{theirs}.")
        self.host = host

    def translate(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """The authors' names and shapes to those of the part."""
        translated = checkpoint_filter_fn({self.theirs + k: v for k, v in tensors.items()}, self.host)
        return {name.removeprefix(self.ours): value for name, value in translated.items()}


def run(part: nn.Module, x: Tensor) -> Tensor:
    """Call our part on the authors' (B, C, H, W)."""
    if isinstance(part, STViT):
        return part(x)
    if isinstance(part, STViTStem):
        return channels_first(part(x))
    grid = (x.shape[2], x.shape[3])
    return channels_first(part(channels_last(x).flatten(1, 2), grid).unflatten(1, grid))


@pytest.mark.parametrize("case", [c for c in golden_cases("stvit_") if c != "stvit_swish"])
def test_golden(case: str) -> None:
    golden = load_golden(case)
    part, place, theirs = build(golden.meta["class"], golden.meta["ctor"])
    host = Host(part, place, theirs)
    translated = host.translate(golden.weights)
    part.load_state_dict(translated)
    part.train(golden.meta["mode"] == "train")
    x = golden.inputs["x"].requires_grad_()
    out = run(part, x)
    assert_golden(out, golden.outputs["out"], "output")
    (out * golden.loss_weights["out"]).sum().backward()
    assert_golden(x.grad, golden.grad_inputs["x"], "gradient of x")
    grads = {name: p.grad for name, p in part.named_parameters()}
    for name, grad in host.translate(golden.grad_weights).items():
        assert_golden(grads[name], grad, f"gradient of {name}")
    norms = golden.meta["grad_norm_sum_all_params"]
    assert len(norms) == len(grads)
    theirs_to_ours = dict(zip([w for w in golden.weights if "fold.weights" not in w], translated, strict=True))
    for name, expected in norms.items():
        ours = theirs_to_ours[name]
        norm_and_sum = torch.stack([grads[ours].norm(), grads[ours].sum()])
        assert_golden(norm_and_sum, torch.tensor(expected, dtype=torch.float64), f"gradient of {name}")
    state = part.state_dict()
    for name, value in host.translate(golden.extra.get("after_train", {})).items():
        assert_golden(state[name], value, f"{name} after one training step")


def test_swish_golden() -> None:
    golden = load_golden("stvit_swish")
    assert_golden(nn.SiLU()(golden.inputs["x"]), golden.outputs["out"])


def test_every_golden_case_is_tested() -> None:
    assert len(golden_cases("stvit_")) == 23


# trainable parameters and MACs of the authors' model, and MACs of its fold and unfold, which ours does not have
SIZES = {
    "stvit_small": (25_495_624, 4_350_302_024, 9_938_376),
    "stvit_base": (51_691_288, 9_842_458_890, 18_328_842),
    "stvit_large": (94_971_096, 15_561_281_867, 20_618_955),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    model = timm.create_model(name, device="meta").eval()
    parameters, official_macs, fold_macs = SIZES[name]
    assert sum(p.numel() for p in model.parameters()) == parameters
    assert count_macs(model) == official_macs - fold_macs
    # nine one-hot 3x3 kernels over the C channels of 49 super tokens, three times a block, and once over their weights
    blocks = [b for s in model.stages for b in s.blocks if b.mixer.cell != (1, 1)]
    assert fold_macs == sum(49 * 9 * 9 * (3 * b.norm1.normalized_shape[0] + 1) for b in blocks)


@pytest.mark.parametrize(
    ("dims", "depths", "millions", "giga", "relative_position"),
    [((96, 192, 384, 768), (2, 2, 6, 2), 30, 4.3, True), ((64, 128, 320, 512), (3, 5, 9, 3), 24, 4.0, False)],
)
def test_isotropic_sizes(
    dims: tuple[int, ...], depths: tuple[int, ...], millions: int, giga: float, relative_position: bool
) -> None:
    """The supplement's Table II, to its printed digits (3.95 G for 4.0)."""
    isotropic = {"projection": 0, "conv_stem": False, "cpe": False, "conv_ffn": False}
    heads = tuple(dim // 32 for dim in dims)
    model = timm.create_model(
        "stvit_small", **isotropic, dims=dims, depths=depths, num_heads=heads, relative_position=relative_position,
        device="meta",
    ).eval()  # fmt: skip
    assert round(sum(p.numel() for p in model.parameters()) / 1e6) == millions
    assert count_macs(model) / 1e9 == pytest.approx(giga, abs=0.06)
    assert len(model.no_weight_decay()) == (sum(depths) if relative_position else 0)


def test_isotropic_runs_at_any_size() -> None:
    model = STViT(
        dims=(8, 16), depths=(1, 1), num_heads=(2, 2), stoken_sizes=(4, 1), layer_scale=(None, None), projection=0,
        conv_stem=False, cpe=False, conv_ffn=False, relative_position=True, num_classes=3,
    ).eval()  # fmt: skip
    for size in ((224, 224), (61, 37), (4, 4)):
        assert model(torch.randn(1, 3, *size)).isfinite().all()
    with pytest.raises(ValueError, match="at least 4 px, got 3x8"):
        model(torch.randn(1, 3, 3, 8))


def test_relative_position_is_relative() -> None:
    position = SuperTokenAttention(8, 2, relative_grid=(3, 5)).double().position
    bias = position((3, 5)).unflatten(2, (3, 5)).unflatten(1, (3, 5))  # (heads, y, x, y', x')
    for y, x, u, v in ((0, 0, 2, 4), (2, 1, 1, 3), (1, 1, 1, 1)):
        torch.testing.assert_close(bias[:, y, x, u, v], position.table[:, y - u + 2, x - v + 4])
    assert position((4, 2)).shape == (2, 8, 8)


@pytest.mark.parametrize("name", SIZES)
def test_loads_every_official_parameter(name: str) -> None:
    shapes = json.loads((OFFICIAL / f"{name}.json").read_text())
    model = timm.create_model(name, device="meta")
    official = {key: torch.empty(shape, device="meta") for key, shape in shapes.items()}
    translated = checkpoint_filter_fn(official, model)
    dropped = sum(key.endswith("fold.weights") for key in shapes)
    assert dropped == 2 * sum(len(stage.blocks) for stage in model.stages)
    assert len(translated) == len(shapes) - dropped
    model.load_state_dict(translated, assign=True)
    own = model.state_dict()
    assert checkpoint_filter_fn(own, model) is own


def test_cells_of_one_are_plain_attention() -> None:
    mixer = SuperTokenAttention(8, 2, cell=1).double()
    x = torch.randn(2, 6, 8, dtype=torch.float64)
    q, k, v = mixer.refine.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
    attended = (q @ k.mT * 4**-0.5).softmax(-1) @ v
    torch.testing.assert_close(mixer(x, (2, 3)), mixer.refine.proj(attended.transpose(1, 2).flatten(2)))


def test_authors_initialisation() -> None:
    """Only the classifier has a special initialisation; 1x1 convolutions keep PyTorch's uniform one."""
    torch.manual_seed(0)
    model = timm.create_model("stvit_small", depths=(1, 1, 1, 1), num_classes=100)
    assert model.head.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert not model.head.bias.any()
    fc1 = model.stages[3].blocks[0].mlp.fc1
    assert fc1.weight.abs().max().item() == pytest.approx(512**-0.5, rel=1e-3)
    assert fc1.bias.any()


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Fuse GELU with the product on the CPU, too; the shapes of the outputs."""
    shapes: list[torch.Size] = []
    product = torch._addmm_activation

    def record(*inputs: Tensor, use_gelu: bool) -> Tensor:
        out = product(*inputs, use_gelu=use_gelu)
        shapes.append(out.shape)
        return out

    monkeypatch.setattr("tokamix.layers.linear._can_fuse", lambda *_: True)
    monkeypatch.setattr(torch, "_addmm_activation", record)
    return shapes


@pytest.mark.parametrize("hooked", [False, True])
def test_gelu_within_the_product_or_the_convolution(fused: list[torch.Size], hooked: bool) -> None:
    """In inference in half precision on a GPU; a hook of the convolution sees its usual input."""
    layer, x, seen = ConvFFN(8, 32).bfloat16(), torch.randn(2, 15, 8, dtype=torch.bfloat16), []
    layers: Any = layer
    expected = layers.fc2(layers.conv(layers.fc1(x).unflatten(1, (3, 5))).flatten(1, 2))
    if hooked:
        layer.conv.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        found = layer(x, (3, 5))
    assert fused == ([] if hooked else [(30, 32)])
    assert (found - expected).norm() < 0.01 * expected.norm()
    assert [y.min() < -0.5 for y in seen] == [True] * hooked  # below the minimum of GELU


def test_gelu_of_another_convolution(fused: list[torch.Size]) -> None:
    """A module in the place of ours is called as it was, and has a GELU or none itself."""
    layer, x = ConvFFN(8, 32).bfloat16(), torch.randn(2, 15, 8, dtype=torch.bfloat16)
    for other in (nn.Identity(), DepthwiseConv(32).bfloat16()):
        layer.conv = other
        expected = layer.fc2(other(layer.fc1(x).unflatten(1, (3, 5))).flatten(1, 2))
        with torch.no_grad():
            torch.testing.assert_close(layer(x, (3, 5)), expected)
    assert not fused


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"depths must have one value for each of the 4 stages in dims, got \(1, 2\)"):
        timm.create_model("stvit_small", depths=(1, 2), device="meta")
    with pytest.raises(ValueError, match="64 channels do not divide into 3 heads"):
        timm.create_model("stvit_small", num_heads=(3, 2, 5, 8), device="meta")
    with pytest.raises(ValueError, match=r"unknown refinement 'mlp'.*attention, conv, none"):
        SuperTokenAttention(8, 2, refine="mlp")


@pytest.mark.parametrize("scale", [None, 0.5])
@pytest.mark.parametrize("cell", [1, 2])
def test_exported_block(cell: int, scale: float | None) -> None:
    """For ONNX, linear layers of the feed-forward layer are convolutions; the result is the same."""

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            kwargs: dict[str, Any] = {"cpe": True, "conv_ffn": True, "drop_path": 0.0, "num_heads": 2, "cell": cell}
            self.block = Block(6, 2.0, layer_scale=scale, dtype=torch.float64, **kwargs)

        def forward(self, x: Tensor) -> Tensor:
            return self.block(x, (4, 6))

    model, x = Blocks().eval(), torch.randn(2, 24, 6, dtype=torch.float64)
    model.block.reparameterize()
    for target, convolutions in (("onnx", 4), ("torch-export", 2)):
        with dispatch.export_target(target):
            program = torch.export.export(model, (x,))
        torch.testing.assert_close(program.module()(x), model(x))
        assert sum(node.target is torch.ops.aten.conv2d.default for node in program.graph.nodes) == convolutions
    model.block.mlp.register_forward_hook(lambda mlp, args, out: 2 * out)  # as context broadcasting does
    with dispatch.export_target("onnx"):
        program = torch.export.export(model, (x,))
    torch.testing.assert_close(program.module()(x), model(x))
