"""`insert_context_broadcast` and `remove_context_broadcast`: formulas, positions, and errors."""

import copy
import pickle
import re

import pytest
import timm
import torch
import torchvision
from torch import nn

from tests.swap.hosts import SIZE, broadcast, change_inputs, change_outputs, create, images, submodules, weights
from tokamix.swap import insert_context_broadcast, remove_context_broadcast
from tokamix.swap.context_broadcast import InsertedBroadcast

BROADCAST_HOSTS = [
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "pit_ti_224",
    "pvt_v2_b0",
    "swin_tiny_patch4_window7_224",
    "twins_pcpvt_small",
    "twins_svt_small",
    "pvt_tiny",
    "localvit_tiny",
]
CLASS_TOKEN_HOSTS = ("vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224", "pit_ti_224")


@pytest.mark.parametrize("name", BROADCAST_HOSTS)
def test_broadcast_in_every_host(name: str) -> None:
    model = create(name).double().eval()
    mlps, attentions = submodules(model, r"blocks\.\d+(\.\d+)?\.mlp$"), submodules(model, r"blocks\.\d+(\.\d+)?\.attn$")
    state, x = copy.deepcopy(model.state_dict()), images(dtype=torch.float64)
    plain = model(x)
    expected = change_outputs(model, mlps, broadcast)(x)

    assert insert_context_broadcast(model) == mlps
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-11)
    assert not torch.allclose(expected, plain)
    torch.testing.assert_close(weights(model), state)
    assert insert_context_broadcast(model) == mlps, "a second call changes nothing"
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-11)

    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(twin(x), expected, rtol=1e-9, atol=1e-11)
        assert remove_context_broadcast(twin) == mlps
        torch.testing.assert_close(twin(x), plain)
    torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-11)

    if name.startswith("swin"):  # the whole map, not each window
        both = change_inputs(model, submodules(model, r"blocks\.\d+\.drop_path1$"), broadcast)
    else:
        both = change_outputs(model, attentions, broadcast)
    assert len(insert_context_broadcast(model, block="both")) == 2 * len(mlps)
    torch.testing.assert_close(model(x), both(x), rtol=1e-9, atol=1e-11)

    assert len(remove_context_broadcast(model)) == 2 * len(mlps)
    assert remove_context_broadcast(model) == []
    torch.testing.assert_close(model(x), plain)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("name", CLASS_TOKEN_HOSTS)
@pytest.mark.parametrize("kind", ["gate", "hybrid"])
def test_class_token_kinds(name: str, kind: str) -> None:
    model, x = create(name).double().eval(), images(dtype=torch.float64)
    for block, pattern in (("mlp", r"blocks\.\d+\.mlp$"), ("msa", r"blocks\.\d+\.attn$")):
        expected = change_outputs(model, submodules(model, pattern), lambda y: broadcast(y, kind))(x)
        insert_context_broadcast(model, kind, block=block)
        torch.testing.assert_close(model(x), expected, rtol=1e-9, atol=1e-11)
        remove_context_broadcast(model)


@pytest.mark.parametrize("kind", ["cb", "cbs", "gate", "hybrid"])
def test_positions(kind: str) -> None:
    model, x = create("vit_tiny_patch16_224").double().eval(), images(dtype=torch.float64)
    for block in model.blocks:
        nn.init.normal_(block.mlp.fc2.bias)
    outputs = {}
    for position, pattern in (("front", r"mlp$"), ("mid", r"mlp\.fc2$"), ("end", r"mlp$")):
        change = change_outputs if position == "end" else change_inputs
        scale = 0.5 if kind == "cbs" else 1.0
        expected = change(model, submodules(model, pattern), lambda y, s=scale: broadcast(y, kind, s))(x)
        insert_context_broadcast(model, kind, position, scale_init=0.5)
        outputs[position] = model(x)
        torch.testing.assert_close(outputs[position], expected, rtol=1e-9, atol=1e-11)
        remove_context_broadcast(model)
    # fc2 is affine and CB's weights sum to 1, so mid and end are the same function; not so with a scaled mean
    assert torch.allclose(outputs["mid"], outputs["end"], rtol=1e-9) == (kind == "cb")
    assert not torch.allclose(outputs["front"], outputs["end"])


def test_mid_and_end_have_the_same_gradients() -> None:
    """Both are the same function of the parameters."""
    x, gradients = torch.randn(2, 3, SIZE, SIZE, dtype=torch.float64), {}
    for position in ("mid", "end"):
        torch.manual_seed(0)
        model = create("vit_tiny_patch16_224").double()
        insert_context_broadcast(model, position=position)
        model(x).square().sum().backward()
        gradients[position] = [p.grad for p in model.parameters()]
    torch.testing.assert_close(gradients["mid"], gradients["end"], rtol=1e-7, atol=1e-10)


def test_scaled_broadcast_adds_only_its_scales() -> None:
    model, x = create("swin_tiny_patch4_window7_224").double(), images(dtype=torch.float64)
    names, expected = set(model.state_dict()), create("swin_tiny_patch4_window7_224").double()
    expected.load_state_dict(model.state_dict())
    insert_context_broadcast(model, "cbs")
    insert_context_broadcast(expected, "cb")
    added = {name: value for name, value in weights(model).items() if name not in names}
    assert [len(value) for value in added.values()] == [24, 24, 48, 48]
    assert all(re.fullmatch(r"layers\.\d\.blocks\.\d\.mlp\.broadcast_after\.scale", name) for name in added)
    torch.testing.assert_close(model.eval()(x), expected.eval()(x))
    model.train()(x).square().sum().backward()
    scales = [p for n, p in model.named_parameters() if n in added]
    assert all(p.grad.any() and p.dtype == torch.float64 for p in scales)

    with torch.no_grad():
        for scale in scales:
            scale.fill_(0.25)
    insert_context_broadcast(model, "cbs")
    assert all((scale == 0.25).all() for scale in scales), "a second call keeps learned scales"
    other = create("swin_tiny_patch4_window7_224").double().eval()
    insert_context_broadcast(other, "cbs")
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), model.eval()(x))
    remove_context_broadcast(model)
    assert set(model.state_dict()) == names


@pytest.mark.parametrize(
    ("name", "options", "position"),
    [
        ("deit_tiny_distilled_patch16_224", {"depth": 1}, "front"),
        ("swin_tiny_patch4_window7_224", {"depths": (2,), "num_heads": (2,)}, "end"),
    ],
)
def test_broadcast_compiles_and_exports(name: str, options: dict[str, object], position: str) -> None:
    torch.compiler.reset()
    model, x = create(name, **options).eval(), images()
    insert_context_broadcast(model, "cbs", position)
    expected = model(x)
    torch.testing.assert_close(torch.compile(model, fullgraph=True, backend="aot_eager")(x), expected)
    dims = ({0: torch.export.Dim.AUTO},)
    exported = torch.export.export(model, (images(3),), dynamic_shapes=dims).module()
    torch.testing.assert_close(exported(x), expected)


def test_broadcast_after_the_last_dropout() -> None:
    """In training, the mean is taken over the output of the MLP's last dropout."""
    model = create("vit_tiny_patch16_224", proj_drop_rate=0.5).train()
    insert_context_broadcast(model)
    dropped, seen = [], []
    model.blocks[0].mlp.drop2.register_forward_hook(lambda _, args, out: dropped.append(out))
    model.blocks[0].drop_path2.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(images())
    assert (dropped[0] == 0).float().mean() > 0.4
    torch.testing.assert_close(seen[0], broadcast(dropped[0]))


@torch.no_grad()
def test_broadcast_in_torchvision_models() -> None:
    """Their MLPs are sequences of layers, in which it is applied once; the attention of ViT returns a pair."""
    vit = torchvision.models.VisionTransformer(SIZE, 16, 2, 3, 24, 48, num_classes=5)
    swin = torchvision.models.SwinTransformer([4, 4], 24, [2], [2], [4, 4], num_classes=5)
    x = images(dtype=torch.float64)
    for model, classifier in ((vit, vit.heads[0]), (swin, swin.head)):
        nn.init.normal_(classifier.weight)
        model.double().eval()
        plain = model(x)
        for options, pattern, change in (
            ({}, r"\.mlp$", change_outputs),
            ({"position": "mid"}, r"\.mlp\.3$", change_inputs),
            ({"position": "front"}, r"\.mlp$", change_inputs),
            ({"block": "msa"}, r"\.(attn|self_attention\.out_proj)$", change_outputs),
        ):
            sites = insert_context_broadcast(model, **options)
            assert len(sites) == 2
            out = model(x)
            assert remove_context_broadcast(model) == sites
            if options.get("block") != "msa" or model is swin:
                expected = change(model, submodules(model, pattern), broadcast)(x)
                torch.testing.assert_close(out, expected, rtol=1e-9, atol=1e-11)
            assert not torch.allclose(out, plain)
            assert torch.equal(model(x), plain)


def test_errors_leave_the_model_unchanged() -> None:
    vit = create("vit_tiny_patch16_224")
    for kwargs, message in (
        ({"kind": "cba"}, "unknown kind 'cba' of context broadcasting: choose one of cb, cbs, gate, hybrid"),
        ({"position": "top"}, "unknown position 'top' of context broadcasting: choose one of end, mid, front"),
        ({"block": "ffn"}, "unknown block 'ffn' of context broadcasting: choose one of mlp, msa, both"),
        ({"position": "mid", "block": "msa"}, "attention has no position 'mid'"),
        ({"position": "front", "block": "both"}, "attention has no position 'front'"),
    ):
        with pytest.raises(ValueError, match=message):
            insert_context_broadcast(vit, **kwargs)
    assert remove_context_broadcast(vit) == []
    with pytest.raises(ValueError, match="ResNet has no blocks that insert_context_broadcast supports"):
        insert_context_broadcast(timm.create_model("resnet18", device="meta"))
    for name in ("swin_tiny_patch4_window7_224", "pvt_v2_b0", "pvt_tiny", "localvit_tiny"):
        model = create(name, device="meta")
        with pytest.raises(ValueError, match=f"which {type(model).__name__} does not have in every block"):
            insert_context_broadcast(model, "gate")
    averaging = create("vit_tiny_patch16_224", class_token=False, global_pool="avg", device="meta")
    with pytest.raises(ValueError, match="'hybrid' multiplies by the class token"):
        insert_context_broadcast(averaging, "hybrid")
    insert_context_broadcast(vit, "cb")
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp already has 'cb': call remove_context_broadcast"):
        insert_context_broadcast(vit, "gate")
    model = create("vit_tiny_patch16_224")
    model.blocks[1].mlp = nn.Identity()
    with pytest.raises(ValueError, match=r"position 'mid' does not exist in blocks\.1 \(Block\): mlp\.fc2 is missing"):
        insert_context_broadcast(model, position="mid")
    assert remove_context_broadcast(model) == []


def test_layouts_of_attentions() -> None:
    """The mean is over tokens: of windows before a convolution, of maps, of pairs, and of patches with inner tokens."""
    pyramid = {"depths": (1, 1), "embed_dims": (8, 16), "num_heads": (1, 2)}
    hosts = {
        "tiny_vit_5m_224": {**pyramid, "window_sizes": (4, 4)},
        "fastvit_sa12": {"layers": (1, 1, 1, 1), "embed_dims": (8, 8, 8, 64)},
        "mvitv2_tiny": {"img_size": SIZE},
        "tnt_s_patch16_224": {"img_size": SIZE, "depth": 1},
    }
    for name, options in hosts.items():
        model = timm.create_model(name, num_classes=5, **options).eval()
        insert_context_broadcast(model, "cbs", block="msa")
        widths: list[tuple[int, int]] = []

        def watch(module, args, output, widths=widths) -> None:
            widths.append((args[0].shape[1 if module.channels_first else -1], module.scale.numel()))

        for module in model.modules():
            if isinstance(module, InsertedBroadcast):
                module.register_forward_hook(watch)
        x = images()
        torch.testing.assert_close(model(x)[:1], model(x[:1]), rtol=1e-3, atol=1e-5)
        assert widths
        assert all(width == channels for width, channels in widths)
    assert type(model.blocks[0].attn_out.broadcast_after) is InsertedBroadcast
