"""XCiT with SimA: the authors' numbers, sizes and parameter names, and the paper's variations."""

import functools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.conftest import assert_golden, golden_cases, load_golden
from tokamix import count_macs
from tokamix.mixers import SimAClassAttention, SimASelfAttention
from tokamix.models import sima as family

OFFICIAL = Path(__file__).parent / "official"

# parameters and multiply-adds at 224 px
SIZES = {
    "xcit_nano_12_p16_sima": (3_053_176, 557_324_544),
    "xcit_nano_12_p8_sima": (3_048_968, 2_159_092_992),
    "xcit_tiny_12_p16_sima": (6_716_224, 1_244_513_664),
    "xcit_tiny_12_p8_sima": (6_706_456, 4_828_510_080),
    "xcit_tiny_20_p16_sima": (10_316_608, 1_972_467_072),
    "xcit_tiny_24_p16_sima": (12_116_800, 2_336_443_776),
    "xcit_tiny_24_p8_sima": (12_107_032, 9_196_230_528),
    "xcit_small_12_p16_sima": (26_253_208, 4_853_484_288),
    "xcit_small_12_p8_sima": (26_212_936, 18_849_427_200),
    "xcit_small_24_p16_sima": (47_671_192, 9_118_243_584),
    "xcit_small_24_p8_sima": (47_630_920, 35_908_464_384),
    "xcit_medium_24_p16_sima": (84_395_560, 16_186_156_032),
    "xcit_medium_24_p8_sima": (84_323_432, 63_756_014_592),
    "xcit_large_24_p16_sima": (189_095_752, 36_017_911_296),
    "xcit_large_24_p8_sima": (188_932_264, 141_880_942_080),
}


@functools.cache
def on_meta(name: str) -> nn.Module:
    return timm.create_model(name, device="meta").eval()


def translate(module: nn.Module, name: str) -> str:
    """Our name of the authors' parameter `name` of `module`, which may be a part of a model."""
    if isinstance(module, family.XCiTStem):
        return family._translate(f"patch_embed.{name}").removeprefix("stem.")
    return family._translate(name)


def load(module: nn.Module, golden: SimpleNamespace) -> nn.Module:
    state = {translate(module, name): value for name, value in golden.weights.items()}
    if getattr(module, "pos_embed", ...) is None:  # the authors create the projection even if it is unused
        state = {name: value for name, value in state.items() if not name.startswith("pos_embed")}
    module.double().load_state_dict(state)
    return module.eval()


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    model = on_meta(name)
    assert (sum(p.numel() for p in model.parameters()), count_macs(model)) == SIZES[name]


@pytest.mark.parametrize("path", sorted(OFFICIAL.glob("sima_*.json")), ids=lambda p: p.stem)
def test_loads_official_names(path: Path) -> None:
    official = {name: torch.empty(shape, device="meta") for name, shape in json.loads(path.read_text()).items()}
    model = on_meta(f"xcit_{path.stem.removeprefix('sima_')}_sima")
    state = family.checkpoint_filter_fn(official, model)
    assert {n: v.shape for n, v in state.items()} == {n: v.shape for n, v in model.state_dict().items()}
    ours = model.state_dict()
    assert family.checkpoint_filter_fn(ours, model).keys() == ours.keys()


def test_every_official_variant_is_tested() -> None:
    names = {f"xcit_{p.stem.removeprefix('sima_')}_sima" for p in OFFICIAL.glob("sima_*.json")}
    assert names == SIZES.keys() - {"xcit_tiny_20_p16_sima"}


def dim_and_heads(golden: SimpleNamespace) -> tuple[int, int]:
    return golden.meta["ctor"]["dim"], golden.meta["ctor"]["num_heads"]


def torch_eps(module: nn.Module) -> nn.Module:
    """The authors' single blocks have PyTorch's eps in their norms; their models have 1e-6."""
    for child in module.modules():
        if isinstance(child, nn.LayerNorm):
            child.eps = 1e-5
    return module


def build(golden: SimpleNamespace) -> tuple[nn.Module, tuple[object, ...]]:
    """Our module for a golden case, and its arguments besides x."""
    ctor = golden.meta["ctor"]
    match golden.meta["class"]:
        case "SimA":
            return load(SimASelfAttention(*dim_and_heads(golden)), golden), ()
        case "ClassAttention":
            return load(SimAClassAttention(*dim_and_heads(golden)), golden), ()
        case "SimABlock":
            return load(torch_eps(family.Block(*dim_and_heads(golden))), golden), ((4, 5),)
        case "ClassAttentionBlock":
            block = family.ClassBlock(*dim_and_heads(golden), tokens_norm=ctor["tokens_norm"])
            return load(torch_eps(block), golden), ((2, 5),)
        case "LPI":
            return load(family.LocalPatchInteraction(ctor["in_features"]), golden), ((5, 7),)
        case "PositionalEncodingFourier":
            positions = family.FourierPositions(ctor["dim"], ctor["hidden_dim"], ctor["temperature"])
            return load(positions, golden), ()
        case "ConvPatchEmbed":
            stem = family.XCiTStem(3, ctor["embed_dim"], ctor["patch_size"], nn.GELU)
            return load(stem, golden), ()
    kwargs = {k: v for k, v in ctor.items() if k != "norm_layer"}
    model = family.XCiTSimA(class_depth=kwargs.pop("cls_attn_layers", 2), **kwargs)
    return load(model, golden), ()


def call(module: nn.Module, golden: SimpleNamespace, x: Tensor | None, args: tuple[object, ...]) -> Tensor:
    if x is None:  # positions need only the grid
        batch, channels, height, width = golden.meta["outputs"]["out"]
        return module((height, width)).transpose(1, 2).reshape(1, channels, height, width).expand(batch, -1, -1, -1)
    out = module(x, *args)
    if isinstance(module, SimAClassAttention):
        return torch.cat([out, x[:, 1:]], dim=1)
    return out.flatten(1, 2) if isinstance(module, family.XCiTStem) else out


@pytest.mark.parametrize("case", golden_cases("sima_"))
def test_authors_numbers(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    golden = load_golden(case)
    module, args = build(golden)
    x = golden.inputs["x"].requires_grad_() if golden.inputs else None
    if "out64_pos64" in golden.extra:
        assert_golden(call(module, golden, x, args), golden.extra["out64_pos64"]["out"], "output, positions in float64")

    # the authors compute positions in float32 for every dtype of the model
    encode = family.FourierPositions._encode
    monkeypatch.setattr(family.FourierPositions, "_encode", lambda self, n, _: encode(self, n, torch.float32))
    module.train(golden.meta["mode"] == "train")
    out = call(module, golden, x, args)
    assert_golden(out, golden.outputs["out"], "output")
    loss = (out * sum(golden.loss_weights.values())).sum()  # in training the authors return their logits twice
    inputs = dict(module.named_parameters()) | ({"x": x} if x is not None else {})
    grads = dict(zip(inputs, torch.autograd.grad(loss, inputs.values()), strict=True))
    for name, expected in golden.grad_inputs.items():
        assert_gradient(grads[name], expected, name)
    for name, expected in golden.grad_weights.items():
        assert_gradient(grads[translate(module, name)], expected, name)
    for name, norm_and_sum in golden.meta["grad_norm_sum_all_params"].items():
        if norm_and_sum is not None:  # None: the authors create it but do not use it
            norm, total = norm_and_sum
            grad = grads[translate(module, name)]
            assert grad.norm().item() == pytest.approx(norm, rel=1e-9), name
            assert grad.sum().item() == pytest.approx(total, rel=1e-9, abs=1e-11 * max(1, norm)), name
    for name, expected in golden.extra.get("after_train", {}).items():
        torch.testing.assert_close(module.get_buffer(translate(module, name)), expected, msg=name)


def assert_gradient(actual: Tensor, expected: Tensor, name: str) -> None:
    # the gradients of channels of zeros are 1e12 times those around them
    unit = max(1.0, expected.abs().max().item())
    assert_golden(actual.view(expected.shape) / unit, expected / unit, f"gradient of {name}")


def test_class_only_equals_class_token_of_all() -> None:
    model = timm.create_model("xcit_nano_12_p16_sima", depth=1).eval()
    x = torch.randn(2, 3, 48, 32)
    features = model.forward_features(x)
    assert features.shape == (2, 1 + 6, 128)
    torch.testing.assert_close(model.forward_features(x, class_only=True), features[:, :1])
    torch.testing.assert_close(model.forward_head(features), model(x))
    pooled = timm.create_model("xcit_nano_12_p16_sima", depth=1, global_pool="avg", num_classes=0).eval()
    pooled.load_state_dict({k: v for k, v in model.state_dict().items() if not k.startswith("head")})
    torch.testing.assert_close(pooled(x), features[:, 1:].mean(1))


@pytest.mark.parametrize("norm", ["l1", "l2", None])
def test_permutation_equivariance_without_positions(norm: str | None) -> None:
    block = family.Block(16, 2, norm=norm, local_interaction=False).double().eval()
    x, order = torch.randn(2, 12, 16, dtype=torch.float64), torch.randperm(12)
    torch.testing.assert_close(block(x[:, order], (3, 4)), block(x, (3, 4))[:, order])
    neighbours = family.Block(16, 2, norm=norm).double().eval()
    assert not torch.allclose(neighbours(x[:, order], (3, 4)), neighbours(x, (3, 4))[:, order])


def test_variations() -> None:
    x = torch.randn(1, 3, 32, 48)
    small = {"depth": 1, "num_classes": 3}
    plain = timm.create_model("xcit_nano_12_p8_sima", **small)
    assert all(block.attn.num_heads == 4 for block in [*plain.blocks, *plain.class_blocks])
    single = timm.create_model("xcit_nano_12_p8_sima", num_heads=1, **small)
    assert all(block.attn.num_heads == 1 for block in [*single.blocks, *single.class_blocks])
    assert not any(
        "local" in n
        for n, _ in timm.create_model("xcit_nano_12_p8_sima", local_interaction=False, **small).named_parameters()
    )
    unplaced = timm.create_model("xcit_nano_12_p8_sima", use_pos=False, **small).eval()
    single.eval()
    for kwargs in (
        {"norm": "l2"},
        {"norm": None},
        {"num_heads": 1},
        {"act_layer": "relu"},
        {"local_interaction": False},
    ):
        assert timm.create_model("xcit_nano_12_p8_sima", **kwargs, **small).eval()(x).shape == (1, 3)
    assert unplaced(x).shape == (1, 3)


class ExpCount(TorchDispatchMode):
    """Counts operators that take an exponential, in their forward form."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += any(part in str(func) for part in ("exp.", "softmax", "gelu", "sigmoid", "silu", "erf"))
        return func(*args, **(kwargs or {}))


def test_relu_leaves_no_exponential() -> None:
    counts = {}
    for act_layer in (nn.GELU, nn.ReLU):
        model = timm.create_model("xcit_nano_12_p16_sima", depth=2, act_layer=act_layer).eval()
        with ExpCount() as mode:
            model(torch.randn(1, 3, 32, 32))
        counts[act_layer] = mode.count
    assert counts == {nn.GELU: 3 + 2 * 2 + 2, nn.ReLU: 0}


def test_cost_is_linear_in_tokens() -> None:
    model = timm.create_model("xcit_nano_12_p16_sima", device="meta", depth=1)
    macs = [count_macs(model, side) for side in (256, 512, 1024)]
    per_token = (macs[1] - macs[0]) / (32**2 - 16**2)
    assert macs[2] - macs[1] == per_token * (64**2 - 32**2)


def test_drop_path_is_constant_over_depth() -> None:
    model = timm.create_model("xcit_nano_12_p16_sima", depth=3, drop_path_rate=0.2)
    assert [block.drop_path.drop_prob for block in model.blocks] == [0.2] * 3


def test_training_returns_logits() -> None:
    model = timm.create_model("xcit_nano_12_p16_sima", depth=1, num_classes=5).train()
    assert model(torch.randn(2, 3, 32, 32)).shape == (2, 5)


def test_scales_start_at_eta() -> None:
    for name, eta in (("xcit_tiny_12_p16_sima", 1.0), ("xcit_tiny_24_p16_sima", 1e-5)):
        model = timm.create_model(name, depth=1)
        for block in [*model.blocks, *model.class_blocks]:
            assert block.scale_mlp.eq(eta).all()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match="8 or 16 pixels, got patch_size=32"):
        timm.create_model("xcit_nano_12_p16_sima", patch_size=32)
    with pytest.raises(ValueError, match="cannot divide 128 channels among 3 heads"):
        timm.create_model("xcit_nano_12_p16_sima", num_heads=3)
    with pytest.raises(ValueError, match="SimA has no norm 'l3'; choose 'l1', 'l2' or None"):
        timm.create_model("xcit_nano_12_p16_sima", norm="l3", depth=1)
