"""Tokens by depth: their rank, and how similar they have become (oversmoothing)."""

import torch
from torch import Tensor


@torch.no_grad()
def token_similarity(tokens: Tensor) -> Tensor:
    """Mean cosine similarity (B,) of all pairs of different tokens (B, N, C); 1 if all point the same way."""
    count = tokens.shape[1]
    if count == 1:
        return tokens.new_ones(len(tokens))
    unit = torch.nn.functional.normalize(tokens, dim=-1)
    own = unit.square().sum((1, 2))  # N, less zero tokens
    return (unit.sum(1).square().sum(-1) - own) / (count * (count - 1))


@torch.no_grad()
def effective_rank(tokens: Tensor) -> Tensor:
    """Effective rank (B,) of tokens (B, N, C): exp of the entropy of their singular values, from 1 to min(N, C).

    The effective rank: a measure of effective dimensionality, Roy and Vetterli, EUSIPCO 2007. It is 1 if all tokens are
    multiples of one vector.
    """
    values = torch.linalg.svdvals(tokens.float() if tokens.dtype in (torch.float16, torch.bfloat16) else tokens)
    part = values / values.sum(-1, keepdim=True).clamp_min(torch.finfo(values.dtype).tiny)
    return torch.special.entr(part).sum(-1).exp()
