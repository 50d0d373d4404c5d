"""Saliency of a class by integrated gradients."""

import torch
from torch import Tensor, nn

from tokamix.explain.capture import evaluation

BATCH = 16  # steps of the path in one pass


def integrated_gradients(
    model: nn.Module, image: Tensor, target: int | None = None, steps: int = 32, baseline: Tensor | None = None
) -> Tensor:
    """How much each value (C, H, W) of an image contributes to the logit of a class.

    Axiomatic Attribution for Deep Networks, arXiv 1703.01365: the gradient averaged along the straight path from a
    baseline to the image, times their difference. The sum is the difference of the logits at both ends, up to the error
    of the midpoint rule.

    Args:
        model: a classifier; it runs in evaluation mode and its parameters get no gradients.
        image: (C, H, W), normalised as the model expects.
        target: index of the class; None: the predicted one.
        steps: points on the path.
        baseline: (C, H, W); None: zeros, the data set's mean colour.
    """
    if image.ndim != 3:
        raise ValueError(f"integrated_gradients needs one image (C, H, W), got shape {tuple(image.shape)}")
    if steps < 1:
        raise ValueError(f"integrated_gradients needs at least one step, got {steps}")
    start = torch.zeros_like(image) if baseline is None else baseline
    total = torch.zeros_like(image)
    with evaluation(model), torch.inference_mode(False), torch.enable_grad():
        if target is None:
            with torch.no_grad():
                target = int(model(image[None].clone()).argmax())
        for part in ((torch.arange(steps, device=image.device) + 0.5) / steps).split(BATCH):
            path = torch.lerp(start, image, part[:, None, None, None].to(image.dtype)).detach().requires_grad_()
            logits = model(path)
            if not 0 <= target < logits.shape[1]:
                raise ValueError(f"there is no class {target}: the model has {logits.shape[1]}, from 0")
            (gradient,) = torch.autograd.grad(logits[:, target].sum(), path)
            total += gradient.sum(0)
    return total / steps * (image - start)
