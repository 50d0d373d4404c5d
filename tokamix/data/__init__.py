"""Data sets by name or path, and batches of them on the device."""

from tokamix.data.annotated.datasets import AnnotatedDataset, AnnotatedImage
from tokamix.data.create import create_dataset
from tokamix.data.decode import DataError, decode
from tokamix.data.images.datasets import ArrayDataset, ImageDataset
from tokamix.data.images.mixup import mix
from tokamix.data.images.streams import ImageStream
from tokamix.data.loading import Loader
from tokamix.data.splits import DatasetSplits

__all__ = [
    "AnnotatedDataset",
    "AnnotatedImage",
    "ArrayDataset",
    "DataError",
    "DatasetSplits",
    "ImageDataset",
    "ImageStream",
    "Loader",
    "create_dataset",
    "decode",
    "mix",
]
