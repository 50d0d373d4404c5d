"""Bodies: the same network around every mixer."""

import pytest
import timm
import torch

import tokamix
from tokamix.mixers import list_mixers
from tokamix.models.bodies import BODIES, create_body


def shapes(model: torch.nn.Module) -> dict[str, torch.Size]:
    """Everything but the mixers."""
    return {name: p.shape for name, p in model.state_dict().items() if ".mixer." not in name}


@pytest.mark.parametrize(
    ("body", "params", "macs"),
    [
        ("columnar_tiny", 5_717_416, 1_246_563_840),
        ("columnar_small", 22_050_664, 4_574_026_752),
        ("pyramid_tiny", 7_426_168, 3_307_860_480),
        ("pyramid_small", 28_564_744, 8_783_324_160),
    ],
)
def test_sizes(body: str, params: int, macs: int) -> None:
    model = create_body(body, "softmax", device="meta")
    assert sum(p.numel() for p in model.parameters()) == params
    assert tokamix.count_macs(model, 224) == macs


@pytest.mark.parametrize("body", BODIES)
def test_only_the_mixer_differs(body: str) -> None:
    small: dict = {"img_size": 64, "num_classes": 3}  # those of shipped weights differ
    stages = len(BODIES[body][1].get("dims", ()))
    small |= {"depths": (2, *[1] * (stages - 1))} if stages else {"depth": 2}
    expected = shapes(create_body(body, "softmax", device="meta", **small))
    for mixer in list_mixers():
        assert shapes(create_body(body, mixer, device="meta", **small)) == expected, mixer


def test_create_body_equals_timm() -> None:
    torch.manual_seed(1)
    built = create_body("columnar_tiny", "xca", depth=2, num_classes=5)
    torch.manual_seed(1)
    created = timm.create_model("columnar_tiny_xca", depth=2, num_classes=5)
    assert built.pretrained_cfg == created.pretrained_cfg
    assert built.pretrained_cfg["architecture"] == "columnar_tiny_xca"
    x = torch.randn(1, 3, 40, 40)
    assert torch.equal(built.eval()(x), created.eval()(x))
    assert timm.models.model_entrypoint("columnar_tiny_xca").__name__ == "columnar_tiny_xca"


def test_every_pair_is_registered() -> None:
    names = {f"{body}_{mixer}" for body in BODIES for mixer in list_mixers()}
    assert len(names) >= 56
    assert names <= set(tokamix.list_models())


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="there is no body 'columnar_tinny'; did you mean columnar_tiny"):
        create_body("columnar_tinny", "sima")
    with pytest.raises(ValueError, match="there is no body 'x'; choose one of columnar_tiny, "):
        create_body("x", "sima")
    with pytest.raises(ValueError, match="there is no mixer 'simma'; did you mean sima"):
        create_body("columnar_tiny", "simma")
    with pytest.raises(ValueError, match="must have one value per stage"):
        create_body("pyramid_tiny", "sima", depths=(1, 1))


@pytest.mark.parametrize(("body", "blocks"), [("columnar_tiny", "blocks.1"), ("pyramid_tiny", "stages.1.blocks.0")])
def test_context_broadcasting_at_the_end_of_the_mlp(body: str, blocks: str) -> None:
    depths = {"depth": 2} if body.startswith("columnar") else {"depths": (1, 1, 1, 1)}
    plain = create_body(body, "sima", **depths).double().eval()
    with_cb = create_body(body, "sima", context_broadcast="cb", **depths).double().eval()
    scaled = create_body(body, "sima", context_broadcast="cbs", **depths).double().eval()
    with_cb.load_state_dict(plain.state_dict())  # it adds no parameters
    new = {n: p.shape for n, p in scaled.state_dict().items() if n not in plain.state_dict()}
    assert len(new) == sum(depths.get("depths", (2,)))
    assert all(n.endswith("context.scale") for n in new)
    block, block_cb = plain.get_submodule(blocks), with_cb.get_submodule(blocks)
    x = torch.randn(2, 12, block.norm1.weight.shape[0], dtype=torch.float64)
    mixed = x + block.mixer(block.norm1(x), (3, 4))
    branch = block.mlp(block.norm2(mixed))
    torch.testing.assert_close(block(x, (3, 4)), mixed + branch)
    torch.testing.assert_close(block_cb(x, (3, 4)), mixed + (branch + branch.mean(1, keepdim=True)) / 2)


@pytest.mark.parametrize("position", ["mid", "front", "msa", "both"])
def test_positions_of_context_broadcasting(position: str) -> None:
    """Written out; the middle gives the same as the end, because the second layer is affine."""
    sizes = {"depth": 1, "dim": 16, "num_heads": 2}
    plain = create_body("columnar_tiny", "sima", **sizes).double().eval()
    model = create_body("columnar_tiny", "sima", context_broadcast="cb", context_position=position, **sizes)
    model.double().eval().load_state_dict(plain.state_dict())
    block = plain.blocks[0]
    x = torch.randn(2, 12, 16, dtype=torch.float64)

    def cb(y: torch.Tensor) -> torch.Tensor:
        return (y + y.mean(1, keepdim=True)) / 2

    mixed = block.mixer(block.norm1(x), (3, 4))
    mixed = x + (cb(mixed) if position in ("msa", "both") else mixed)
    normed = block.norm2(mixed)
    branch = block.mlp(cb(normed) if position == "front" else normed)
    expected = mixed + (cb(branch) if position in ("mid", "both") else branch)
    torch.testing.assert_close(model.blocks[0](x, (3, 4)), expected)


def test_context_broadcasting_needs_a_class_token_for_its_gate() -> None:
    with pytest.raises(ValueError, match="'gate' multiplies by the class token, but class_token is False"):
        create_body("columnar_tiny", "sima", context_broadcast="gate", device="meta")
    with pytest.raises(ValueError, match="unknown kind 'x'"):
        create_body("columnar_tiny", "sima", context_broadcast="x", device="meta")
    with pytest.raises(ValueError, match="unknown context_position 'start': choose one of end, mid"):
        create_body("columnar_tiny", "sima", context_position="start", device="meta")


def test_mixers_take_options() -> None:
    model = create_body("columnar_tiny", "cosformer", depth=1, mixer_kwargs={"reweight": True}).eval()
    assert model.blocks[0].mixer.reweight
    plain = create_body("columnar_tiny", "cosformer", depth=1).eval()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(1, 3, 64, 64)
    assert not torch.allclose(plain(x), model(x))
    cell = (
        create_body("pyramid_tiny", "super_token", device="meta", mixer_kwargs={"cell": 2})
        .stages[0]
        .blocks[0]
        .mixer.cell
    )
    assert cell == (2, 2)


def test_mixers_are_fitted_to_their_site() -> None:
    stages = create_body("pyramid_tiny", "weight_mixing", device="meta").stages
    windows = [[(block.mixer.window, block.mixer.shift) for block in stage.blocks[:2]] for stage in stages]
    shifted = [((7, 7), (0, 0)), ((7, 7), (3, 3))]
    assert windows == [shifted, shifted, [((14, 14), (0, 0))] * 2, [((7, 7), (0, 0))] * 2]
    assert create_body("columnar_tiny", "weight_mixing", device="meta", img_size=160).blocks[0].mixer.window == (10, 10)
    cells = [stage.blocks[0].mixer.cell for stage in create_body("pyramid_tiny", "super_token", device="meta").stages]
    assert cells == [(8, 8), (4, 4), (1, 1), (1, 1)]
    offsets = [
        create_body(body, "active_token", device="meta").get_submodule(block).mixer.offset[1].out_features
        for body, block in (("columnar_tiny", "blocks.0"), ("pyramid_small", "stages.0.blocks.0"))
    ]
    assert offsets == [2 * 192 // 4, 2 * 96 // 2]


@pytest.mark.parametrize("mixer", ["softmax", "linformer", "weight_mixing"])
@pytest.mark.parametrize("body", ["columnar_tiny", "pyramid_tiny"])
def test_other_image_sizes(body: str, mixer: str) -> None:
    """Tables resized on the fly, by set_input_size and when a checkpoint is loaded give equal results."""
    sizes = {"depth": 1} if body.startswith("columnar") else {"depths": (1, 1, 1, 1)}
    model = create_body(body, mixer, img_size=224, num_classes=3, **sizes).double().eval()
    x = torch.randn(1, 3, 256, 256, dtype=torch.float64)
    expected = model(x)
    other = create_body(body, mixer, img_size=256, num_classes=3, **sizes).double().eval()
    tokamix.load_checkpoint(other, model.state_dict())
    torch.testing.assert_close(other(x), expected)
    model.set_input_size(256)
    assert {n: p.shape for n, p in model.named_parameters()} == {n: p.shape for n, p in other.named_parameters()}
    torch.testing.assert_close(model(x), expected)
    model.set_input_size((64, 96))
    assert model(x[..., :64, :96]).shape == (1, 3)


@pytest.mark.parametrize(
    ("body", "size"), [("columnar_tiny", {"depth": 1}), ("pyramid_tiny", {"depths": (1, 1, 1, 1)})]
)
def test_weight_init(body: str, size: dict) -> None:
    fixed, fan_in = (
        create_body(body, "softmax", weight_init=kind, num_classes=100, **size) for kind in ("fixed", "fan_in")
    )
    for (name, a), b in zip(fixed.state_dict().items(), fan_in.state_dict().values(), strict=True):
        if a.ndim == 2 and not name.startswith("head"):
            assert a.std() == pytest.approx(0.02, rel=0.1), name
            assert b.std() == pytest.approx(a.shape[1] ** -0.5, rel=0.2), name
        elif "pos_embed" in name:
            assert b.std() == pytest.approx(1, rel=0.1)
    assert fan_in.state_dict()["head.weight"].std() == pytest.approx(0.02, rel=0.1)
    fan_in.reset_classifier(1000)
    assert fan_in.state_dict()["head.weight"].std() == pytest.approx(0.02, rel=0.1)
    with pytest.raises(ValueError, match="unknown weight_init 'xavier': choose one of fixed, fan_in"):
        create_body(body, "softmax", weight_init="xavier")


OPTIONS = {"stem": "conv", "conv_pos": True, "weight_init": "fan_in", "scale_residual": True, "num_classes": 5}
SMALL = {
    "columnar_tiny": {"dim": 32, "depth": 3, "num_heads": 2, "patch_size": 4},
    "pyramid_tiny": {"dims": (16, 24, 32), "depths": (1, 2, 1), "num_heads": (1, 2, 2), "patch_size": 2},
}


@pytest.mark.parametrize("body", SMALL)
@pytest.mark.parametrize("mixer", ["softmax", "active_token"])
def test_options_keep_the_contract(body: str, mixer: str) -> None:
    """Odd sizes, feature levels, checkpointing, other channels and initialisation on the meta device."""
    model = create_body(body, mixer, img_size=32, in_chans=2, **SMALL[body], **OPTIONS).double().train()
    x = torch.randn(2, 2, 37, 30, dtype=torch.float64)
    levels = model.eval().forward_intermediates(x, intermediates_only=True)
    strides = [info["reduction"] for info in model.feature_info]
    assert [level.shape[-2:] for level in levels] == [(-(-37 // s), -(-30 // s)) for s in strides]
    model.train()(x).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.set_grad_checkpointing()
    model(x).sum().backward()
    assert all(torch.equal(p.grad, expected[name]) for name, p in model.named_parameters())
    assert timm.create_model(f"{body}_{mixer}", features_only=True, **SMALL[body])(x[:1, [0, 1, 1]].float())
    meta = create_body(body, mixer, img_size=32, in_chans=2, device="meta", **SMALL[body], **OPTIONS).to_empty(
        device="cpu"
    )
    meta.init_weights(needs_reset=True)
    assert meta.eval()(x.float()).isfinite().all()
    assert meta.get_submodule(meta.pretrained_cfg["first_conv"]).in_channels == 2


@pytest.mark.parametrize("stride", [2, 4, 8])
def test_conv_stem(stride: int) -> None:
    """It has the stride of the patches, and an output depends on the neighbouring patches too."""
    model = create_body("columnar_tiny", "softmax", stem="conv", patch_size=stride, depth=1, dim=24).double().eval()
    x = torch.randn(1, 3, 5 * stride, 4 * stride, dtype=torch.float64, requires_grad=True)
    out = model.stem(x)
    assert out.shape == (1, 5, 4, 24)
    out[0, 2, 2].square().sum().backward()
    rows = x.grad[0].abs().sum((0, 2)).nonzero().flatten()
    assert rows[0] < 2 * stride <= rows[-1]
    with pytest.raises(ValueError, match=r"needs a patch_size of 2, 4, 8 or 16, got 6"):
        create_body("columnar_tiny", "softmax", stem="conv", patch_size=6)
    with pytest.raises(ValueError, match="unknown stem 'x': choose one of patch, conv"):
        create_body("columnar_tiny", "softmax", stem="x")


def test_conv_pos_precedes_the_mixer() -> None:
    model = create_body("columnar_tiny", "sima", depth=1, dim=12, num_heads=2, conv_pos=True).double().eval()
    block, x = model.blocks[0], torch.randn(2, 15, 12, dtype=torch.float64)
    image = x.transpose(1, 2).unflatten(2, (3, 5))
    conv = torch.nn.functional.conv2d(image, block.conv_pos.weight, block.conv_pos.bias, padding=1, groups=12)
    with_positions = (image + conv).flatten(2).transpose(1, 2)
    expected = block(x, (3, 5))
    block.conv_pos = None
    torch.testing.assert_close(expected, block(with_positions, (3, 5)))


@pytest.mark.parametrize(("body", "blocks"), [("columnar_tiny", 3), ("pyramid_tiny", 4)])
def test_scaled_residual_branches(body: str, blocks: int) -> None:
    states = []
    for scale_residual in (False, True):
        torch.manual_seed(0)
        model = create_body(body, "softmax", scale_residual=scale_residual, **SMALL[body])
        states.append(model.state_dict())
    for name, before in states[0].items():
        is_last = name.endswith(("mixer.proj.weight", "mlp.fc2.weight"))
        torch.testing.assert_close(states[1][name], before * (2 * blocks) ** -0.5 if is_last else before)
