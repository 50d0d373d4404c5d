"""Data sets by name or path, and batches of them on the device.

data = open_data("digits")
loader = make_loader(data.train, load_recipe("digits"), train=True, batch_size=64)
for images, labels in loader.epoch(0): ...

For segmentation and detection: `open_scenes("shapes", "detect")` and `make_scene_loader`.
"""

from tokamix.data.decode import DataError, decode
from tokamix.data.loaders import Loader, make_loader
from tokamix.data.mix import mix
from tokamix.data.scene_loader import SceneLoader, make_scene_loader
from tokamix.data.scenes import Scene, SceneData, SceneSet, open_scenes
from tokamix.data.sets import ArraySet, Dataset
from tokamix.data.sources import ImageData, open_data
from tokamix.data.streams import Stream

__all__ = [
    "ArraySet",
    "DataError",
    "Dataset",
    "ImageData",
    "Loader",
    "Scene",
    "SceneData",
    "SceneLoader",
    "SceneSet",
    "Stream",
    "decode",
    "make_loader",
    "make_scene_loader",
    "mix",
    "open_data",
    "open_scenes",
]
