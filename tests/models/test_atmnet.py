"""ATMNet: the authors' numbers, sizes and parameter names, and the paper's ablations."""

import functools
import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.conftest import assert_golden, golden_cases, load_golden
from tokamix import count_macs
from tokamix.mixers import ActiveOffset, ActiveTokenMixer
from tokamix.models import atmnet as family

OFFICIAL = Path(__file__).parent / "official"

# authors' class, parameters and multiply-adds at 224 px
SIZES = {
    "atmnet_xtiny": ("ActivexTiny", 15_349_128, 2_168_136_704),
    "atmnet_tiny": ("ActiveTiny", 27_152_232, 3_954_178_816),
    "atmnet_small": ("ActiveSmall", 38_631_448, 6_888_182_016),
    "atmnet_base": ("ActiveBase", 52_154_792, 10_112_901_888),
    "atmnet_large": ("ActiveLarge", 76_238_032, 12_347_929_344),
}
# the rows of the paper's table 8, as arguments of atmnet_tiny
ABLATIONS = [
    ({"offsets": "zero", "peg": False}, 26_802_504, 3_875_766_272),
    ({"peg": False}, 27_141_992, 3_948_421_120),
    ({"peg": False, "offset_interval": 99}, 26_933_992, 3_908_280_320),
]


@functools.cache
def meta(name: str, **kwargs: object) -> nn.Module:
    return timm.create_model(name, device="meta", **kwargs).eval()


@functools.cache
def size(name: str, side: int = 224, **kwargs: object) -> tuple[int, int]:
    model = meta(name, **kwargs)
    return sum(p.numel() for p in model.parameters()), count_macs(model, side)


@pytest.mark.parametrize("name", SIZES)
def test_sizes(name: str) -> None:
    assert size(name) == SIZES[name][1:]


@pytest.mark.parametrize(("kwargs", "parameters", "macs"), ABLATIONS)
def test_sizes_of_ablations(kwargs: dict[str, object], parameters: int, macs: int) -> None:
    assert size("atmnet_tiny", **kwargs) == (parameters, macs)


@pytest.mark.parametrize("name", SIZES)
def test_loads_official_names(name: str) -> None:
    shapes = json.loads((OFFICIAL / f"{SIZES[name][0]}.json").read_text())
    model = meta(name)
    ours = model.state_dict()
    official = {n: torch.empty(shape, device="meta") for n, shape in shapes.items()}
    state = family.checkpoint_filter_fn(official, model)
    assert {n: v.shape for n, v in state.items()} == {n: v.shape for n, v in ours.items()}
    assert family.checkpoint_filter_fn(ours, model).keys() == ours.keys()


def assert_gradients(golden: SimpleNamespace, module: nn.Module, leaves: dict[str, Tensor], prefix: str = "") -> None:
    """Input gradients, the stored weight gradients, and norm and sum of every parameter's."""
    for name, expected in golden.grad_inputs.items():
        assert_golden(leaves[name].grad, expected, f"gradient of {name}")
    ours = {n: p.grad for n, p in module.named_parameters()}
    for name, expected in golden.grad_weights.items():
        (mine,) = translate({name: expected}, prefix)
        assert_golden(ours[mine].view(expected.shape), expected, f"gradient of {name}")
    for name, (norm, total) in golden.meta["grad_norm_sum_all_params"].items():
        grad = ours[next(iter(translate({name: torch.zeros(1, 1)}, prefix)))]
        assert_golden(grad.norm(), torch.tensor(norm, dtype=torch.float64), f"norm of the gradient of {name}")
        scale = norm * grad.numel() ** 0.5  # the error of a sum with cancellation is relative to its terms
        assert abs(grad.sum().item() - total) <= 1e-9 * scale, f"sum of the gradient of {name}"


def translate(state: dict[str, Tensor], prefix: str = "") -> dict[str, Tensor]:
    """Authors' names -> ours; `prefix` places a part of a model in one, as the authors would."""
    whole = {prefix + n: v for n, v in state.items()} | {"patch_embed.proj.weight": torch.zeros(())}
    mapped = family.checkpoint_filter_fn(whole, nn.Identity())
    if "patch_embed.proj.weight" not in {prefix + n for n in state}:
        del mapped["stem.weight"]
    ours = r"^stages\.0\.blocks\.0\.(mixer\.)?" if prefix.endswith("atm.") else r"^stages\.0\.blocks\.0\."
    return {re.sub(ours, "", n) if prefix else n: v for n, v in mapped.items()}


def leaves_of(golden: SimpleNamespace) -> dict[str, Tensor]:
    return {n: t.clone().requires_grad_() for n, t in golden.inputs.items()}


def tokens(x: Tensor, dims: str = "NHWC") -> Tensor:
    return (x.permute(0, 2, 3, 1) if dims == "NCHW" else x).flatten(1, 2)


@pytest.mark.parametrize("case", golden_cases("atm_layer"))
def test_golden_mixer(case: str) -> None:
    golden = load_golden(case)
    mixer = ActiveTokenMixer(12, share=1, predict=False).double()
    mixer.load_state_dict(translate(golden.weights, "blocks.0.0.atm."))
    leaves = leaves_of(golden)
    out = mixer(tokens(leaves["x"]), leaves["x"].shape[1:3], tokens(leaves["offset"], "NCHW")).view(leaves["x"].shape)
    assert_golden(out, golden.outputs["out"])
    (out * golden.loss_weights["out"]).sum().backward()
    assert_gradients(golden, mixer, leaves, "blocks.0.0.atm.")


@pytest.mark.parametrize("case", golden_cases("atm_block"))
def test_golden_block(case: str) -> None:
    """The authors give offsets at full width and downsample in the block; both are undone here."""
    golden = load_golden(case)
    ctor = golden.meta["ctor"]
    share = ctor["share_dim"]
    weights = translate(golden.weights, "blocks.0.0.")
    block = family.ActiveBlock(12, share, 1, "axial", ctor["new_offset"], ctor["mlp_ratio"], 0.0).double()
    down = nn.Identity()
    if ctor["downsample"]:
        down = family.MapConv(12, 20, 3, stride=2, padding=1).double()
        down.load_state_dict({p: weights.pop(f"stages.1.downsample.{p}") for p in ("weight", "bias")})
    block.load_state_dict(weights)
    module = nn.ModuleDict({"block": block, "down": down})
    leaves = leaves_of(golden)
    grid = leaves["x"].shape[1:3]
    given = leaves.get("offset")
    if given is not None:
        block.mixer = ActiveTokenMixer(12, share=1, predict=False).double()
        block.load_state_dict(weights)
        given = tokens(given, "NCHW")
    out, _ = block(tokens(leaves["x"]), grid, given)
    outputs = {"x": down(out.unflatten(1, grid))}
    if ctor["new_offset"]:
        offset = block.offset(tokens(leaves["x"]))
        outputs["offset"] = offset.repeat_interleave(share, -1).unflatten(1, grid).permute(0, 3, 1, 2)
    for name, expected in golden.outputs.items():
        assert_golden(outputs[name], expected, name)
    sum((outputs[n] * w).sum() for n, w in golden.loss_weights.items()).backward()
    for name, expected in golden.grad_inputs.items():
        assert_golden(leaves[name].grad, expected, name)
    ours = {n.removeprefix("block.").replace("down.", "stages.1.downsample."): p for n, p in module.named_parameters()}
    for name, expected in golden.grad_weights.items():
        (mine,) = translate({name: expected}, "blocks.0.0.")
        assert_golden(ours[mine].grad.view(expected.shape), expected, name)


def test_golden_position_encoder() -> None:
    golden = load_golden("atm_peg")
    peg = family.PositionEncoder(12).double()
    peg.load_state_dict({n.replace("proj", "conv"): v for n, v in golden.weights.items()})
    leaves = leaves_of(golden)
    out = peg(tokens(leaves["x"]), leaves["x"].shape[1:3]).view(leaves["x"].shape)
    assert_golden(out, golden.outputs["out"])
    (out * golden.loss_weights["out"]).sum().backward()
    assert_golden(leaves["x"].grad, golden.grad_inputs["x"])
    for name, expected in golden.grad_weights.items():
        assert_golden(peg.get_parameter(name.replace("proj", "conv")).grad, expected, name)


def build(golden: SimpleNamespace) -> family.ATMNet:
    ctor = golden.meta["ctor"]
    names = {"embed_dims": "dims", "share_dims": "shares", "intv": "offset_interval"}
    return family.ATMNet(**{names.get(n, n): v for n, v in ctor.items()}).double().eval()


@pytest.mark.parametrize("case", golden_cases("atm_model"))
def test_golden_model(case: str) -> None:
    golden = load_golden(case)
    model = build(golden)
    model.load_state_dict(family.checkpoint_filter_fn(golden.weights, model))
    leaves = leaves_of(golden)
    out = model(leaves["x"])
    assert_golden(out, golden.outputs["out"])
    (out * golden.loss_weights["out"]).sum().backward()
    assert_gradients(golden, model, leaves)


def test_golden_segmentation_maps() -> None:
    golden = load_golden("atm_seg_backbone")
    norms = {n: v.requires_grad_() for n, v in golden.weights.items() if n.startswith("norm_")}
    model = build(golden)
    state = {n: v for n, v in golden.weights.items() if n not in norms}
    missing, unexpected = model.load_state_dict(family.checkpoint_filter_fn(state, model), strict=False)
    assert {n.partition(".")[0] for n in missing} == {"norm", "head"}
    assert not unexpected
    maps = model.forward_intermediates(golden.inputs["x"], output_fmt="NHWC", intermediates_only=True)
    total = torch.zeros((), dtype=torch.float64)
    for i, features in enumerate(maps):
        weight, bias = norms[f"norm_{i}.weight"], norms[f"norm_{i}.bias"]
        out = nn.functional.layer_norm(features, weight.shape, weight, bias).permute(0, 3, 1, 2)
        assert_golden(out, golden.outputs[f"c{i}"], f"map {i}")
        total = total + (out * golden.loss_weights[f"c{i}"]).sum()
    total.backward()
    ours = {**norms, **dict(model.named_parameters())}
    for name, expected in golden.grad_weights.items():
        mine = name if name in norms else next(iter(translate({name: expected})))
        assert_golden(ours[mine].grad, expected, name)


TINY = {"dims": (8, 8, 8, 8), "depths": (2, 2, 2, 2), "shares": (2, 2, 2, 2), "num_classes": 3}


def scatter_offsets(model: nn.Module) -> nn.Module:
    """Offsets large enough to reach other tokens, as after training."""
    for module in model.modules():
        if isinstance(module, ActiveOffset):
            nn.init.normal_(module[1].bias, std=3.0)
    return model


def test_zero_offsets_mix_nothing_across_tokens() -> None:
    """Table 8's baseline: without fusion weights, which use the mean of tokens, a token depends on its patch only."""
    mixer = ActiveTokenMixer(8, offsets="zero").double()
    nn.init.zeros_(mixer.fusion.fc2.weight)
    x = torch.randn(1, 12, 8, dtype=torch.float64, requires_grad=True)
    mixer(x, (3, 4))[0, 5].sum().backward()
    assert x.grad[0].any(-1).nonzero().flatten().tolist() == [5]
    given = ActiveTokenMixer(8, share=2, predict=False).double()
    given.load_state_dict(mixer.state_dict())
    torch.testing.assert_close(given(x, (3, 4), x.new_zeros(1, 12, 8)), mixer(x, (3, 4)))


def test_active_tokens_sample_their_row_and_column() -> None:
    mixer = ActiveTokenMixer(64, share=1).double()
    nn.init.zeros_(mixer.fusion.fc2.weight)
    nn.init.normal_(mixer.offset[1].bias, std=3.0)
    x = torch.randn(1, 30, 64, dtype=torch.float64)

    def output(x: Tensor) -> Tensor:
        return mixer(x, (5, 6), mixer.offset(fixed))[0, 14].sum()

    fixed = x.clone()
    seen = torch.autograd.functional.jacobian(output, x)[0].any(-1).view(5, 6)
    row_and_column = torch.zeros(5, 6, dtype=torch.bool)
    row_and_column[2], row_and_column[:, 2] = True, True
    assert not seen[~row_and_column].any()
    assert seen.sum() > 5


@pytest.mark.parametrize("kwargs", [{"offsets": "joint"}, {"contexts": 3}, {"offsets": "joint", "contexts": 3}])
def test_ablations_of_figure_2(kwargs: dict[str, object]) -> None:
    """With the same offsets, joint sampling leaves row and column, and three contexts reach more tokens than one."""
    mixer = ActiveTokenMixer(8, share=2, **kwargs).double()
    contexts = kwargs.get("contexts", 1)
    assert len(mixer.embed) == (1 if "offsets" in kwargs else 2)
    assert mixer.embed[0].in_features == contexts * 8
    nn.init.zeros_(mixer.fusion.fc2.weight)
    x = torch.randn(1, 30, 8, dtype=torch.float64, requires_grad=True)
    offset = torch.zeros(1, 30, contexts, 2, 4, dtype=torch.float64)
    for i in range(contexts):
        offset[:, :, i, 0], offset[:, :, i, 1] = i + 1, -(i + 1)  # right, and up
    mixer(x, (5, 6), offset.flatten(2))[0, 20].sum().backward()
    seen = x.grad[0].any(-1).nonzero().flatten().tolist()
    if "offsets" in kwargs:
        expected = [20] + [20 - 5 * (i + 1) for i in range(contexts)]
    else:
        expected = [20] + [20 + i + 1 for i in range(contexts)] + [20 - 6 * (i + 1) for i in range(contexts)]
    assert seen == sorted(expected)


@pytest.mark.parametrize("kwargs", [{"offsets": "joint"}, {"contexts": 3}, {"offsets": "zero"}, {"peg": False}])
def test_ablations_train(kwargs: dict[str, object]) -> None:
    model = scatter_offsets(family.ATMNet(**TINY, **kwargs)).train()
    model(torch.randn(2, 3, 40, 32)).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    names = {n for n, _ in model.named_parameters()}
    assert any(".offset." in n for n in names) != (kwargs.get("offsets") == "zero")
    assert any(".peg." in n for n in names) == kwargs.get("peg", True)


def test_three_contexts_cost_half_as_much_again() -> None:
    """+50 % in the paper for figure 2's ATMNet-xT with three contexts; the embeddings of the samples add a third."""
    plain, three = size("atmnet_xtiny")[1], size("atmnet_xtiny", contexts=3)[1]
    assert 1.3 < three / plain < 1.5
    assert abs(size("atmnet_xtiny", offsets="joint")[1] / plain - 1) < 0.1


def test_offsets_are_predicted_in_the_authors_blocks() -> None:
    expected = {
        "atmnet_xtiny": [[0], [0], [0, 2], [0]],
        "atmnet_tiny": [[0], [0], [0, 2, 4, 6, 8], [0]],
        "atmnet_small": [[0], [0], [0, 6, 12], [0]],
        "atmnet_base": [[0], [0, 6], [0, 6, 12, 18, 24], [0]],
        "atmnet_large": [[0], [0], [0, 6, 12, 18], [0]],
    }
    for name, stages in expected.items():
        model = meta(name)
        made = [[j for j, block in enumerate(stage.blocks) if block.offset is not None] for stage in model.stages]
        assert made == stages, name
    single = family.ATMNet(**TINY | {"depths": (1, 1, 1, 1)})
    assert all(stage.blocks[0].offset is not None for stage in single.stages)


def test_initial_values() -> None:
    model = timm.create_model("atmnet_xtiny")
    stage = model.stages[1]
    assert stage.blocks[0].offset[1].weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert stage.peg.conv.weight.std().item() == pytest.approx((2 / 9) ** 0.5, rel=0.1)
    assert stage.downsample.weight.std().item() == pytest.approx((2 / (9 * 128)) ** 0.5, rel=0.1)
    assert not any(p.any() for n, p in model.named_parameters() if n.endswith(".bias"))
    assert model.no_weight_decay() == {f"stages.{i}.peg.conv.{p}" for i in range(4) for p in ("weight", "bias")}


def test_mixer_predicts_offsets() -> None:
    mixer = ActiveTokenMixer(12, share=3)
    nn.init.normal_(mixer.offset[1].bias, std=2.0)
    x = torch.randn(2, 35, 12)
    out = mixer(x, (5, 7))
    assert out.shape == x.shape
    torch.testing.assert_close(out, mixer(x, (5, 7), mixer.offset(x)))
    assert not torch.allclose(out, mixer(x, (7, 5)))


def test_autocast_gathers_in_half_precision() -> None:
    mixer, x = ActiveTokenMixer(8, share=2), torch.randn(1, 6, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = mixer(x, (2, 3))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), mixer(x, (2, 3)), rtol=0.1, atol=0.02)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="8 channels cannot share offsets in groups of 3: choose a divisor of 8"):
        ActiveTokenMixer(8, share=3)
    with pytest.raises(ValueError, match="unknown kind 'diagonal' of offsets: choose one of axial, joint, zero"):
        timm.create_model("atmnet_xtiny", device="meta", offsets="diagonal")
    with pytest.raises(ValueError, match="predict=False does not predict offsets: pass offset"):
        ActiveTokenMixer(8, predict=False)(torch.zeros(1, 4, 8), (2, 2))
    with pytest.raises(ValueError, match="8 channels cannot share 6 offsets over 2 axes"):
        ActiveTokenMixer(8)(torch.zeros(1, 4, 8), (2, 2), torch.zeros(1, 4, 6))


@torch.no_grad()
def test_blocks_that_share_a_plan() -> None:
    """In inference mode blocks share the first one's plan, with the same result as without."""
    model = timm.create_model("atmnet_xtiny").eval()
    for module in model.modules():
        if isinstance(module, ActiveOffset):
            nn.init.normal_(module[1].weight, std=0.3)  # initial offsets are zero
    images = torch.randn(2, 3, 64, 96)
    expected = model(images)
    with torch.inference_mode():
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-5)
