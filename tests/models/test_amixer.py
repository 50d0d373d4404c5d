"""AMixer: the authors' numbers, sizes and parameter names; windows, shifts and image sizes."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import timm
import torch
from torch import Tensor, nn

from tests.conftest import assert_golden, golden_cases, load_golden
from tokamix import count_macs, load_checkpoint
from tokamix.mixers import WeightMixing
from tokamix.models import amixer as family
from tokamix.models._backbone import rename

OFFICIAL = Path(__file__).parent / "official"
NAMES = {"amixer_t": "amixer_tiny", "amixer_s": "amixer_small", "amixer_b": "amixer_base"}

# parameters and multiply-adds at 224 px: the supplement's sizes, then those of the authors' code
SIZES = {
    ("amixer_tiny", None): (26_221_486, 4_530_117_888),
    ("amixer_small", None): (46_190_506, 9_069_666_048),
    ("amixer_base", None): (83_391_920, 16_222_623_744),
    ("amixer_deit_small", None): (21_927_128, 4_486_921_216),
    ("amixer_tiny", "amixer_t"): (25_757_586, 4_356_803_712),
    ("amixer_small", "amixer_s"): (45_842_226, 8_605_607_040),
    ("amixer_base", "amixer_b"): (81_444_396, 15_177_407_488),
}

SMALL = {"dims": (8, 16, 32, 64), "depths": (2, 2, 2, 1), "num_heads": (2, 4, 4, 8), "num_classes": 10}


@pytest.mark.parametrize(("name", "released"), SIZES)
def test_sizes(name: str, released: str | None) -> None:
    model = timm.create_model(name, device="meta", **family.RELEASED.get(released, {})).eval()
    assert (sum(p.numel() for p in model.parameters()), count_macs(model)) == SIZES[name, released]


@pytest.mark.parametrize("path", sorted(OFFICIAL.glob("amixer_*.json")), ids=lambda p: p.stem)
def test_loads_official_names(path: Path) -> None:
    official = {name: torch.empty(shape, device="meta") for name, shape in json.loads(path.read_text()).items()}
    name = NAMES.get(path.stem, "amixer_deit_small")
    model = timm.create_model(name, device="meta", **family.RELEASED.get(path.stem, {}))
    ours = {n: v.shape for n, v in model.state_dict().items()}
    assert {n: v.shape for n, v in family.checkpoint_filter_fn(official, model).items()} == ours
    if path.stem in family.RELEASED:  # its sizes are not those of the paper
        other = timm.create_model(name, device="meta")
        advice = f"the authors' released {path.stem}, which needs create_model('{name}', depths=(2, 2, "
        with pytest.raises(ValueError, match=re.escape(advice) + r".* num_heads=\(.*, shift_mask=False\)"):
            load_checkpoint(other, official)
    assert {n: v.shape for n, v in family.checkpoint_filter_fn(model.state_dict(), model).items()} == ours


def mixer(golden: SimpleNamespace) -> WeightMixing:
    """Our form of the authors' mixing modules: their mode is the policy's activation, then the weights'."""
    ctor, activations = golden.meta["ctor"], {"linear": "identity", "normalize": "l2"}
    adaptive = golden.meta["class"] == "AdaSpatialMLP"
    mode = [activations.get(part, part) for part in ctor["mode"].split("-")]
    policy_activation, activation = (*mode, "identity")[:2] if adaptive else ("identity", mode[0])
    size = ctor.get("k")
    return WeightMixing(
        ctor["dim"],
        window=(4, 4),
        num_heads=ctor["num_heads"],
        bank_size=size if isinstance(size, int) else None,
        activation=activation,
        policy_activation=policy_activation,
        adaptive=adaptive,
        relative=ctor["relative"],
        v_proj=ctor["pre_proj"],
        out_proj=ctor["post_proj"],
    )


class OnMap(nn.Module):
    """Call a module on the tokens of maps (B, H, W, C), as the authors call theirs."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor, ape: Tensor | None = None, attn_mask: Tensor | None = None) -> Tensor:
        grid = x.shape[1:3] if x.ndim == 4 else (4, 4)
        return self.module(x.flatten(1, -2), tuple(grid), *(() if ape is None else (ape,))).view_as(x)


def build(golden: SimpleNamespace) -> tuple[nn.Module, str]:
    """Our form of a golden case's module, and the prefix of the authors' names for it in a whole model."""
    ctor = golden.meta["ctor"]
    match golden.meta["class"]:
        case "AdaSpatialMLP" | "SpatialMLP":
            return OnMap(mixer(golden)), "layers.0.blocks.0.spatial_mixer."
        case "AMixerBlock":
            block = family.Block(
                ctor["dim"],
                ctor["mlp_ratio"],
                layer_scale=1e-3,
                drop_path=0.0,
                window=ctor["window_size"],
                num_heads=ctor["num_heads"],
                partition=True,
                shift=ctor["shift_size"],
                shift_mask=False,
            )
            return OnMap(block), "layers.0.blocks.0."
        case "PatchMerging":
            return family.PatchMerging(ctor["dim"], 2 * ctor["dim"]), "layers.0.downsample."
        case "PureMLP":
            return family.AMixerColumn(
                ctor["img_size"],
                ctor["patch_size"],
                num_classes=10,
                dim=ctor["embed_dim"],
                depth=ctor["depth"],
                num_heads=ctor["num_heads"],
                bank_size=ctor["k"],
            ), ""
    # their windows come from sides rounded down: 1 in the last stage of the non-square case, whose map is 2x3
    windows = (7, 7, 7, 1) if ctor["window_size"] == 7 else tuple(ctor["window_size"])
    return family.AMixer(
        ctor["img_size"], window_sizes=windows, policy_ape=ctor["policy_ape"], shift_mask=False, **SMALL
    ), ""


def our_names(golden: SimpleNamespace, module: nn.Module, prefix: str) -> dict[str, str]:
    """The authors' names of all parameters, and ours."""
    names = {}
    for name in golden.meta["grad_norm_sum_all_params"]:
        new = next(iter(rename({prefix + name: torch.empty(0)}, family.RENAMES)))
        for ours in ("stages.1.downsample.", "stages.0.blocks.0.mixer." if "mixer" in prefix else "stages.0.blocks.0."):
            new = new.removeprefix(ours) if prefix else new
        names[name] = f"module.{new}" if isinstance(module, OnMap) else new
        if name == "weight":  # the bank of static weights
            names[name] = "module.bank"
    return names


@pytest.mark.parametrize("case", [c for c in golden_cases("amixer") if not c.endswith("posinterp")])
def test_golden(case: str) -> None:
    golden = load_golden(case)
    module, prefix = build(golden)
    names = our_names(golden, module, prefix)
    module.double().eval().load_state_dict({names[n]: golden.weights[n] for n in names})
    inputs = {n: x.requires_grad_() for n, x in golden.inputs.items()}
    out = module(**inputs)
    assert_golden(out, golden.outputs["out"], "output")
    (out * golden.loss_weights["out"]).sum().backward()
    for name, expected in golden.grad_inputs.items():
        if name != "attn_mask":  # the authors add it to a tensor they do not use
            assert_golden(inputs[name].grad, expected, f"gradient of {name}")
    gradients = {n: p.grad for n, p in module.named_parameters()}
    assert gradients.keys() == set(names.values())
    for name, expected in golden.grad_weights.items():
        assert_golden(gradients[names[name]], expected, f"gradient of {name}")
    for name, expected in golden.meta["grad_norm_sum_all_params"].items():
        grad = gradients[names[name]]
        assert_golden(
            torch.stack((grad.norm(), grad.sum())), torch.tensor(expected, dtype=torch.float64), f"gradient of {name}"
        )


def test_golden_positions_at_another_size() -> None:
    """The authors resize the position embedding to 8x2 tokens, and mix them as if they were 4x4."""
    golden = load_golden("amixer_deit_model_posinterp")
    model, prefix = build(golden)
    names = our_names(golden, model, prefix)
    model.double().eval().load_state_dict({names[n]: golden.weights[n] for n in names})
    x = golden.inputs["x"]
    tokens, grid = model.embed(x)
    assert grid == (8, 2)
    for block in model.blocks:
        tokens = block(tokens, (4, 4))
    out = model.forward_head(model.norm(tokens))
    assert_golden(out, golden.outputs["out"], "output")
    (out * golden.loss_weights["out"]).sum().backward()
    assert_golden(model.pos_embed.grad, golden.grad_weights["pos_embed"], "gradient of the positions")
    assert not torch.allclose(model(x), golden.outputs["out"]), "tokens have the neighbours of their own grid here"


def blocks(model: nn.Module) -> list[list[WeightMixing]]:
    return [[m for m in stage.modules() if isinstance(m, WeightMixing)] for stage in model.stages]


def test_windows_and_shifts() -> None:
    """Odd blocks shift by half a window if the map is larger than a window on both sides."""
    model = timm.create_model("amixer_tiny", depths=(2, 2, 3, 2), device="meta")
    assert [[m.window[0] for m in stage] for stage in blocks(model)] == [[7, 7], [7, 7], [14, 14, 14], [7, 7]]
    assert [[m.shift[0] for m in stage] for stage in blocks(model)] == [[0, 3], [0, 3], [0, 0, 0], [0, 0]]
    model = timm.create_model("amixer_tiny", depths=(2, 2, 2, 2), img_size=(192, 256), device="meta")
    assert [stage[0].window for stage in blocks(model)] == [(7, 7), (7, 7), (12, 12), (6, 6)]
    model = timm.create_model("amixer_tiny", depths=(2, 2, 2, 2), img_size=448, device="meta")
    assert [stage[1].shift[0] for stage in blocks(model)] == [3, 3, 7, 3]


def test_shift_mask_changes_only_shifted_blocks() -> None:
    masked, inert = (
        family.AMixer(64, window_sizes=(4, 4, 4, 2), shift_mask=mask, **SMALL).eval() for mask in (True, False)
    )
    with torch.no_grad():  # initial banks and scales are so small that all weights are equal
        for name, p in masked.named_parameters():
            if name.endswith(("bank", "gamma")):
                p.normal_()
    inert.load_state_dict(masked.state_dict())
    x = torch.randn(1, 3, 64, 64)
    assert not torch.allclose(masked(x), inert(x))
    for stage in blocks(masked) + blocks(inert):
        for m in stage:
            m.shift = (0, 0)
    assert torch.equal(masked(x), inert(x))


def test_set_input_size() -> None:
    model = family.AMixer(64, window_sizes=(4, 4, 4, 2), policy_ape=True, **SMALL).eval()
    x = torch.randn(1, 3, 96, 64)
    before = model(x)  # runs without it, by padding
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.set_input_size((96, 64), window_sizes=(6, 4, 4, 2))
    assert blocks(model)[0][0].bank.shape == (3, 11 * 11)
    assert model.stages[0].policy_ape.shape == (36, 8)
    assert model(x).shape == before.shape
    fresh = family.AMixer((96, 64), window_sizes=(6, 4, 4, 2), policy_ape=True, **SMALL).eval()
    fresh.load_state_dict(family.checkpoint_filter_fn(state, fresh))
    torch.testing.assert_close(fresh(x), model(x))
    with pytest.raises(ValueError, match=r"4 values, one per stage, got \(7,\)"):
        model.set_input_size(64, (7,))


def test_set_input_size_of_a_column() -> None:
    """Permanent resizing, resizing on the fly and loading a checkpoint of another size give equal results."""
    column = {"patch_size": 8, "dim": 24, "depth": 2, "num_heads": 3, "num_classes": 10}
    model = family.AMixerColumn(32, **column).eval()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    x = torch.randn(1, 3, 40, 64)
    on_the_fly = model(x)
    model.set_input_size((40, 64))
    assert model.pos_embed.shape == (1, 5, 8, 24)
    torch.testing.assert_close(model(x), on_the_fly)
    fresh = family.AMixerColumn((40, 64), **column).eval()
    fresh.load_state_dict(family.checkpoint_filter_fn(state, fresh))
    torch.testing.assert_close(fresh(x), on_the_fly)
    back = family.AMixerColumn(32, **column)
    back.load_state_dict(family.checkpoint_filter_fn(fresh.state_dict(), back))  # from a grid that is not square


@pytest.mark.parametrize("activation", ["identity", "l2", "sigmoid", "layernorm"])
def test_activations(activation: str) -> None:
    model = family.AMixer(64, window_sizes=(4, 4, 4, 2), activation=activation, **SMALL).eval()
    assert model(torch.randn(1, 3, 64, 64)).isfinite().all()


def test_mixer_without_projections_under_autocast() -> None:
    m = WeightMixing(8, (2, 2), num_heads=2, v_proj=False, out_proj=False, policy_activation="softmax")
    x = torch.randn(1, 4, 8)
    with torch.autocast("cpu", torch.bfloat16):
        out = m(x, (2, 2))
    torch.testing.assert_close(out.float(), m(x, (2, 2)), rtol=0.05, atol=0.05)


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="8 channels do not divide into 3 heads"):
        WeightMixing(8, 2, num_heads=3)
    with pytest.raises(ValueError, match="unknown policy activation 'relu': choose one of identity, softmax, sigmoid"):
        WeightMixing(8, 2, num_heads=2, policy_activation="relu")
    with pytest.raises(ValueError, match=r"unknown activation 'relu'"):
        WeightMixing(8, 2, num_heads=2, activation="relu")(torch.randn(1, 4, 8), (2, 2))
    absolute = WeightMixing(8, (2, 2), num_heads=2, relative=False)
    with pytest.raises(
        ValueError, match=r"absolute bank for \(2, 2\) cannot be resized to \(2, 3\); use relative=True"
    ):
        absolute(torch.randn(1, 6, 8), (2, 3))
    with pytest.raises(ValueError, match=r"num_heads must have one value for each of the 4 stages in dims, got \(3,\)"):
        timm.create_model("amixer_tiny", num_heads=(3,))
