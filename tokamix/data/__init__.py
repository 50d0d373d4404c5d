"""Data sets by name or path, and loaders that yield their batches on the device."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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

_MODULES = {
    "AnnotatedDataset": "annotated.datasets",
    "AnnotatedImage": "annotated.datasets",
    "ArrayDataset": "images.datasets",
    "DataError": "decode",
    "DatasetSplits": "splits",
    "FileDataset": "images.datasets",
    "ImageDataset": "images.datasets",
    "ImageStream": "images.streams",
    "Loader": "loading",
    "PackDataset": "images.packs",
    "create_dataset": "create",
    "decode_image": "decode",
    "mix": "images.mixup",
}

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


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
