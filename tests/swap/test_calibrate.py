"""Calibration of swapped mixers: closed form, deterministic, no new parameters."""

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

import tokamix
from tokamix.mixers.weight_mixing import WeightMixing
from tokamix.ops.weight_mixing.reference import mixing_weights
from tokamix.swap import calibrate
from tokamix.swap.calibrate import calibrate_mixers

COLUMN: dict[str, Any] = {"img_size": 32, "patch_size": 4, "dim": 32, "depth": 2, "num_heads": 2, "num_classes": 5}


def create(host: str) -> nn.Module:
    torch.manual_seed(0)
    if host == "column":
        model = tokamix.create_model("columnar_tiny_softmax", weight_init="fan_in", **COLUMN)
    elif host == "column with norms":
        model = tokamix.create_model("columnar_tiny_softmax", **COLUMN, mixer_kwargs={"qk_norm": True})
    else:
        model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2)
    for name, parameter in model.named_parameters():
        if "qkv.weight" in name:
            nn.init.normal_(parameter, std=0.25)  # attention that is far from uniform
    return model.eval()


def images(count: int = 48) -> Tensor:
    return torch.randn(count, 3, 32, 32, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def output_error(model: nn.Module, original: nn.Module, name: str, batch: Tensor) -> float:
    """Squared error of a mixer on the original's input, relative to the variance of the original's output."""
    seen: list[Any] = []
    hook = original.get_submodule(name).register_forward_hook(lambda _, args, output: seen.append((args, output)))
    original(batch)
    hook.remove()
    args, target = seen[0]
    return (
        (model.get_submodule(name)(*args) - target).square().sum() / (target - target.mean((0, 1))).square().sum()
    ).item()


@pytest.mark.parametrize(
    ("host", "to", "factor"),
    [
        ("column", "sima", 0.5),
        ("column with norms", "sima", 0.5),
        ("vit", "sima", 0.5),
        ("column with norms", "super_token", 1.0),
        ("column", "weight_mixing", 1.0),
        ("column", "active_token", 1.0),
    ],
)
def test_calibration_reduces_the_error(host: str, to: str, factor: float) -> None:
    """On noise, mixers other than SimA gain little: their fits are least squares, so they never lose."""
    original, batch = create(host), images()
    naive, model = copy.deepcopy(original), copy.deepcopy(original)
    torch.manual_seed(0)
    report = tokamix.swap_mixer(naive, to)
    torch.manual_seed(0)
    tokamix.swap_mixer(model, to, calibrate=batch)
    before, after = naive.state_dict(), model.state_dict()
    assert {name: tensor.shape for name, tensor in before.items()} == {n: tensor.shape for n, tensor in after.items()}
    for name in report.replaced:
        tested = images(96)[48:] if to == "sima" else batch  # unseen images
        assert output_error(model, original, name, tested) < factor * output_error(naive, original, name, tested)
    trunk = [name for name in before if not name.startswith(tuple(report.replaced))]
    assert len(trunk) > 10
    assert all(torch.equal(before[name], after[name]) for name in trunk)


def test_errors_are_those_of_the_outputs_and_repeat_exactly() -> None:
    original, batch = create("column"), images()
    hosts = {f"blocks.{i}.mixer": original.get_submodule(f"blocks.{i}.mixer") for i in range(2)}
    weights = []
    for batches in (batch, batch, batch.split(16)):
        model = copy.deepcopy(original).train()
        tokamix.swap_mixer(model, "sima")
        errors = calibrate_mixers(model, hosts, original, batches)
        assert model.training
        for name, error in errors.items():
            assert error == pytest.approx(output_error(model.eval(), original, name, batch), rel=1e-3)
        weights.append(model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    for name, tensor in weights[0].items():  # several batches are like one
        torch.testing.assert_close(weights[2][name], tensor, rtol=1e-3, atol=1e-3)


def test_mean_attention_becomes_the_bank(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not its mirror image: attention to the left neighbour becomes mixing from the left."""
    left = torch.full((1, 2, 12, 12), 0.02, dtype=torch.float64)
    left[..., torch.arange(1, 12), torch.arange(11)] = 0.78
    monkeypatch.setattr(calibrate, "_attention", lambda host, x: (x, x, left))
    mixer = WeightMixing(8, (3, 4), num_heads=2, adaptive=False).double()
    host = nn.Module()
    host.num_heads = 2
    fit = calibrate.BankFit(mixer, host)
    fit.add((torch.zeros(1, 12, 8), (3, 4)), {}, None)
    with torch.no_grad():
        fit.solve()
    weights = mixing_weights(None, mixer.bank, (3, 4), (3, 4))[:, 0, 0]  # (sources, heads, destinations)
    for token in (1, 2, 3, 5):
        assert weights[:, 0, token].argmax() == token - 1


def test_uniform_attention_becomes_sima_exactly() -> None:
    """SimA with constant queries and keys is uniform attention; the gain is the number of tokens."""
    original = create("column")
    with torch.no_grad():
        for block in original.blocks:
            block.mixer.qkv.weight[:64].zero_()
            block.mixer.qkv.bias.normal_()
    model = copy.deepcopy(original)
    tokamix.swap_mixer(model, "sima", calibrate=images())
    torch.testing.assert_close(model(images()), original(images()), rtol=1e-3, atol=1e-4)


def test_super_tokens_of_one_token_stay_what_they_are() -> None:
    original = create("column with norms")
    model = copy.deepcopy(original)
    tokamix.swap_mixer(model, "super_token", mixer_kwargs={"cell": 1}, calibrate=images())
    torch.testing.assert_close(model(images()), original(images()), rtol=1e-4, atol=1e-5)


def test_some_blocks_of_a_body_and_bad_input() -> None:
    model = create("column")
    with pytest.raises(ValueError, match=r"where=.blocks\.7\.mixer. matches no attention: there are 2"):
        tokamix.swap_mixer(model, "sima", where=["blocks.7.mixer"])
    with pytest.raises(ValueError, match="calibration needs images, got none"):
        tokamix.swap_mixer(copy.deepcopy(model), "sima", calibrate=[])
    report = tokamix.swap_mixer(model, "sima", where=["blocks.1.mixer"])
    assert list(report.replaced) == ["blocks.1.mixer"]
    assert [type(block.mixer).__name__ for block in model.blocks] == ["SoftmaxAttention", "SimASelfAttention"]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("levit_128s", {"img_size": 64, "depth": (1, 1, 1)}),  # an activation and a norm around the projection
        ("fastvit_sa12", {"layers": (1, 1, 1, 1), "embed_dims": (8, 16, 32, 64)}),  # a map, with a linear projection
        ("visformer_tiny", {"img_size": 64, "embed_dim": 48, "init_channels": 8, "depth": (1, 1, 1), "num_heads": 2}),
        ("gemma4_vit_167m", {"img_size": 64, "depth": 1, "embed_dim": 32, "num_heads": 2}),  # another name
        ("vit_base_patch16_siglip_224", {"img_size": 64, "depth": 1, "embed_dim": 24, "num_heads": 3}),  # a pool
    ],
)
def test_output_projections_of_other_hosts(name: str, options: dict[str, Any]) -> None:
    """Fitted at the projection itself, whatever surrounds it."""
    torch.manual_seed(0)
    model, x = timm.create_model(name, num_classes=5, **options).eval(), torch.randn(4, 3, 64, 64)
    with torch.no_grad():  # branches that start at 0
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    original, naive = copy.deepcopy(model), copy.deepcopy(model)
    tokamix.swap_mixer(naive)
    report = tokamix.swap_mixer(model, calibrate=x)
    assert not [note for note in report.notes if "not calibrated" in note]

    def watch(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        errors = [(network.get_submodule(path)(*args, **kwargs) - output).square().sum() for network in (naive, model)]
        assert errors[1] < 0.9 * errors[0], path

    with torch.no_grad():
        for path in report.replaced:
            hook = original.get_submodule(path).register_forward_hook(watch, with_kwargs=True)
            original(x)
            hook.remove()


def test_mixers_without_an_output_projection_are_reported() -> None:
    model = timm.create_model("botnet26t_256", num_classes=5, img_size=64).eval()
    report = tokamix.swap_mixer(model, calibrate=torch.randn(2, 3, 64, 64))
    assert report.notes[-1].startswith("not calibrated: 3 without a linear output projection, such as stages.2.1")


def test_wide_images_and_the_bank_of_a_vit() -> None:
    """The new mixers do not see the images: they are told the grid. The bank is fitted among the patch tokens."""
    torch.manual_seed(0)
    sizes = {"img_size": (32, 128), "patch_size": 8, "embed_dim": 24, "num_heads": 3, "depth": 1}
    model = timm.create_model("vit_tiny_patch16_224", **sizes).eval()
    attention, x = model.blocks[0].attn, torch.randn(8, 3, 32, 128)
    seen: list[Tensor] = []
    attention.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    tokens = (model(x), seen[0])[1]
    q, k, _ = attention.qkv(tokens).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4)
    matrix = (q @ k.mT * 8**-0.5).softmax(-1).mean(0)[:, 1:, 1:].unflatten(2, (4, 16)).unflatten(1, (4, 16))
    tokamix.swap_mixer(model, "weight_mixing", calibrate=x, image_size=(32, 128))
    bank = attention.mixer.bank[:3].unflatten(1, (7, 31)).exp() / 65  # of displacements (-3..3, -15..15)
    torch.testing.assert_close(bank[:, 3, 16], matrix.diagonal(0, 1, 3).diagonal(1, 1, 2).mean((1, 2)))


def test_class_tokens_of_mixers_on_a_grid() -> None:
    """They attend as before the swap: fitting the patch tokens must not spoil what the classifier sees."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=24, num_heads=3, depth=1)
    x, outputs = torch.randn(32, 3, 32, 32), []
    original = copy.deepcopy(model.eval())
    tokamix.swap_mixer(model, "linformer", calibrate=x)
    for network in (original, model):
        network.blocks[0].attn.register_forward_hook(lambda module, args, output: outputs.append(output[:, 0]))
        network(x)
    target, fitted = outputs
    error = (fitted - target).square().sum() / (target - target.mean(0)).square().sum()
    assert error < 0.2, "0.83 if all tokens weigh the same"
