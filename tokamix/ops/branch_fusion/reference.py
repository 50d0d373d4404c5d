"""Branch fusion in plain PyTorch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tokamix.ops import dispatch


def branch_summary(branches: Sequence[Tensor]) -> Tensor:
    """The sum of the branches (B, N, C), averaged over tokens -> (B, C)."""
    means = [branch.mean(dim=1) for branch in branches]
    return sum(means[1:], means[0]) if dispatch.is_exporting() else torch.stack(means).sum(0)


def fuse_branches(branches: Sequence[Tensor], logits: Tensor) -> Tensor:
    """The sum of K branches (B, N, C) with weights softmax(logits), logits (B, C * K), branches innermost."""
    weights = logits.unflatten(-1, (branches[0].shape[-1], len(branches)))
    if dispatch.is_exporting():  # few operators, and a softmax over the last axis
        first, *others = weights.softmax(-1).mT.chunk(len(branches), 1)
    else:  # branches first: with strided weights the products are slow on a CPU
        first, *others = weights.movedim(-1, 0).softmax(dim=0).to(branches[0].dtype).unsqueeze(2)  # (B, 1, C) each
    fused = first * branches[0]
    for weight, branch in zip(others, branches[1:], strict=True):
        fused = torch.addcmul(fused, weight, branch)
    return fused


def fuse_branches_backward(grad: Tensor, branches: Sequence[Tensor], logits: Tensor) -> tuple[list[Tensor], Tensor]:
    """The gradients of the branches and of the logits."""
    wide = torch.promote_types(grad.dtype, torch.float32)
    weights = logits.unflatten(-1, (grad.shape[-1], len(branches))).to(wide).softmax(-1)  # (B, C, K)
    grads = [grad * weight.to(grad.dtype).unsqueeze(1) for weight in weights.unbind(-1)]
    slopes = torch.stack([(grad.to(wide) * branch).sum(1) for branch in branches], dim=-1)
    grad_logits = weights * (slopes - (weights * slopes).sum(-1, keepdim=True))
    return grads, grad_logits.flatten(1).to(logits.dtype)
