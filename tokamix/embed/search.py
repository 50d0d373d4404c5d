"""Search for the most similar features, in chunks."""

from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK = 4096  # features compared at a time


@torch.no_grad()
def nearest(queries: Tensor, features: Iterable[Tensor] | Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Similarities and indices (M, k) of the k features most similar to each query (M, D), best first.

    Args:
        queries: normalised vectors.
        features: normalised vectors (N, D), or parts of them, one after the other; only one part is needed at a time.
        k: results of each query; fewer if there are fewer features.
    """
    best = queries.new_empty(len(queries), 0)
    index = torch.empty(len(queries), 0, dtype=torch.int64, device=queries.device)
    start = 0
    for part in (features,) if isinstance(features, Tensor) else features:
        for chunk in part.split(CHUNK):
            similarity = torch.cat([best, queries @ chunk.T], 1)
            numbers = torch.arange(start, start + len(chunk), device=queries.device).expand(len(queries), -1)
            best, place = similarity.topk(min(k, similarity.shape[1]), dim=1)
            index = torch.cat([index, numbers], 1).gather(1, place)
            start += len(chunk)
    return best, index
