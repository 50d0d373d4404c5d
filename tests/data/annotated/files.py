"""Annotated images on disk in the forms that data sets come in, and recipes for them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.data.conftest import noise
from tokamix.inference import InferenceConfig
from tokamix.recipes import Recipe, create_recipe

CATEGORIES = [{"id": 3, "name": "cat"}, {"id": 7, "name": "dog"}, {"id": 90, "name": "owl"}]
METHODS = {"segment": "semantic_fpn", "detect": "mask_rcnn"}


def dense_recipe(task: str, **values: Any) -> Recipe:
    plain = {"name": "test", "task": task, "method": METHODS[task], "interpolation": "bilinear", "batch_size": 4}
    plain |= {"crop_size": 32} if task == "segment" else {}
    return create_recipe(plain | values)


def dense_config(task: str, **values: Any) -> InferenceConfig:
    return InferenceConfig(**{"task": task, "class_names": (), "interpolation": "bilinear"} | values)


def annotation(number: int, image: int, box: list[float], category: int = 3, **more: Any) -> dict[str, Any]:
    """An annotation whose outline is its box."""
    left, top, width, height = box
    right, bottom = left + width, top + height
    outline = [[left, top, right, top, right, bottom, left, bottom]]
    plain = {"id": number, "image_id": image, "category_id": category, "bbox": box, "segmentation": outline}
    return plain | {"area": width * height, "iscrowd": 0} | more


def content(images: int, annotations: list[dict[str, Any]], first: int = 10, **more: Any) -> dict[str, Any]:
    """An annotation file: images of 40x32 px, whose ids start at `first`."""
    listed = [{"id": first + i, "file_name": f"{first + i}.png", "width": 40, "height": 32} for i in range(images)]
    return {"images": listed, "annotations": annotations, "categories": CATEGORIES} | more


def write_coco(root: Path, part: str, coco: dict[str, Any]) -> Path:
    """Write COCO's layout: annotations/instances_train.json, and images in train/."""
    (root / "annotations").mkdir(parents=True, exist_ok=True)
    (root / part).mkdir(exist_ok=True)
    for entry in coco["images"]:
        noise(entry["id"], entry["width"], entry["height"]).save(root / part / entry["file_name"])
    path = root / "annotations" / f"instances_{part}.json"
    path.write_text(json.dumps(coco))
    return path


def write_pair(images: Path, masks: Path, name: str, values: np.ndarray, palette: bool = False) -> None:
    """Write an image with its mask."""
    images.mkdir(parents=True, exist_ok=True)
    masks.mkdir(parents=True, exist_ok=True)
    noise(len(name), values.shape[1], values.shape[0]).save(images / f"{name}.jpg")
    mask = Image.fromarray(values.astype(np.uint8))
    if palette:
        mask = mask.convert("P")
        mask.putpalette([(37 * i) % 256 for i in range(768)])
        mask.putdata(values.flatten().tolist())
    mask.save(masks / f"{name}.png")


def blocks(*values: int) -> np.ndarray:
    """A mask (8, 4 n) of blocks side by side."""
    return np.repeat(np.array(values, dtype=np.uint8), 4)[None].repeat(8, 0)
