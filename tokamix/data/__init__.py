"""Data sets by name or path, and loaders that yield their batches on the device."""

from typing import TYPE_CHECKING

from tokamix._lazy import attach

if TYPE_CHECKING:
    from tokamix.data.annotated.datasets import AnnotatedDataset, AnnotatedImage
    from tokamix.data.create import create_dataset
    from tokamix.data.decode import DataError, decode_image
    from tokamix.data.images.datasets import ArrayDataset, FileDataset, ImageDataset
    from tokamix.data.images.mixup import mix
    from tokamix.data.images.packs import PackDataset
    from tokamix.data.images.streams import ImageStream
    from tokamix.data.loading import Loader
    from tokamix.data.splits import DatasetSplits

__all__ = [
    "AnnotatedDataset",
    "AnnotatedImage",
    "ArrayDataset",
    "DataError",
    "DatasetSplits",
    "FileDataset",
    "ImageDataset",
    "ImageStream",
    "Loader",
    "PackDataset",
    "create_dataset",
    "decode_image",
    "mix",
]
__getattr__, __dir__ = attach(
    __name__,
    {
        "annotated.datasets": ("AnnotatedDataset", "AnnotatedImage"),
        "create": ("create_dataset",),
        "decode": ("DataError", "decode_image"),
        "images.datasets": ("ArrayDataset", "FileDataset", "ImageDataset"),
        "images.mixup": ("mix",),
        "images.packs": ("PackDataset",),
        "images.streams": ("ImageStream",),
        "loading": ("Loader",),
        "splits": ("DatasetSplits",),
    },
)
