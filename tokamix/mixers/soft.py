"""SOFT: a Gaussian kernel instead of softmax, through landmarks."""

from typing import Any

import torch
from torch import Tensor

from tokamix.mixers.heads import HeadMixer, full_precision, segment_means
from tokamix.ops import dispatch


@full_precision
def soft_attention(
    q: Tensor, v: Tensor, grid: tuple[int, int], cells: int = 7, iterations: int = 20, normalize: bool = True
) -> Tensor:
    """Attention with weights exp(-|q_i - q_j|^2 / (2 sqrt(D))), approximated by the Nyström method.

    P A^+ P^T v, where P holds the weights between tokens and landmarks and A those among the landmarks; a landmark is
    the mean query of one of `cells` x `cells` parts of the grid.

    Args:
        q: queries, which are the keys too (B, heads, N, D).
        v: values (B, heads, N, D).
        grid: (H, W) with H * W = N.
        cells: landmarks along each side.
        iterations: Newton steps of the inverse.
        normalize: divide by the square roots of A's row sums on both sides of its inverse.
    """
    q = q * q.shape[-1] ** -0.25
    rows, columns = (segment_means(n, cells, like=q) for n in grid)
    by_rows = rows @ q.unflatten(-2, grid).flatten(-2)  # (B, heads, cells, W*D)
    # unfold: torch.export cannot prove that W * D divides into (W, D) for every W
    dim = q.shape[-1]
    by_rows = by_rows.unfold(-1, dim, dim) if dispatch.is_exporting() else by_rows.unflatten(-1, (grid[1], dim))
    landmarks = (columns @ by_rows).flatten(-3, -2)  # (B, heads, cells^2, D)
    among = gaussian_kernel(landmarks, landmarks)
    to_landmarks = gaussian_kernel(q, landmarks)  # (B, heads, N, cells^2)
    inverse = newton_inverse(among, iterations)
    if normalize:
        scale = among.sum(-1).rsqrt()
        inverse = scale.unsqueeze(-1) * inverse * scale.unsqueeze(-2)
    return to_landmarks @ (inverse @ (to_landmarks.transpose(-2, -1) @ v))


def gaussian_kernel(x: Tensor, y: Tensor) -> Tensor:
    """exp(-|x_i - y_j|^2 / 2) of x (..., N, D) and y (..., M, D)."""
    squares = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
    distance = (squares - 2 * x @ y.transpose(-2, -1)).clamp_min(0)  # rounding can make it negative
    return (distance / -2).exp()


def newton_inverse(a: Tensor, iterations: int = 20) -> Tensor:
    """The Moore-Penrose inverse of symmetric matrices a (..., M, M) by Newton's iteration x <- x (2 - a x).

    Only the last step is differentiated: with the others constant, its derivative is that of the inverse, -x da x. It
    starts from a / |a|_1^2, which always converges; twice that, as in the paper, falls to zero if all rows have the
    same sum (the authors' code halves it until a test passes, which an exported graph cannot do).
    """
    two = 2 * torch.eye(a.shape[-1], device=a.device, dtype=a.dtype)
    fixed = a.detach()
    x = fixed / fixed.abs().sum(-2).amax(-1).square()[..., None, None]
    for _ in range(iterations - 1):
        x = x @ (two - fixed @ x)
    return x @ (two - a @ x)


class SOFT(HeadMixer):
    """Softmax-free attention with a Gaussian kernel.

    SOFT: Softmax-free Transformer with Linear Complexity, arXiv 2110.11945: queries are keys, landmarks come from the
    average pooling that the paper allows (its code has a convolution for one grid). In its blocks a LayerNorm follows
    and bounds the sums over tokens; in pre-norm blocks, as here, they would grow with the image beyond the range of
    float16, so the symmetric normalisation of the follow-up paper, arXiv 2207.03341, is on.

    Args:
        dim: channels C.
        num_heads: heads, each with C / num_heads channels.
        cells: landmarks along each side of the grid.
        iterations: Newton steps of the inverse.
        normalize: use the normalisation of the follow-up paper; False for the first paper's form.
        qkv_bias: whether the projection to queries and values has a bias.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    parts = 2  # query, which is the key too, and value

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        cells: int = 7,
        iterations: int = 20,
        normalize: bool = True,
        qkv_bias: bool = True,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, device, dtype)
        self.options: dict[str, Any] = {"cells": cells, "iterations": iterations, "normalize": normalize}

    def attend(self, q: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
        """Mix queries and values (B, heads, N, D)."""
        return soft_attention(q, v, grid=grid, **self.options)
