"""Run an ONNX file of `tokamix export` without PyTorch: copy this file; it needs numpy, pillow and onnxruntime.

    python run_onnx.py model.onnx photo.jpg ...

Preprocessing, class names and thresholds are in the file's metadata. Classes and boxes agree with `tokamix predict` to
within the rounding of resized pixels.
"""

import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

CPU = "CPUExecutionProvider"
FILTERS = {
    "bicubic": Image.Resampling.BICUBIC,
    "bilinear": Image.Resampling.BILINEAR,
    "nearest": Image.Resampling.NEAREST,
}


@dataclass
class Result:
    """Prediction for one image; best scores come first."""

    names: list[str]
    scores: np.ndarray | None = None  # (n,)
    labels: np.ndarray | None = None  # (n,)
    boxes: np.ndarray | None = None  # (n, 4) left, top, right, bottom, in pixels of the image
    masks: np.ndarray | None = None  # (n, H, W) bool
    segmentation: np.ndarray | None = None  # (H, W) class of each pixel

    def __str__(self) -> str:
        if self.segmentation is not None or self.scores is None:
            return ", ".join(self.names)
        return ", ".join(f"{name} {100 * score:.1f} %" for name, score in zip(self.names, self.scores, strict=True))


class OnnxPredictor:
    """A classifier, segmenter or detector in ONNX Runtime.

    Args:
        path: a file that `tokamix export` wrote.
        top_k: classes that a classifier returns.
        providers: of ONNX Runtime; default: the CPU.
    """

    def __init__(self, path: str | Path, top_k: int = 5, providers: tuple[str, ...] = (CPU,)) -> None:
        self.session = onnxruntime.InferenceSession(str(path), providers=list(providers))
        text = self.session.get_modelmeta().custom_metadata_map.get("tokamix")
        if text is None:
            raise ValueError(f"{path} has no metadata of tokamix; write it with `tokamix export`")
        self.metadata = json.loads(text)
        self.config, self.top_k = self.metadata["inference"], top_k

    def __call__(self, image: str | Path | Image.Image) -> Result:
        """Predict one image."""
        picture = Image.open(image) if isinstance(image, str | Path) else image
        classify = self.config["task"] == "classify"
        if classify:  # large JPEGs are decoded at a fraction of their size
            picture.draft(None, (4 * self.config["image_size"],) * 2)
        picture = (picture if classify else ImageOps.exif_transpose(picture)).convert("RGB")
        pixels = self._crop(picture) if classify else self._fit(picture)
        outputs = self._run(pixels)
        if classify:
            return self._classes(outputs)
        height, width = pixels.shape[:2]
        if self.config["task"] == "segment":
            return self._segmentation(outputs["logits"][0, :, :height, :width], picture.size)
        return self._objects(outputs, (height, width), picture.size)

    def _run(self, pixels: np.ndarray) -> dict[str, np.ndarray]:
        """Outputs by name for one image (H, W, 3) of uint8, padded to a fixed size if the file has one."""
        if size := self.metadata["size"]:
            missing = [full - given for full, given in zip(size, pixels.shape[:2], strict=True)]
            if min(missing) < 0:
                raise ValueError(f"the file takes images of at most {size[0]}x{size[1]}, got {pixels.shape[:2]}")
        else:
            missing = [0, 0]
        grow = [(0, 0), (0, missing[0]), (0, missing[1])]
        if self.metadata["input"] == "uint8":
            colour = [round(255 * m) for m in self.config["mean"]]  # of the padding
            planes = [np.pad(pixels[..., i], grow[1:], constant_values=colour[i]) for i in range(3)]
            batch = np.stack(planes, -1)[None]
        else:
            mean, std = (np.array(self.config[key], np.float32) for key in ("mean", "std"))
            batch = np.pad(((pixels / np.float32(255) - mean) / std).transpose(2, 0, 1), grow)[None]
        batch = np.repeat(np.ascontiguousarray(batch), self.metadata["batch"] or 1, 0)
        values = self.session.run(None, {self.session.get_inputs()[0].name: batch})
        return dict(zip(self.metadata["outputs"], values, strict=True))

    def _crop(self, picture: Image.Image) -> np.ndarray:
        """Resize the short side to image_size / crop_pct and crop the centre, as timm does."""
        size = self.config["image_size"]
        short = math.floor(size / self.config["crop_pct"])
        width, height = (int(short * side / min(picture.size)) for side in picture.size)
        resized = picture.resize((width, height), FILTERS[self.config["interpolation"]])
        left, top = round((width - size) / 2), round((height - size) / 2)
        return np.asarray(resized.crop((left, top, left + size, top + size)))

    def _fit(self, picture: Image.Image) -> np.ndarray:
        """Resize to fit into the config's scale."""
        if self.config["scale"] is None:
            return np.asarray(picture)
        long, short = max(self.config["scale"]), min(self.config["scale"])
        factor = min(long / max(picture.size), short / min(picture.size))
        width, height = (max(1, int(side * factor + 0.5)) for side in picture.size)
        return np.asarray(picture.resize((width, height), FILTERS["bilinear"]))

    def _classes(self, outputs: dict[str, np.ndarray]) -> Result:
        if "scores" in outputs:
            scores = outputs["scores"][0]
        else:
            scores = np.exp(outputs["logits"][0] - outputs["logits"][0].max())
            scores /= scores.sum()
        best = np.argsort(-scores, kind="stable")[: self.top_k]
        return Result([self.config["class_names"][i] for i in best], scores[best], best)

    def _segmentation(self, logits: np.ndarray, size: tuple[int, int]) -> Result:
        """Class map of the image's own size from logits (K, h, w)."""
        planes = [np.asarray(Image.fromarray(plane).resize(size, FILTERS["bilinear"])) for plane in logits]
        classes = np.stack(planes).argmax(0)
        found = np.unique(classes)
        return Result([self.config["class_names"][i] for i in found], segmentation=classes)

    def _objects(self, outputs: dict[str, np.ndarray], given: tuple[int, int], size: tuple[int, int]) -> Result:
        kept = outputs["scores"][0] >= max(self.config["score_threshold"], 1e-9)
        scale = np.array([size[0] / given[1], size[1] / given[0]] * 2, np.float32)
        boxes, labels = outputs["boxes"][0][kept] * scale, outputs["labels"][0][kept]
        masks = None
        if "masks" in outputs:
            masks = np.array([_paste(m, b, size) for m, b in zip(outputs["masks"][0][kept], boxes, strict=True)])
        names = [self.config["class_names"][i] for i in labels]
        return Result(names, outputs["scores"][0][kept], labels, boxes, masks)


def _paste(mask: np.ndarray, box: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Paste a mask (s, s) of probabilities into its box of an image of size (width, height), interpolated."""

    def weights(low: float, high: float, pixels: int, cells: int) -> Any:
        position = (np.arange(pixels) + 0.5 - low) / max(high - low, 1e-6) * cells - 0.5
        return np.clip(1 - np.abs(position[:, None] - np.arange(cells)), 0, None)

    rows, columns = weights(box[1], box[3], size[1], len(mask)), weights(box[0], box[2], size[0], len(mask))
    return rows @ mask @ columns.T >= 0.5


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(f"usage: python {sys.argv[0]} MODEL.onnx IMAGES...")
    predictor = OnnxPredictor(sys.argv[1])
    for name in sys.argv[2:]:
        print(f"{name}: {predictor(name)}")
