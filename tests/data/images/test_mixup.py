"""Mixup and CutMix: what is mixed, how labels follow, and that several processes agree."""

import pytest
import torch

from tests.data.conftest import recipe
from tokamix.data import mix

IMAGES = torch.randn(8, 3, 12, 10, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(8)


@pytest.mark.parametrize("seed", range(20))
def test_mixup(seed: int) -> None:
    images, targets = mix(IMAGES, LABELS, recipe(mixup=0.8, label_smoothing=0.0), 8, (seed, 0, 0))
    share = targets[0, 0].item()
    assert 0 <= share <= 1
    torch.testing.assert_close(images, share * IMAGES + (1 - share) * IMAGES.roll(4, 0))
    torch.testing.assert_close(targets, share * torch.eye(8) + (1 - share) * torch.eye(8).roll(4, 0))


@pytest.mark.parametrize("seed", range(20))
def test_cutmix(seed: int) -> None:
    before = IMAGES.clone()
    images, targets = mix(IMAGES, LABELS, recipe(cutmix=1.0, label_smoothing=0.0), 8, (seed, 0, 0))
    assert torch.equal(IMAGES, before)
    kept = (images == IMAGES).all(1)
    assert ((images == IMAGES.roll(4, 0)).all(1) | kept).all()
    assert (kept == kept[0]).all()  # one box for the batch
    box = (~kept[0]).nonzero()
    if len(box):
        height, width = (box.amax(0) - box.amin(0) + 1).tolist()
        assert len(box) == height * width
    assert targets[0, 0].item() == pytest.approx(1 - len(box) / 120, abs=1e-6)
    torch.testing.assert_close(targets.sum(1), torch.ones(8))


def test_shares_follow_the_beta_distribution() -> None:
    """Beta(1, 1) is uniform; Beta(0.2, 0.2) prefers the ends."""
    shares = {}
    for alpha in (1.0, 0.2):
        values = recipe(mixup=alpha, label_smoothing=0.0)
        batches = [mix(IMAGES, LABELS, values, 8, (0, 0, i)) for i in range(400)]
        shares[alpha] = torch.stack([targets[0, 0] for _, targets in batches])
        assert abs(shares[alpha].mean() - 0.5) < 0.05
    assert shares[1.0].std() == pytest.approx(12**-0.5, abs=0.03)
    assert shares[0.2].std() == pytest.approx((0.25 / 1.4) ** 0.5, abs=0.03)


def test_probabilities() -> None:
    kinds = {"none": 0, "mixup": 0, "cutmix": 0}
    both = recipe(mixup=1.0, cutmix=1.0, mixup_prob=0.8, mixup_switch_prob=0.25)
    for step in range(600):
        images, _ = mix(IMAGES, LABELS, both, 8, (0, 0, step))
        same = (images == IMAGES).float().mean()
        kinds[
            "none" if images is IMAGES else "cutmix" if same > 0 or torch.equal(images, IMAGES.roll(4, 0)) else "mixup"
        ] += 1
    shares = {kind: count / 600 for kind, count in kinds.items()}
    assert shares == pytest.approx({"none": 0.2, "mixup": 0.6, "cutmix": 0.2}, abs=0.05)


def test_smoothing_is_timms() -> None:
    from timm.data.mixup import mixup_target

    smooth = recipe(label_smoothing=0.1)
    images, targets = mix(IMAGES, LABELS, smooth, 10, (0, 0, 0))
    assert images is IMAGES
    torch.testing.assert_close(targets, mixup_target(LABELS, 10, 1.0, 0.1))


def test_it_depends_on_its_seed_alone() -> None:
    both = recipe(mixup=0.8, cutmix=1.0)
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = mix(IMAGES, LABELS, both, 8, (0, 3, 7))
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    again, other = mix(IMAGES, LABELS, both, 8, (0, 3, 7)), mix(IMAGES, LABELS, both, 8, (0, 3, 8))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("step", range(6))
def test_processes_mix_the_same_pairs(world: int, step: int) -> None:
    both = recipe(mixup=0.8, cutmix=1.0)
    whole = mix(IMAGES, LABELS, both, 8, (0, 0, step))
    for rank in range(world):
        part = mix(IMAGES[rank::world], LABELS[rank::world], both, 8, (0, 0, step))
        assert torch.equal(part[0], whole[0][rank::world])
        assert torch.equal(part[1], whole[1][rank::world])


@pytest.mark.parametrize("seed", range(5))
def test_each_image_has_its_own_draw(seed: int) -> None:
    """Labels and pixels are mixed by the same share; the shares differ, and some images are not mixed."""
    draw = torch.Generator().manual_seed(seed)
    images, labels = torch.rand(64, 1, 12, 10, generator=draw), torch.arange(64)
    both = recipe(mixup=0.8, cutmix=1.0, mixup_prob=0.7, mixup_mode="elem", label_smoothing=0.0)
    mixed, targets = mix(images, labels, both, 64, (seed, 0, 0))
    partner = images.roll(32, 0)
    shares = ((mixed - partner) / (images - partner)).flatten(1)  # of each pixel
    torch.testing.assert_close(shares.mean(1), targets.diagonal(), atol=1e-2, rtol=0)
    torch.testing.assert_close(targets.sum(1), torch.ones(64))
    cut = shares.std(1) > 0.05
    assert 5 < cut.sum() < 40
    assert ((shares[cut] < 0.02) | (shares[cut] > 0.98)).all()
    assert 5 < (targets.diagonal() == 1).sum() < 40
    assert len(targets.diagonal().unique()) > 20
