"""`predict` and `Predictor`: apply a trained model of any task to images.

predictor = load_predictor("runs/streets")
prediction = predictor("photo.jpg")
predictor.draw("photo.jpg", prediction).save("overlay.png")
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torchvision.transforms.functional import pil_to_tensor, to_pil_image

from tokamix.data.annotated.transforms import eval_transform
from tokamix.data.decode import DataError, apply_exif_orientation, convert_to_rgb, decode_image, read_oriented_image
from tokamix.data.images.transforms import convert_channels, create_eval_transform, resize_and_crop
from tokamix.dense.sliding_window import predict_classes
from tokamix.inference import (
    InferenceConfig,
    autocast,
    choose_device,
    evaluation_mode,
    load_model,
    read_precision,
)
from tokamix.predict.draw import Objects, draw_objects, draw_segmentation
from tokamix.predict.files import find_images, open_writer, sheet_format, unique_names, write_sheet

ImageLike = str | Path | Image.Image | np.ndarray | Tensor
DECODE_FACTOR = 4  # a JPEG is decoded at no less than this many times the classifier's image size, as in evaluation
WORKERS = 4  # threads that decode images


@dataclass
class Prediction:
    """Prediction for one image of (H, W) pixels.

    A classifier fills `labels` and `scores` with its top classes, a segmenter `segmentation`, a detector the others.
    Best scores come first.
    """

    image: str = ""  # its path, if it is a file
    segmentation: Tensor | None = None  # (H, W) int64
    boxes: Tensor | None = None  # (n, 4): left, top, right, bottom
    labels: Tensor | None = None  # (n,)
    scores: Tensor | None = None  # (n,) from 0 to 1
    masks: Tensor | None = None  # (n, H, W) bool
    names: tuple[str, ...] = ()  # class names of `labels`
    areas: tuple[tuple[str, float], ...] = ()  # classes of `segmentation` and their part of the image, largest first
    size: tuple[int, int] = (0, 0)  # (H, W)
    error: str | None = None  # why the image could not be read

    def above(self, threshold: float) -> "Prediction":
        """The prediction without the detected objects below a score; those of other tasks stay as they are."""
        if self.boxes is None or self.labels is None or self.scores is None:
            return self
        kept = self.scores >= threshold
        return replace(
            self,
            boxes=self.boxes[kept],
            labels=self.labels[kept],
            scores=self.scores[kept],
            masks=None if self.masks is None else self.masks[kept],
            names=tuple(name for name, keep in zip(self.names, kept.tolist(), strict=True) if keep),
        )

    def summary(self) -> str:
        """Describe the prediction in one line."""
        if self.error is not None:
            return self.error
        if self.areas:
            return ", ".join(f"{name} {100 * area:.0f} %" for name, area in self.areas[:5])
        if self.boxes is None:
            assert self.scores is not None
            return ", ".join(f"{n} {100 * s:.0f} %" for n, s in zip(self.names, self.scores.tolist(), strict=True))
        counts = {name: self.names.count(name) for name in dict.fromkeys(self.names)}
        return ", ".join(f"{n} {name}" for name, n in sorted(counts.items(), key=lambda x: -x[1])) or "nothing"


class Predictor:
    """A trained model that takes images of any size and form.

    Args:
        model: used as it is, in evaluation mode.
        config: preprocessing, class names and test-time options.
        precision: of the forward passes: "fp32", "bf16" or "fp16".
        top_k: classes that a classifier returns.
        batch_size: images of one forward pass of a classifier; segmenters and detectors take one at a time.
    """

    def __init__(
        self, model: Any, config: InferenceConfig, precision: str = "fp32", top_k: int = 5, batch_size: int = 32
    ) -> None:
        if top_k < 1 or batch_size < 1:
            raise ValueError(f"top_k and batch_size must be at least 1, got {top_k} and {batch_size}")
        if config.task == "classify" and not config.num_classes:
            raise ValueError(
                "the model has no classes, it returns features: use `tokamix embed` or `tokamix probe`, or train a"
                " classifier from it with `tokamix train --checkpoint`"
            )
        self.model, self.config, self.precision = model, config, precision
        self.top_k, self.batch_size = top_k, batch_size

    @property
    def class_names(self) -> tuple[str, ...]:
        """Names of the model's classes."""
        return self.config.class_names

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        return next(self.model.parameters()).device

    def __call__(self, images: ImageLike | Sequence[ImageLike]) -> Any:
        """Predict one image (returns a `Prediction`) or several (returns a list of them, which may be empty).

        Args:
            images: a file, a PIL image, a tensor (3, H, W) or an array (H, W, 3) or (H, W) of uint8; or a list of
                these, a tensor (N, 3, H, W), or an array (N, H, W, 3).
        """
        several = isinstance(images, list | tuple) or (isinstance(images, Tensor | np.ndarray) and images.ndim == 4)
        batch: list[Any] = list(images) if several else [images]  # type: ignore[arg-type]
        pixels = [read_image(image, self.config) for image in batch]
        predictions = list(self._predict(pixels))
        for prediction, image, tensor in zip(predictions, batch, pixels, strict=True):
            prediction.image = str(image) if isinstance(image, str | Path) else ""
            prediction.size = (tensor.shape[-2], tensor.shape[-1])
        return predictions if several else predictions[0]

    def _predict(self, images: list[Tensor]) -> Iterator[Prediction]:
        with torch.no_grad(), evaluation_mode(self.model), autocast(self.device, self.precision):
            if self.config.task == "classify":
                for start in range(0, len(images), self.batch_size):
                    batch = torch.stack([self.preprocess(image) for image in images[start : start + self.batch_size]])
                    with torch.inference_mode():  # faster than no_grad on a CPU, see `tokamix.ops.cpu`
                        logits = self.model(batch)
                    yield from self._top_classes(logits.clone().float().softmax(1).cpu())  # an ordinary tensor again
                return
            for image in images:
                batch, size = self.preprocess(image)[None], (image.shape[-2], image.shape[-1])
                if self.config.task == "segment":
                    class_map = segment_images(self.model, batch, size, self.config)[0].cpu()
                    yield Prediction(segmentation=class_map, areas=self._areas(class_map))
                else:
                    yield self._detections(self.model(batch, sizes=[size])[0])

    def _top_classes(self, probabilities: Tensor) -> Iterator[Prediction]:
        scores, labels = probabilities.topk(min(self.top_k, probabilities.shape[1]), dim=1)
        for row_scores, row_labels in zip(scores, labels, strict=True):
            names = tuple(self.class_names[i] for i in row_labels.tolist())
            yield Prediction(labels=row_labels, scores=row_scores, names=names)

    def _areas(self, class_map: Tensor) -> tuple[tuple[str, float], ...]:
        counts = torch.bincount(class_map.flatten(), minlength=len(self.class_names))
        order = counts.argsort(descending=True, stable=True).tolist()
        return tuple((self.class_names[i], float(counts[i]) / class_map.numel()) for i in order if counts[i])

    def _detections(self, detections: dict[str, Tensor]) -> Prediction:
        kept = detections["scores"] >= self.config.score_threshold
        fields: dict[str, Any] = {key: value[kept].cpu() for key, value in detections.items()}
        return Prediction(**fields, names=tuple(self.class_names[i] for i in fields["labels"].tolist()))

    def preprocess(self, image: Tensor) -> Tensor:
        """Resize and normalise an image (C, H, W) uint8 as in evaluation."""
        return preprocess(image, self.config, self.device)

    def draw(self, image: ImageLike, prediction: Prediction) -> Image.Image:
        """Draw a prediction over its image."""
        return draw_prediction(read_image(image, self.config), prediction, self.class_names)


def preprocess(image: Tensor, config: InferenceConfig, device: torch.device) -> Tensor:
    """Resize and normalise an image (C, H, W) uint8 as in evaluation."""
    if config.task != "classify":
        image = eval_transform(image, config)
    elif config.in_chans in (1, 3):
        transform = create_eval_transform(config.image_size, config.crop_pct, config.interpolation, config.crop_mode)
        image = torch.as_tensor(transform(to_pil_image(convert_channels(image[None], config.in_chans)[0])))
    else:
        image = convert_channels(image[None], config.in_chans)
        shape = (config.image_size, config.crop_pct, config.interpolation, config.crop_mode)
        image = resize_and_crop(image, *shape)[0]
    mean, std = (torch.tensor(v, device=device)[:, None, None] for v in (config.mean, config.std))
    return (image.to(device).float() / 255 - mean) / std


def segment_images(model: Any, images: Tensor, size: tuple[int, int], config: InferenceConfig) -> Tensor:
    """Predict the class maps (B, H, W) of normalised images (B, 3, h, w) at their original size (H, W)."""
    window: Any = {"window": config.window, "stride": config.window_stride}
    return predict_classes(model, images, size=size, scales=config.test_scales, flip=config.test_flip, **window)


def draw_prediction(pixels: Tensor, prediction: Prediction, classes: Sequence[str], legend: bool = True) -> Image.Image:
    """Draw a prediction over an image (3, H, W) uint8; a classifier's leaves it as it is."""
    if prediction.segmentation is not None:
        return draw_segmentation(pixels, prediction.segmentation, classes, legend)
    if prediction.boxes is None:
        return to_pil_image(pixels)
    assert prediction.labels is not None
    objects = Objects(prediction.boxes, prediction.labels, prediction.scores, prediction.masks)
    return draw_objects(pixels, objects, classes)


def read_image(image: ImageLike, config: InferenceConfig) -> Tensor:
    """Read an image as a uint8 tensor (C, H, W), as evaluation does for the task.

    For segmenters and detectors, images are rotated as their EXIF tag specifies; classifiers ignore it, as timm does.
    """
    dense = config.task != "classify"
    if isinstance(image, Image.Image):
        return pil_to_tensor(convert_to_rgb(apply_exif_orientation(image) if dense else image))
    if isinstance(image, np.ndarray):
        if image.ndim not in (2, 3):
            raise ValueError(f"an array of an image is (H, W) or (H, W, channels), got {image.shape}")
        image = torch.from_numpy(np.ascontiguousarray(image if image.ndim == 3 else image[..., None])).permute(2, 0, 1)
        image = convert_channels(image[None], 3)[0] if dense and image.dtype == torch.uint8 else image
    if isinstance(image, Tensor):
        channels = (3,) if dense else tuple({1, 3, config.in_chans})
        if image.dtype != torch.uint8 or image.ndim != 3 or image.shape[0] not in channels:
            expected = " or ".join(map(str, channels))
            raise ValueError(
                f"an image is a uint8 tensor ({expected}, H, W), got {tuple(image.shape)} of {image.dtype}"
            )
        return image
    path = Path(image)
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    if dense:
        return read_oriented_image(path)
    return pil_to_tensor(decode_image(path, min_size=DECODE_FACTOR * config.image_size))


def load_predictor(
    source: str | Path | nn.Module,
    device: str | None = None,
    *,
    model: str | None = None,
    score_threshold: float | None = None,
    top_k: int = 5,
    batch_size: int = 32,
) -> Predictor:
    """Load a trained model of any task for prediction.

    Args:
        source: see `tokamix.inference.load_model`; or a classifier as a module.
        device: "cpu" or "cuda"; default: a GPU if there is one.
        model: name of the architecture, for a checkpoint file.
        score_threshold: detections below it are left out; default: 0.3.
        top_k: classes that a classifier returns.
        batch_size: images of one forward pass of a classifier.
    """
    where = choose_device(device)
    if isinstance(source, nn.Module):
        network, config = source, InferenceConfig.from_model(source)
    else:
        network, config = load_model(source, model=model, device=device)
    if score_threshold is not None:
        config = config.replace(score_threshold=score_threshold)
    precision = read_precision(source)
    precision = "fp32" if precision == "fp16" and where.type == "cpu" else precision
    return Predictor(network.to(where), config, precision, top_k, batch_size)


def predict(
    source: str | Path | nn.Module | Predictor,
    images: Any,
    *,
    output: str | Path | None = None,
    sheet: str | Path | None = None,
    device: str | None = None,
    model: str | None = None,
    score_threshold: float | None = None,
    top_k: int = 5,
    batch_size: int = 32,
    on_prediction: Callable[[Prediction], None] = lambda prediction: None,
) -> list[Prediction]:
    """Apply a trained model of any task to images and return a prediction for each.

    Files that cannot be read get a prediction with `error` set, and the others are predicted.

    Args:
        source: a run's folder or another source of `tokamix.inference.load_model`, a classifier as a module, or a
            `Predictor`.
        images: a file, a folder, a glob pattern, or a list of them; or images as `Predictor` takes them.
        output: of a classifier a .csv or .jsonl file. Of a segmenter or detector a folder for NAME_overlay.png,
            NAME_classes.png (class of each pixel; for masks of objects 0 is background, then class + 1) and
            detections.json (COCO's format); masks and class maps are then not kept in memory.
        sheet: an image file for a contact sheet of the predictions.
        device: "cpu" or "cuda"; default: a GPU if there is one.
        model: name of the architecture, for a checkpoint file.
        score_threshold: detections below it are left out; default: 0.3.
        top_k: classes of a classifier that are returned.
        batch_size: images of one forward pass of a classifier.
        on_prediction: called after each image.
    """
    inputs: list[Any] = _list_inputs(images)
    if sheet is not None:
        sheet_format(Path(sheet))  # a wrong name is an error before the work, not after it
    predictor = source
    if not isinstance(predictor, Predictor):
        options: Any = {"model": model, "score_threshold": score_threshold, "top_k": top_k, "batch_size": batch_size}
        predictor = load_predictor(source, device, **options)  # type: ignore[arg-type]
    predictions, drawings = [], []
    with open_writer(output, predictor.config) as writer:
        for name, (pixels, prediction) in zip(unique_names(inputs), _predict_inputs(predictor, inputs), strict=True):
            if pixels is not None:
                writer.write(name, prediction, pixels)
                if sheet is not None:
                    drawings.append((draw_prediction(pixels, prediction, predictor.class_names), prediction))
            if output is not None:
                prediction.segmentation = prediction.masks = None
            predictions.append(prediction)
            on_prediction(prediction)
    if sheet is not None and drawings:
        write_sheet(Path(sheet), drawings)
    return predictions


def _list_inputs(images: Any) -> list[Any]:
    if isinstance(images, str | Path):
        return list(find_images([images]))
    if isinstance(images, Image.Image) or (isinstance(images, Tensor | np.ndarray) and images.ndim < 4):
        return [images]
    items = list(images)
    return list(find_images(items)) if items and all(isinstance(item, str | Path) for item in items) else items


def _predict_inputs(predictor: Predictor, inputs: list[Any]) -> Iterator[tuple[Tensor | None, Prediction]]:
    """Decode batches in threads, one batch ahead of the model, and predict them in order."""
    step = predictor.batch_size if predictor.config.task == "classify" else 1

    def read(item: Any) -> Tensor | DataError:
        try:
            return read_image(item, predictor.config)
        except DataError as error:
            return error

    with ThreadPoolExecutor(WORKERS) as pool:

        def submit(start: int) -> list[Any]:
            return [pool.submit(read, item) for item in inputs[start : start + step]]

        futures = submit(0)
        for start in range(0, len(inputs), step):
            decoded = [future.result() for future in futures]
            futures = submit(start + step)
            results: Iterable[Prediction] = iter(predictor([p for p in decoded if isinstance(p, Tensor)]))
            for item, pixels in zip(inputs[start : start + step], decoded, strict=True):
                prediction = Prediction(error=str(pixels)) if isinstance(pixels, DataError) else next(iter(results))
                prediction.image = str(item) if isinstance(item, str | Path) else ""
                yield (None if isinstance(pixels, DataError) else pixels), prediction
                del prediction  # or the masks of one image would stay in memory while the next is predicted
