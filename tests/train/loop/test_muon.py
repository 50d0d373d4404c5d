"""Muon: the same updates as timm's, the right parameters, exact resume."""

from pathlib import Path

import pytest
import timm
import torch
from timm.optim import Muon
from torch import nn

import tokamix
from tests.train.loop.test_resume import Stop, stop_at
from tests.train.tiny import TINY, assert_same_bits, run
from tokamix.train.loop import muon
from tokamix.train.loop.muon import StackedMuon, muon_groups, orthogonalise
from tokamix.train.loop.optim import create_optimizer

CPU = torch.device("cpu")


def test_singular_values_of_orthogonalised_matrices_are_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalise(torch.randn(3, 24, 40)).float())
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_cpus_without_bfloat16_products_use_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    """The result is that of float64, where bfloat16 has errors of half a percent."""
    torch.manual_seed(0)
    matrices = torch.randn(2, 20, 33)
    exact = matrices.double() / matrices.double().norm(dim=(-2, -1), keepdim=True)
    for a, b, c in muon.COEFFICIENTS:
        gram = exact @ exact.mT
        exact = a * exact + (b * gram + c * gram @ gram) @ exact
    errors = {}
    for supported in (True, False):
        monkeypatch.setattr(muon, "_has_bf16", lambda supported=supported: supported)
        errors[supported] = ((orthogonalise(matrices) - exact).norm() / exact.norm()).item()
        assert orthogonalise(matrices).dtype is (torch.bfloat16 if supported else torch.float32)
    assert errors[False] < 1e-5 < errors[True] < 0.05


@pytest.mark.parametrize("nesterov", [False, True])
def test_updates_equal_those_of_timm(nesterov: bool) -> None:
    """Wide, tall and square matrices and a convolution; in bfloat16 the order of sums leaves a small difference."""
    torch.manual_seed(0)
    shapes = [(24, 16), (16, 24), (16, 24), (16, 16), (8, 4, 3, 3)]
    start = [torch.randn(shape) for shape in shapes]
    ours, theirs = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    options = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9, "nesterov": nesterov}
    optimizers = StackedMuon(ours, **options), Muon(theirs, **options)
    for _ in range(3):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    for p, q, first in zip(ours, theirs, start, strict=True):
        assert (p - q).norm() < 0.02 * (q - first).norm()


@pytest.mark.gpu
def test_captured_updates_are_the_same() -> None:
    """The learning rate changes, a state is loaded, and a gradient is missing in one step."""
    torch.manual_seed(0)
    start = [torch.randn(shape, device="cuda") for shape in [(24, 16), (16, 24), (16, 24), (8, 4, 3, 3)]]
    plain, captured = ([nn.Parameter(t.clone()) for t in start] for _ in range(2))
    optimizers = [StackedMuon(p, lr=0.02, weight_decay=0.1, capture=c) for p, c in ((plain, False), (captured, True))]
    for step in range(6):
        if step == 3:
            optimizers[1].load_state_dict(optimizers[1].state_dict())
        for p, q in zip(plain, captured, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        if step == 4:
            plain[0].grad = captured[0].grad = None
        for optimizer in optimizers:
            optimizer.param_groups[0]["lr"] = 0.02 / (step + 1)
            optimizer.step()
    for p, q, first in zip(plain, captured, start, strict=True):
        assert (p - q).norm() < 1e-3 * (p - first).norm()


def test_channels_last_weights_get_the_same_update() -> None:
    torch.manual_seed(0)
    start, grad = torch.randn(2, 8, 4, 3, 3)
    params = [nn.Parameter(start.clone(memory_format=f)) for f in (torch.contiguous_format, torch.channels_last)]
    for p in params:
        p.grad = grad.clone(memory_format=torch.preserve_format)
        StackedMuon([p], lr=0.02).step()
    assert (params[0] - params[1]).norm() < 0.02 * (params[0] - start).norm()


def test_fallback_is_adamw() -> None:
    torch.manual_seed(0)
    p, q = (nn.Parameter(torch.ones(7)) for _ in range(2))
    ours = StackedMuon([{"params": [p], "use_fallback": True}], lr=0.1, weight_decay=0.3, fallback_lr_scale=0.5)
    theirs = torch.optim.AdamW([q], lr=0.05, weight_decay=0.3, betas=(0.9, 0.95), eps=1e-7)
    for _ in range(3):
        p.grad = torch.randn(7)
        q.grad = p.grad.clone()
        ours.step()
        theirs.step()
    torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", ["columnar_tiny_softmax", "pyramid_tiny_active_token", "vit_tiny_patch16_224"])
def test_only_matrices_of_the_blocks_use_muon(name: str) -> None:
    model = (timm if name.startswith("vit") else tokamix).create_model(name, num_classes=10)
    names = {id(p): name for name, p in model.named_parameters()}
    groups = muon_groups(model, 0.1)
    assert sorted(names[id(p)] for group in groups for p in group["params"]) == sorted(names.values())
    matrices = {names[id(p)] for group in groups if not group["use_fallback"] for p in group["params"]}
    assert {name for name, _ in model.named_parameters() if name.endswith("mlp.fc1.weight")} < matrices
    assert not any(name.startswith(("stem", "patch_embed", "head", "pos_embed", "cls_token")) for name in matrices)


def test_recipe_with_layer_decay() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=2, num_classes=10)
    recipe = TINY.replace(optimizer="nmuon", layer_decay=0.5, optimizer_kwargs={"fallback_lr_scale": 0.4})
    optimizer = create_optimizer(model, recipe, CPU)
    assert isinstance(optimizer, StackedMuon)
    assert optimizer.defaults["nesterov"]
    assert optimizer.defaults["fallback_lr_scale"] == 0.4
    assert {group["lr_scale"] for group in optimizer.param_groups} == {1.0, 0.5, 0.25, 0.125}


def test_unknown_argument() -> None:
    recipe = TINY.replace(optimizer="nmuon", optimizer_kwargs={"fallback": 0.4})
    with pytest.raises(ValueError, match="optimizer nmuon has no argument 'fallback' of optimizer_kwargs; its arg"):
        create_optimizer(nn.Linear(8, 8), recipe, CPU)


def test_resuming_is_exact(tmp_path: Path) -> None:
    settings = {"optimizer": "nmuon", "momentum": 0.95, "clip_grad": 1.0, "ema_half_life": 5.0, "schedule": "linear"}
    settings |= {"mixup": 0.8, "cutmix": 1.0, "mixup_mode": "elem", "mixup_off": 0.3, "select": "last", "eval_every": 2}
    whole = run(tmp_path / "whole", **settings)
    assert [("top1" in row) for row in whole.epochs] == [False, True, True]
    assert whole.best["epoch"] == 3
    assert whole.best["averaged"]
    with pytest.MonkeyPatch.context() as patch:
        stop_at(patch, 7)
        with pytest.raises(Stop):
            run(tmp_path / "stopped", save_every=1, **settings)
    run(tmp_path / "stopped", **settings)
    assert_same_bits(tmp_path / "whole", tmp_path / "stopped")
