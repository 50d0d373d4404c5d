"""Optimizer, learning rate, stochastic depth, averages."""

import math

import pytest
import timm
import torch
from timm.layers import DropPath

import tokamix
from tests.train.tiny import TINY
from tokamix.train.loop.ema import Ema
from tokamix.train.loop.optim import DropPathSchedule, create_optimizer, create_scheduler

CPU = torch.device("cpu")


def names_by_decay(model: torch.nn.Module, **settings) -> dict[float, set[str]]:
    optimizer = create_optimizer(model, TINY.replace(**settings), CPU)
    names = {id(p): name for name, p in model.named_parameters()}
    found: dict[float, set[str]] = {}
    for group in optimizer.param_groups:
        found.setdefault(group["weight_decay"], set()).update(names[id(p)] for p in group["params"])
    return found


@pytest.mark.parametrize("name", ["stvit_small", "amixer_deit_small", "xcit_nano_12_p16_sima", "columnar_tiny_softmax"])
def test_no_decay_on_norms_biases_and_excluded_parameters(name: str) -> None:
    model = tokamix.create_model(name, device="meta")
    found = names_by_decay(model, weight_decay=0.1)
    assert set(found) == {0.0, 0.1}
    assert found[0.0] | found[0.1] == {name for name, _ in model.named_parameters()}
    named = model.no_weight_decay()
    for name, parameter in model.named_parameters():
        free = parameter.ndim <= 1 or name.endswith(".bias") or name in named
        assert (name in found[0.0]) == free, name


def test_layer_decay() -> None:
    model = timm.create_model("vit_tiny_patch16_224", depth=4, num_classes=10)
    recipe = TINY.replace(layer_decay=0.5, schedule="constant", warmup_epochs=0)
    optimizer = create_optimizer(model, recipe, CPU)
    create_scheduler(optimizer, recipe, 10).step_update(3)
    names = {id(p): name for name, p in model.named_parameters()}
    rates = {names[id(p)]: group["lr"] / recipe.lr for group in optimizer.param_groups for p in group["params"]}
    assert rates["head.weight"] == 1.0
    assert rates["blocks.3.mlp.fc1.weight"] == pytest.approx(0.5)
    assert rates["blocks.0.mlp.fc1.weight"] == pytest.approx(0.5**4)
    assert rates["patch_embed.proj.weight"] == pytest.approx(0.5**5)


def test_warm_up_and_cosine() -> None:
    recipe = TINY.replace(epochs=10, warmup_epochs=2, lr=1e-3, lr_per=32, batch_size=64, min_lr=1e-5, warmup_lr=1e-6)
    optimizer = create_optimizer(torch.nn.Linear(3, 3), recipe, CPU)
    schedule = create_scheduler(optimizer, recipe, steps=5)

    def rate(update: int) -> float:
        schedule.step_update(update)
        return optimizer.param_groups[0]["lr"]

    assert rate(0) == pytest.approx(1e-6)
    assert rate(5) == pytest.approx((1e-6 + 2e-3) / 2, rel=1e-3)  # half way, to twice the rate at twice the batch
    for update in (10, 25, 49):
        assert rate(update) == pytest.approx(1e-5 + (2e-3 - 1e-5) * (1 + math.cos(math.pi * update / 50)) / 2)
    constant = recipe.replace(schedule="constant")
    schedule = create_scheduler(create_optimizer(torch.nn.Linear(3, 3), constant, CPU), constant, steps=5)
    schedule.step_update(40)
    assert schedule.optimizer.param_groups[0]["lr"] == pytest.approx(2e-3)


def test_betas_eps_and_momentum_reach_the_optimizer() -> None:
    adam = create_optimizer(torch.nn.Linear(3, 3), TINY.replace(betas=(0.8, 0.95), eps=1e-6), CPU)
    assert adam.defaults["betas"] == (0.8, 0.95)
    assert adam.defaults["eps"] == 1e-6
    sgd = create_optimizer(torch.nn.Linear(3, 3), TINY.replace(optimizer="sgd", momentum=0.7), CPU)
    assert sgd.defaults["momentum"] == 0.7


def test_drop_path_changes_during_the_run() -> None:
    """STViT-L goes from 0.4 to 0.6; the layers keep their proportions."""
    recipe = TINY.replace(epochs=9, drop_path=0.4, drop_path_later={5: 0.6, 7: 0.0})
    model = tokamix.create_model("stvit_small", drop_path_rate=DropPathSchedule.initial_rate(recipe))
    schedule = DropPathSchedule(model, recipe)
    layers = [m for m in model.modules() if isinstance(m, DropPath)]

    def rates(epoch: int) -> list[float]:
        schedule.set_epoch(epoch)
        return [layer.drop_prob for layer in layers]

    expected = [
        m.drop_prob
        for m in tokamix.create_model("stvit_small", drop_path_rate=0.4).modules()
        if isinstance(m, DropPath)
    ]
    assert rates(4) == pytest.approx(expected)
    assert rates(5) == pytest.approx([1.5 * p for p in expected])
    assert max(rates(6)) == pytest.approx(0.6)
    assert max(rates(8)) == 0.0
    assert max(rates(0)) == pytest.approx(0.4)
    grows = TINY.replace(epochs=9, drop_path=0.0, drop_path_later={5: 0.2})
    model = tokamix.create_model("stvit_small", drop_path_rate=DropPathSchedule.initial_rate(grows))
    schedule = DropPathSchedule(model, grows)
    layers = [m for m in model.modules() if isinstance(m, DropPath)]
    assert (max(rates(0)), max(rates(5))) == (0.0, pytest.approx(0.2))
    with pytest.raises(ValueError, match="has no stochastic depth"):
        DropPathSchedule(torch.nn.Linear(2, 2), grows)


def test_half_life_of_the_average() -> None:
    """After so many steps the old average counts half."""
    decay = TINY.replace(ema_half_life=20).ema_decay
    assert decay is not None
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.zeros_(model.weight)
    ema = Ema(model, decay)
    torch.nn.init.ones_(model.weight)
    for step in range(20):
        ema.update(1_000 + step)  # far from the start, where the decay is lower
    with ema.swapped():
        assert model.weight.item() == pytest.approx(0.5, abs=1e-5)
    assert TINY.ema_decay is None


def test_average_of_the_weights() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3))
    ema = Ema(model, 0.5)
    expected = {name: t.clone() for name, t in model.state_dict().items()}
    for step in range(4):
        model(torch.randn(8, 3))
        with torch.no_grad():
            for p in model.parameters():
                p.add_(1.0)
        ema.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        for name, t in model.state_dict().items():
            mixed = t.is_floating_point()
            expected[name] = decay * expected[name] + (1 - decay) * t if mixed else t.clone()
    weights = {name: t.clone() for name, t in model.state_dict().items()}
    with ema.swapped():
        torch.testing.assert_close(dict(model.state_dict()), expected)
    assert all(torch.equal(t, weights[name]) for name, t in model.state_dict().items())
