"""Adversarial attacks within an L-infinity ball around the pixels: FGSM and PGD.

Images are pixels from 0 to 1 after resizing and cropping, and the model normalises them itself, so that gradients pass
through the real preprocessing and epsilon has the unit of the pixels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def fgsm(model: nn.Module, images: Tensor, labels: Tensor, epsilon: float, *, gradient: Tensor | None = None) -> Tensor:
    """Fast gradient sign method (arXiv 1412.6572): one step of length epsilon that increases the cross-entropy.

    Args:
        model: pixels (B, C, H, W) from 0 to 1 -> logits.
        images: the pixels.
        labels: (B,).
        epsilon: largest change of a pixel.
        gradient: of `loss_gradient` at the images, if it is known.
    """
    if gradient is None:
        gradient = loss_gradient(model, images, labels)[0]
    return _attack_step(images, images, gradient, epsilon, epsilon)


def pgd(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    epsilon: float,
    steps: int = 10,
    *,
    gradient: Tensor | None = None,
) -> Tensor:
    """Projected gradient descent (arXiv 1706.06083), started at FGSM's image, with steps of 2.5 epsilon / `steps`.

    Returns for each image the first one on the way that is misclassified, FGSM's included, so that an image which FGSM
    changes successfully never counts as robust here; otherwise the last one.

    Args:
        model: pixels (B, C, H, W) from 0 to 1 -> logits.
        images: the pixels.
        labels: (B,).
        epsilon: largest change of a pixel.
        steps: number of gradient steps after FGSM's.
        gradient: of `loss_gradient` at the images, if it is known.
    """
    current = fgsm(model, images, labels, epsilon, gradient=gradient)
    best, found = current, torch.zeros_like(labels, dtype=torch.bool)
    for _ in range(steps):
        gradient, logits = loss_gradient(model, current, labels)
        best = torch.where(found[:, None, None, None], best, current)
        found |= logits.argmax(1) != labels
        current = _attack_step(images, current, gradient, 2.5 * epsilon / steps, epsilon)
    return torch.where(found[:, None, None, None], best, current)


@torch.enable_grad()
def loss_gradient(model: nn.Module, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient of the cross-entropy with respect to the pixels, and the logits."""
    images = images.detach().requires_grad_()
    logits = model(images)
    # in float64 the loss of a confident prediction keeps a gradient; the sum does not mix images
    loss = F.cross_entropy(logits.double(), labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, images)
    if not gradient.isfinite().all():
        raise FloatingPointError("the model's gradient is not finite, so it cannot be attacked; use precision fp32")
    return gradient, logits.detach()


def _attack_step(images: Tensor, current: Tensor, gradient: Tensor, step: float, epsilon: float) -> Tensor:
    """Move along the gradient's sign, and stay within epsilon of the image and between 0 and 1."""
    moved = current + step * gradient.sign()
    return torch.minimum(torch.maximum(moved, images - epsilon), images + epsilon).clamp(0, 1).detach()
