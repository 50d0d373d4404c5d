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
    "lanczos": Image.Resampling.LANCZOS,
    "box": Image.Resampling.BOX,
    "hamming": Image.Resampling.HAMMING,
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
        if not self.names:
            return "nothing"
        return ", ".join(f"{name} {100 * score:.1f} %" for name, score in zip(self.names, self.scores, strict=True))


class OnnxPredictor:
    """A classifier, segmenter or detector in ONNX Runtime.

    Args:
        path: a file that `tokamix export` wrote.
        top_k: classes that a classifier returns.
        providers: of ONNX Runtime; default: the CPU.
    """

    def __init__(self, path: str | Path, top_k: int = 5, providers: tuple[str, ...] = (CPU,)) -> None:
        if not Path(path).is_file():
            raise FileNotFoundError(f"there is no file {path}")
        try:
            self.session = onnxruntime.InferenceSession(str(path), providers=list(providers))
        except Exception as error:  # ONNX Runtime's own classes
            raise ValueError(f"{path} cannot be opened: {str(error).splitlines()[0]}") from error
        text = self.session.get_modelmeta().custom_metadata_map.get("tokamix")
        if text is None:
            raise ValueError(f"{path} has no metadata of tokamix; write it with `tokamix export`")
        self.metadata = json.loads(text)
        self.config, self.top_k = self.metadata["inference"], top_k
        self._check(path)

    def _check(self, path: str | Path) -> None:
        """Refuse files that would be predicted otherwise than by `tokamix predict`."""
        config, size = self.config, self.metadata["size"]
        if self.metadata["features"]:
            raise ValueError(f"{path} holds a feature extractor, which predicts nothing; export without --features")
        if len(config["mean"]) not in (1, 3):
            raise ValueError(f"{path} takes images of {len(config['mean'])} channels; this script reads 1 or 3")
        if config["task"] == "classify" and size and size[0] != size[1]:
            raise ValueError(
                f"{path} takes images of {size[0]}x{size[1]}, but classifiers are given a square crop; export it with"
                f" --size {config['image_size']} or --size dynamic"
            )
        if config["window"] or tuple(config["test_scales"]) != (1.0,) or config["test_flip"]:
            raise ValueError(
                f"{path} was made for a sliding window, several scales or flips, which need `tokamix predict`; or"
                " export a model without these test-time options"
            )

    def __call__(self, image: str | Path | Image.Image) -> Result:
        """Predict one image."""
        picture = Image.open(image) if isinstance(image, str | Path) else image
        classify = self.config["task"] == "classify"
        if classify:  # large JPEGs are decoded at a fraction of their size
            picture.draft(None, (4 * self.config["image_size"],) * 2)
        picture = _to_rgb(picture if classify else ImageOps.exif_transpose(picture))
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
        if len(self.config["mean"]) == 1:
            pixels = np.asarray(Image.fromarray(pixels).convert("L"))[..., None]
        if size := self.metadata["size"]:
            missing = [full - given for full, given in zip(size, pixels.shape[:2], strict=True)]
            if min(missing) < 0:
                raise ValueError(
                    f"the file takes images of at most {size[0]}x{size[1]}, got {pixels.shape[0]}x{pixels.shape[1]}"
                )
        else:
            missing = [0, 0]
            multiple, smallest = (self.metadata.get(key, 1) for key in ("multiple", "smallest"))
            if min(pixels.shape[:2]) < smallest or any(side % multiple for side in pixels.shape[:2]):
                steps = f" that are multiples of {multiple}" * (multiple > 1)
                given = "x".join(map(str, pixels.shape[:2]))
                raise ValueError(f"the file takes images with sides{steps} from {smallest} px on, got {given}")
        grow = [(0, 0), (0, missing[0]), (0, missing[1])]
        if self.metadata["input"] == "uint8":
            colour = [round(255 * m) for m in self.config["mean"]]  # of the padding
            planes = [np.pad(pixels[..., i], grow[1:], constant_values=colour[i]) for i in range(pixels.shape[2])]
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
        if self.config.get("crop_mode") == "squash":  # not in files of earlier versions
            width = height = short
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
            pasted = [_paste(m, b, size) for m, b in zip(outputs["masks"][0][kept], boxes, strict=True)]
            masks = np.array(pasted, bool).reshape(len(boxes), size[1], size[0])
        names = [self.config["class_names"][i] for i in labels]
        return Result(names, outputs["scores"][0][kept], labels, boxes, masks)


def _to_rgb(picture: Image.Image) -> Image.Image:
    """8-bit RGB: 16 bits are scaled to 8, and transparent parts become white."""
    if picture.mode == "F":
        raise ValueError("has floating-point pixels, whose range is unknown; save it with 8 or 16 bits")
    if picture.mode.startswith("I"):  # 16 bits, which Pillow would clip to white
        pixels = np.asarray(picture).astype(np.int64)
        if pixels.min() < 0 or pixels.max() > 65535:
            raise ValueError(f"has pixels from {pixels.min()} to {pixels.max()}; save it with 8 or 16 bits")
        return Image.fromarray((pixels >> 8).astype(np.uint8)).convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in picture.info:
        layer = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")
    return picture.convert("RGB")


def _paste(mask: np.ndarray, box: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Paste a mask (s, s) of probabilities into its box of an image of size (width, height), interpolated."""

    def weights(low: float, high: float, pixels: int, cells: int) -> Any:
        position = (np.arange(pixels) + 0.5 - low) / max(high - low, 1e-6) * cells - 0.5
        return np.clip(1 - np.abs(position[:, None] - np.arange(cells)), 0, None)

    rows, columns = weights(box[1], box[3], size[1], len(mask)), weights(box[0], box[2], size[0], len(mask))
    return rows @ mask @ columns.T >= 0.5


def main(arguments: list[str]) -> int:
    """Print the prediction for each image; images that cannot be read are named, and the others are predicted."""
    if len(arguments) < 2:
        print("usage: python run_onnx.py MODEL.onnx IMAGES...", file=sys.stderr)
        return 2
    try:
        predictor = OnnxPredictor(arguments[0])
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    failed = 0
    for name in arguments[1:]:
        try:
            print(f"{name}: {predictor(name)}")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # what Pillow raises
            print(f"error: {name}: {error}", file=sys.stderr)
            failed = 1
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
