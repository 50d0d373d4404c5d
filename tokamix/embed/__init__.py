"""Features of images, and search among them."""

from tokamix.embed.features import FeatureExtractor, effective_rank, extract_features
from tokamix.embed.index import FeatureIndex
from tokamix.embed.neighbours import Neighbour, find_neighbours, write_neighbours
from tokamix.embed.run import embed

__all__ = [
    "FeatureExtractor",
    "FeatureIndex",
    "Neighbour",
    "effective_rank",
    "embed",
    "extract_features",
    "find_neighbours",
    "write_neighbours",
]
