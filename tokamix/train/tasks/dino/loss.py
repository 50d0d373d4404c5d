"""DINO's loss, and the two ways to keep the teacher's outputs from collapsing; each works on all processes' images.

The functions are the equations of the papers: DINO (arXiv 2104.14294, section 3.1) and SwAV (arXiv 2006.09882,
section 3.1) for Sinkhorn-Knopp.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

SINKHORN_ITERATIONS = 3


def multicrop_loss(student: Tensor, teacher: Tensor) -> Tensor:
    """Mean cross-entropy over all pairs of a teacher's crop and a different crop of the student.

    Args:
        student: log-probabilities (crops, B, K); the first crops are the teacher's.
        teacher: probabilities (teacher's crops, B, K).
    """
    crops, batch, _ = student.shape
    pairs = len(teacher) * (crops - 1)
    every = torch.einsum("bk,bk->", teacher.sum(0), student.sum(0))
    same = torch.einsum("cbk,cbk->", teacher, student[: len(teacher)])
    return (same - every) / (pairs * batch)


def centered_softmax(logits: Tensor, center: Tensor, temperature: float) -> Tensor:
    """The teacher's probabilities (..., K): softmax of the logits minus their running mean."""
    return F.softmax((logits - center) / temperature, -1)


@torch.no_grad()
def sinkhorn(logits: Tensor, temperature: float, iterations: int = SINKHORN_ITERATIONS) -> Tensor:
    """The teacher's probabilities (N, K), balanced so that each of the K outputs is used equally often.

    Rows and columns are scaled in turn, over the images of all processes, until each row sums to 1.
    """
    scaled = logits / temperature
    mass = (scaled - _reduce(scaled.max(), dist.ReduceOp.MAX)).exp()  # a common factor cancels
    for _ in range(iterations):
        mass = mass / _reduce(mass.sum(0)).clamp(min=1e-30)
        mass = mass / mass.sum(1, keepdim=True).clamp(min=1e-30)
    return mass


@torch.no_grad()
def update_center(center: Tensor, logits: Tensor, momentum: float) -> None:
    """Move the running mean (K,) of the teacher's logits (N, K) towards that of a batch, over all processes."""
    mean = _reduce(logits.mean(0))
    if dist.is_initialized():
        mean = mean / dist.get_world_size()
    center.lerp_(mean, 1 - momentum)


def _reduce(tensor: Tensor, operation: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> Tensor:
    """A tensor summed, or otherwise reduced, over all processes."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.all_reduce(tensor, operation)
    return tensor
