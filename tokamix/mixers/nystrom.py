"""Nyströmformer: softmax attention through landmarks."""

from typing import Any

import torch
from torch import Tensor

from tokamix.mixers.heads import HeadMixer, full_precision, head_norms, segment_means


@full_precision
def nystrom_attention(q: Tensor, k: Tensor, v: Tensor, landmarks: int = 49, iterations: int = 6) -> Tensor:
    """Softmax attention approximated by the Nyström method.

    softmax(q k'^T) softmax(q' k'^T)^+ softmax(q' k^T) v, all logits over sqrt(D), where q' and k' are the means of
    `landmarks` consecutive segments of q and k. With as many landmarks as tokens this is softmax attention.

    Args:
        q: queries (B, heads, N, D).
        k: keys (B, heads, N, D).
        v: values (B, heads, N, D).
        landmarks: number of segments.
        iterations: steps of the pseudo-inverse.
    """
    q = q * q.shape[-1] ** -0.5
    q_means, k_means = (segment_means(t.shape[-2], landmarks, like=t) @ t for t in (q, k))
    to_landmarks = (q @ k_means.transpose(-2, -1)).softmax(-1)  # (B, heads, N, landmarks)
    between = (q_means @ k_means.transpose(-2, -1)).softmax(-1)
    from_landmarks = (q_means @ k.transpose(-2, -1)).softmax(-1)  # (B, heads, landmarks, N)
    return to_landmarks @ (pseudo_inverse(between, iterations) @ (from_landmarks @ v))


def pseudo_inverse(a: Tensor, iterations: int = 6) -> Tensor:
    """The Moore-Penrose inverse of matrices a (..., M, K) by the third-order iteration of the Nyströmformer."""
    identity = torch.eye(a.shape[-2], device=a.device, dtype=a.dtype)
    norms = a.abs().sum(-2).amax(-1) * a.abs().sum(-1).amax(-1)
    z = a.transpose(-2, -1) / norms[..., None, None]
    for _ in range(iterations):
        az = a @ z
        z = z @ (13 * identity - az @ (15 * identity - az @ (7 * identity - az))) / 4
    return z


class Nystrom(HeadMixer):
    """Attention by the Nyström method.

    Nyströmformer, arXiv 2102.03902, without its optional convolution beside the attention. The iteration for
    the inverse starts from the paper's value for each matrix; the authors' code uses one for the whole batch.

    Args:
        dim: channels C.
        num_heads: heads, each with C / num_heads channels.
        landmarks: number of segments whose means represent all tokens.
        iterations: steps of the pseudo-inverse.
        qkv_bias: whether the projection to queries, keys and values has a bias.
        qk_norm: normalise the queries and keys of each head: with large logits the inverse amplifies values.
        device: device of the parameters.
        dtype: dtype of the parameters.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        landmarks: int = 49,
        iterations: int = 6,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        super().__init__(dim, num_heads, qkv_bias, device, dtype)
        self.landmarks, self.iterations = landmarks, iterations
        self.q_norm, self.k_norm = head_norms(qk_norm, self.head_dim, device, dtype)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int]) -> Tensor:
        """Mix queries, keys and values (B, heads, N, D)."""
        q, k = self.q_norm(q), self.k_norm(k)
        return nystrom_attention(q, k, v, landmarks=self.landmarks, iterations=self.iterations)
