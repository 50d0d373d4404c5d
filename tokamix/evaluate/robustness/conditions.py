"""The conditions under which a model is tested, and the images of each."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokamix.evaluate.robustness.attacks import fgsm, loss_gradient, pgd
from tokamix.evaluate.robustness.corruptions import CORRUPTIONS, SEVERITIES, corrupt
from tokamix.evaluate.robustness.occlusion import drop_patches, occlude_centre
from tokamix.inference import InferenceConfig

TESTS = ("occlusion", "patch_drop", "fgsm", "pgd", "corruptions", "calibration")
OCCLUSION = (15.0, 30.0, 45.0, 60.0, 75.0)  # percent of the area
PATCH_DROP = (10.0, 30.0, 50.0, 70.0, 90.0)  # percent of the patches
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0)  # in 1/255


class Condition(NamedTuple):
    """One point of a curve.

    Attributes:
        test: "clean", "occlusion", "patch_drop", "fgsm", "pgd", "corruptions" or "imagenet".
        level: percent, epsilon in 1/255, or severity; 0 for "clean" and "imagenet".
        kind: the corruption, or the name of the test set.
    """

    test: str
    level: float = 0.0
    kind: str = ""


CLEAN = Condition("clean")


def list_conditions(tests: Sequence[str], epsilons: Sequence[float]) -> list[Condition]:
    """All conditions of the tests, after checking both arguments."""
    if unknown := [test for test in tests if test not in TESTS]:
        raise ValueError(f"there is no robustness test {unknown[0]!r}; choose from {', '.join(TESTS)}")
    for epsilon in epsilons:
        if not 0 <= epsilon <= 255:
            raise ValueError(
                f"epsilon is {epsilon:g}, but must be from 0 to 255, in units of 1/255 of the pixels' range"
            )
    levels = {"occlusion": OCCLUSION, "patch_drop": PATCH_DROP, "fgsm": epsilons, "pgd": epsilons}
    conditions = [CLEAN, *(Condition(test, level) for test in tests for level in levels.get(test, ()))]
    if "corruptions" in tests:
        conditions += [Condition("corruptions", level, kind) for kind in CORRUPTIONS for level in SEVERITIES]
    return conditions


class PixelModel(nn.Module):
    """A classifier of pixels from 0 to 1: the normalisation is part of it.

    Args:
        model: takes normalised images.
        config: has mean and standard deviation.
    """

    def __init__(self, model: nn.Module, config: InferenceConfig) -> None:
        super().__init__()
        self.model = model
        self.mean: Tensor
        self.std: Tensor
        for name in ("mean", "std"):
            self.register_buffer(name, torch.tensor(getattr(config, name))[:, None, None], persistent=False)

    def forward(self, pixels: Tensor) -> Tensor:
        """Pixels (B, C, H, W) -> logits."""
        return self.model((pixels - self.mean) / self.std)


def apply_conditions(
    model: PixelModel, images: Tensor, labels: Tensor, conditions: Sequence[Condition], indices: list[int]
) -> Iterator[tuple[Condition, Tensor]]:
    """Yield each condition with the images changed by it.

    Args:
        model: that is attacked.
        images: pixels (B, C, H, W) from 0 to 1.
        labels: (B,).
        conditions: of `list_conditions`.
        indices: number of each image in the data set.
    """
    attacked = any(condition.test in ("fgsm", "pgd") for condition in conditions)
    gradient = loss_gradient(model, images, labels)[0] if attacked else None  # the first step of all attacks
    for condition in conditions:
        test, level, kind = condition
        changed: Any = images
        if test == "occlusion":
            changed = occlude_centre(images, level, model.mean)
        elif test == "patch_drop":
            changed = drop_patches(images, level, model.mean, indices)
        elif test == "corruptions":
            changed = corrupt(images, kind, int(level), indices)
        elif test in ("fgsm", "pgd"):
            attack = fgsm if test == "fgsm" else pgd
            changed = attack(model, images, labels, level / 255, gradient=gradient)
        yield condition, changed
