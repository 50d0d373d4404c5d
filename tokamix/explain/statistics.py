"""Statistics of a model over many images, collected batch by batch in constant memory."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from tokamix.data.decode import DataError
from tokamix.explain.active_token import offset_histogram
from tokamix.explain.attention import attention_entropy, highest_entropy
from tokamix.explain.capture import Capture, CapturedLayer, Layer, capture
from tokamix.explain.depth import effective_rank, token_similarity
from tokamix.explain.explainer import Explainer
from tokamix.explain.mixing import mixing_distance
from tokamix.predict.files import find_images

BINS = 64  # of the density of entropies
NO_PROGRESS: Callable[[int, int], object] = lambda done, total: None  # noqa: E731


@dataclass
class LayerStatistics:
    """Sums over the images seen so far of one layer.

    Attributes:
        layer: place and kind of the mixer.
        grid: (H, W) of its tokens.
        images: number of images.
        distance_sum: of the mean mixing distance in pixels, (heads,).
        similarity_sum: of the mean cosine similarity of tokens.
        rank_sum: of the effective rank of tokens.
        across: counts (W,) of the middle token's horizontal offsets, bin W // 2 for none; None without offsets.
        down: counts (H,) of its vertical offsets.
        entropies: counts (heads, BINS) of the tokens' attention entropies, from 0 to `highest`; None without softmax.
        highest: entropy of uniform attention.
    """

    layer: Layer
    grid: tuple[int, int]
    images: int = 0
    distance_sum: Tensor = field(default_factory=lambda: torch.zeros(()))
    similarity_sum: float = 0.0
    rank_sum: float = 0.0
    across: Tensor | None = None
    down: Tensor | None = None
    entropies: Tensor | None = None
    highest: float = 0.0

    @property
    def distance(self) -> Tensor:
        """Mean mixing distance (heads,) in pixels."""
        return self.distance_sum / self.images

    @property
    def similarity(self) -> float:
        """Mean cosine similarity of the tokens after the block."""
        return self.similarity_sum / self.images

    @property
    def rank(self) -> float:
        """Mean effective rank of the tokens after the block."""
        return self.rank_sum / self.images

    @property
    def entropy(self) -> Tensor:
        """Mean attention entropy (heads,) in nats, up to the width of a bin."""
        if self.entropies is None:
            raise ValueError(f"{self.layer.name} ({self.layer.kind}) is not softmax attention: it has no entropy")
        middles = (torch.arange(BINS) + 0.5) / BINS * self.highest
        return (self.entropies * middles).sum(1) / self.entropies.sum(1)

    @property
    def offset_spread(self) -> tuple[float, float]:
        """Standard deviation of the horizontal and the vertical offsets, as a part of the possible range (W, H)."""
        if self.across is None or self.down is None:
            raise ValueError(f"{self.layer.name} ({self.layer.kind}) has no sampling offsets")
        spreads = []
        for counts in (self.across.double(), self.down.double()):
            places = torch.arange(len(counts), dtype=torch.float64)
            mean = (counts * places).sum() / counts.sum()
            spreads.append(float(((counts * (places - mean).square()).sum() / counts.sum()).sqrt() / len(counts)))
        return spreads[0], spreads[1]


class Statistics:
    """Running statistics of every layer; `update` adds a captured batch."""

    def __init__(self) -> None:
        self.layers: list[LayerStatistics] = []
        self.skipped: list[str] = []  # why files could not be read

    @property
    def images(self) -> int:
        """Number of images seen."""
        return self.layers[0].images if self.layers else 0

    def update(self, captured: Capture) -> None:
        """Add the images of a capture; all must have the same size."""
        if not self.layers:
            self.layers = [LayerStatistics(layer.layer, layer.grid) for layer in captured]
        for total, layer in zip(self.layers, captured, strict=True):
            if layer.grid != total.grid:
                raise ValueError(
                    f"images of one size are needed: {layer.layer.name} had {total.grid}, got {layer.grid}"
                )
            _add(total, layer)


def _add(total: LayerStatistics, layer: CapturedLayer) -> None:
    patches = layer.tokens[:, layer.prefix :]
    total.images += len(layer.x)
    total.distance_sum = total.distance_sum + mixing_distance(layer).sum(0).cpu()
    total.similarity_sum += float(token_similarity(patches).sum())
    total.rank_sum += float(effective_rank(patches).sum())
    if layer.layer.kind == "active_token" and layer.mixer.offsets != "zero":
        across, down = (counts.cpu() for counts in offset_histogram(layer))
        total.across = across if total.across is None else total.across + across
        total.down = down if total.down is None else total.down + down
    if layer.layer.kind == "softmax":
        total.highest = highest_entropy(layer)
        part = attention_entropy(layer).transpose(0, 1).flatten(1) / total.highest  # (heads, images * tokens)
        bins = (part * BINS).long().clamp(0, BINS - 1).cpu()
        counts = torch.zeros(len(bins), BINS, dtype=torch.int64).scatter_add_(1, bins, torch.ones_like(bins))
        total.entropies = counts if total.entropies is None else total.entropies + counts


def collect_statistics(
    explainer: Explainer,
    images: str | Path | Sequence[str | Path] | Iterable[Tensor],
    batch_size: int = 16,
    progress: Callable[[int, int], object] = NO_PROGRESS,
) -> Statistics:
    """Collect the statistics of a model over a folder of images.

    Files that cannot be read are left out and named in `skipped`.

    Args:
        explainer: the model with its preprocessing.
        images: a folder, a glob pattern or a list of files; or batches (B, C, H, W), normalised.
        batch_size: images of one forward pass.
        progress: called after each batch with the number of images done and their total.
    """
    result = Statistics()
    if isinstance(images, str | Path) or (isinstance(images, Sequence) and isinstance(images[0], str | Path)):
        files = find_images([images] if isinstance(images, str | Path) else images)
        for start in range(0, len(files), batch_size):
            batch = []
            for path in files[start : start + batch_size]:
                try:
                    batch.append(explainer.preprocess(path))
                except DataError as error:
                    result.skipped.append(str(error))
            if batch:
                result.update(capture(explainer.model, torch.stack(batch)))
            progress(min(start + batch_size, len(files)), len(files))
        if not result.images:
            raise DataError(f"none of the {len(files)} images could be read; the first: {result.skipped[0]}")
        return result
    for batch_of_images in images:
        assert isinstance(batch_of_images, Tensor)
        result.update(capture(explainer.model, batch_of_images))
        progress(result.images, 0)
    return result
