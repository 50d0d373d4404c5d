"""The strength of the attacks, and their limits."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from tests.train.tiny import tiny_data
from tokamix.evaluate.robustness import fgsm, pgd
from tokamix.evaluate.robustness.attacks import loss_gradient
from tokamix.evaluate.robustness.conditions import PixelModel
from tokamix.inference import InferenceConfig, load_model
from tokamix.models import create_body


@pytest.fixture(scope="module")
def attacked(classifier_run: Path) -> tuple[PixelModel, Tensor, Tensor]:
    """A trained model, and the pixels and labels of its validation images."""
    model, config = load_model(classifier_run)
    images, labels = tiny_data().val.arrays()
    return PixelModel(model, config), images / 255, labels


def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return (model(images).argmax(1) == labels).float().mean().item()


def test_attacks_are_strong_and_bounded(attacked: tuple[PixelModel, Tensor, Tensor]) -> None:
    """PGD is never above FGSM, which hurts much more than noise of the same size."""
    model, images, labels = attacked
    below = 0
    for epsilon in (16 / 255, 32 / 255, 48 / 255):
        single, several = fgsm(model, images, labels, epsilon), pgd(model, images, labels, epsilon)
        for changed in (single, several):
            assert (changed - images).abs().max() <= epsilon + 1e-6
            assert 0 <= changed.min() <= changed.max() <= 1
        noise = (images + epsilon * torch.randn_like(images).sign()).clamp(0, 1)
        results = [accuracy(model, changed, labels) for changed in (several, single, noise)]
        assert results == sorted(results)
        below += results[0] < results[1] < results[2]
    assert below, "no epsilon tells the three apart"


def test_pgd_keeps_what_fgsm_found(attacked: tuple[PixelModel, Tensor, Tensor]) -> None:
    model, images, labels = attacked
    with torch.no_grad():
        fooled = model(fgsm(model, images, labels, 0.15)).argmax(1) != labels
        assert fooled.any()
        assert (model(pgd(model, images, labels, 0.15, steps=3)).argmax(1) != labels)[fooled].all()


def test_epsilon_0_changes_nothing(attacked: tuple[PixelModel, Tensor, Tensor]) -> None:
    model, images, labels = attacked
    assert torch.equal(fgsm(model, images, labels, 0.0), images)
    assert torch.equal(pgd(model, images, labels, 0.0), images)


def test_gradient_passes_through_the_normalisation() -> None:
    """Against finite differences of the loss of the pixels, in float64."""
    config = InferenceConfig(task="classify", class_names=("a", "b"), mean=(0.4, 0.5), std=(0.2, 0.1))
    network = nn.Sequential(nn.Flatten(), nn.Linear(8, 2), nn.Tanh(), nn.Linear(2, 2)).double()
    model = PixelModel(network, config).double()
    images, labels = torch.rand(1, 2, 2, 2, dtype=torch.float64), torch.tensor([1])
    gradient, _ = loss_gradient(model, images, labels)
    for place in range(8):
        losses = []
        for sign in (1, -1):
            moved = images.clone()
            moved.view(-1)[place] += sign * 1e-6
            losses.append(nn.functional.cross_entropy(model(moved), labels).item())
        assert gradient.view(-1)[place].item() == pytest.approx((losses[0] - losses[1]) / 2e-6, rel=1e-5)


@pytest.mark.parametrize("mixer", ["softmax", "sima", "super_token", "active_token", "weight_mixing", "xca"])
def test_gradients_are_finite(mixer: str) -> None:
    """Also of black and of constant images, for which norms and variances are 0."""
    network = create_body(
        "columnar_tiny", mixer, num_classes=3, img_size=16, patch_size=4, dim=16, depth=2, num_heads=2
    )
    config = InferenceConfig(task="classify", class_names=("a", "b", "c"))
    images = torch.stack([torch.zeros(3, 16, 16), torch.full((3, 16, 16), 0.5), torch.rand(3, 16, 16)])
    gradient, _ = loss_gradient(PixelModel(network.eval(), config), images, torch.tensor([0, 1, 2]))
    assert gradient[2].abs().min() > 0


def test_gradients_that_are_not_finite_are_reported() -> None:
    class Broken(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([(x - x).sqrt().sum((1, 2, 3)), x.sum((1, 2, 3))], 1)

    with pytest.raises(
        FloatingPointError, match="gradient is not finite, so it cannot be attacked; use precision fp32"
    ):
        fgsm(Broken(), torch.rand(2, 3, 4, 4), torch.tensor([0, 1]), 0.1)
