"""What a trained segmenter or detector sees in pictures.

predictor = load_predictor("runs/streets")
prediction = predictor("photo.jpg")
predictor.draw("photo.jpg", prediction).save("overlay.png")
"""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms.functional import pil_to_tensor

from tokamix.data.annotated.datasets import rle
from tokamix.data.annotated.transforms import eval_transform
from tokamix.data.decode import EXTENSIONS, DataError, scene_picture, upright
from tokamix.evaluate.segmentation import segment_images
from tokamix.inference import InferenceConfig, load_model
from tokamix.predict.draw import Things, class_picture, draw_segmentation, draw_things

Picture = str | Path | Image.Image | Tensor


@dataclass
class Prediction:
    """What was seen in a picture of (H, W) pixels: a segmenter fills `segmentation`, a detector the others."""

    segmentation: Tensor | None = None  # (H, W) int64
    boxes: Tensor | None = None  # (n, 4): left, top, right, bottom, best first
    labels: Tensor | None = None  # (n,)
    scores: Tensor | None = None  # (n,) from 0 to 1
    masks: Tensor | None = None  # (n, H, W) bool


class Predictor:
    """A segmenter or detector for single pictures of any size.

    Args:
        model: it is used as it is, in evaluation mode.
        config: preprocessing, class names and test-time options.
    """

    def __init__(self, model: Any, config: InferenceConfig) -> None:
        self.model, self.config, self.classes = model, config, config.class_names

    @torch.no_grad()
    def __call__(self, picture: Picture) -> Prediction:
        """What is in a picture: a file, a Pillow image, or a tensor (3, H, W) of bytes."""
        pixels = read_picture(picture)
        size = (pixels.shape[-2], pixels.shape[-1])
        images = self._seen(pixels)[None]
        training = self.model.training
        self.model.eval()
        try:
            if self.config.task == "segment":
                return Prediction(segmentation=segment_images(self.model, images, size, self.config)[0].cpu())
            found = self.model(images, sizes=[size])[0]
        finally:
            self.model.train(training)
        kept = found["scores"] >= self.config.score_threshold
        return Prediction(**{key: value[kept].cpu() for key, value in found.items()})

    def _seen(self, pixels: Tensor) -> Tensor:
        """Pixels as the model was trained to see them."""
        device = next(self.model.parameters()).device
        pixels = eval_transform(pixels, self.config)
        mean, std = (torch.tensor(getattr(self.config, key), device=device)[:, None, None] for key in ("mean", "std"))
        return (pixels.to(device).float() / 255 - mean) / std

    def draw(self, picture: Picture, prediction: Prediction) -> Image.Image:
        """The picture with what was seen in it, for people."""
        return draw(read_picture(picture), prediction, self.classes)


def draw(pixels: Tensor, prediction: Prediction, classes: tuple[str, ...], legend: bool = True) -> Image.Image:
    """An image (3, H, W) uint8 with a prediction over it."""
    if prediction.segmentation is not None:
        return draw_segmentation(pixels, prediction.segmentation, classes, legend)
    assert prediction.boxes is not None
    assert prediction.labels is not None
    return draw_things(
        pixels, Things(prediction.boxes, prediction.labels, prediction.scores, prediction.masks), classes
    )


def load_predictor(run: str | Path, device: str | None = None, score: float = 0.3) -> Predictor:
    """The best model of a run's folder, on a GPU where there is one."""
    model, config = load_model(run)
    if config.task == "classify":
        raise ValueError(f"{run} holds a classifier; prediction needs a segmenter or detector")
    model = model.to(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    return Predictor(model, config.replace(score_threshold=score))


def read_picture(picture: Picture) -> Tensor:
    """A picture as a tensor (3, H, W) of bytes, the way up that its camera says."""
    if isinstance(picture, Tensor):
        if picture.dtype != torch.uint8 or picture.ndim != 3 or len(picture) != 3:
            raise ValueError(f"a picture is (3, H, W) of bytes, not {tuple(picture.shape)} of {picture.dtype}")
        return picture
    if isinstance(picture, Image.Image):
        return pil_to_tensor(upright(picture).convert("RGB"))
    path = Path(picture)
    if not path.is_file():
        raise DataError(f"{path} does not exist")
    return scene_picture(path)


def find_pictures(paths: Iterable[str | Path]) -> list[Path]:
    """Picture files: those that are named, and those in folders that are."""
    found: list[Path] = []
    for path in map(Path, paths):
        inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in EXTENSIONS) if path.is_dir() else [path]
        if not inside:
            raise DataError(f"the folder {path} holds no picture")
        found += inside
    return found


def predict(
    run: str | Path | Predictor,
    pictures: Iterable[str | Path],
    output: str | Path,
    *,
    device: str | None = None,
    score: float = 0.3,
    say: Callable[[str], None] = lambda text: None,
) -> list[str]:
    """Write what a run's model sees in pictures into a folder.

    NAME_overlay.png shows it; NAME_classes.png has the class of each pixel (for detections 0 is nothing, and 1 + class
    elsewhere); detections.json has boxes, scores and masks of all pictures in COCO's form, or of those that were done
    before something went wrong. Pictures that cannot be read are left out.

    Args:
        run: a run's folder, or a predictor.
        pictures: files, or folders of them.
        output: the folder; it is made for the first picture that can be read.
        device: default: a GPU where there is one.
        score: detections below it are left out.
        say: is told of each picture that is done.

    Returns:
        a sentence for each picture that could not be read.
    """
    files = find_pictures(pictures)
    predictor = run if isinstance(run, Predictor) else load_predictor(run, device, score)
    folder = Path(output)
    problems: list[str] = []
    detections = Detections(predictor.config)
    try:
        for file, name in zip(files, _names(files), strict=True):
            try:
                pixels = read_picture(file)
            except DataError as error:
                problems.append(str(error))
                continue
            prediction = predictor(pixels)
            folder.mkdir(parents=True, exist_ok=True)
            _write_pictures(folder / name, predictor, pixels, prediction)
            if prediction.boxes is not None:
                detections.add(file, (pixels.shape[-2], pixels.shape[-1]), prediction)
            say(f"{file}: {describe(prediction, predictor.classes)}")
    finally:
        if detections.images:
            detections.write(folder / "detections.json")
    return problems


def _write_pictures(stem: Path, predictor: Predictor, pixels: Tensor, prediction: Prediction) -> None:
    predictor.draw(pixels, prediction).save(stem.with_name(f"{stem.name}_overlay.png"))
    labels = class_map(prediction)
    if labels is not None:
        classes = predictor.classes if prediction.boxes is None else ("background", *predictor.classes)
        class_picture(labels, classes).save(stem.with_name(f"{stem.name}_classes.png"))


def class_map(prediction: Prediction) -> Tensor | None:
    """Classes of pixels (H, W), also from the masks of things, of which the better hide the others."""
    if prediction.segmentation is not None or prediction.masks is None or prediction.labels is None:
        return prediction.segmentation
    drawn = torch.zeros(prediction.masks.shape[1:], dtype=torch.int64)
    for label, mask in zip(prediction.labels.flip(0), prediction.masks.flip(0), strict=True):
        drawn[mask] = int(label) + 1
    return drawn


def describe(prediction: Prediction, classes: tuple[str, ...]) -> str:
    """What was seen, in words: classes of things or pixels, most frequent first."""
    labels = prediction.labels if prediction.segmentation is None else prediction.segmentation.flatten()
    assert labels is not None
    counts = torch.bincount(labels, minlength=len(classes))
    order = [i for i in counts.argsort(descending=True, stable=True).tolist() if counts[i]]
    if prediction.segmentation is None:
        return ", ".join(f"{counts[i]} {classes[i]}" for i in order) or "nothing"
    return ", ".join(f"{classes[i]} {100 * counts[i] / labels.numel():.0f} %" for i in order[:5])


class Detections:
    """Detections in the form of COCO's annotation files, with a score for each.

    Args:
        config: category ids and class names of the model.
    """

    def __init__(self, config: InferenceConfig) -> None:
        self.ids, self.names = config.category_ids, config.class_names
        self.images: list[dict[str, Any]] = []
        self.annotations: list[dict[str, Any]] = []

    def add(self, file: Path, size: tuple[int, int], prediction: Prediction) -> None:
        """Take down what was seen in a picture of (H, W); of its masks, the run lengths are kept."""
        image_id = len(self.images) + 1
        self.images.append({"id": image_id, "file_name": str(file), "height": size[0], "width": size[1]})
        for thing in _things(prediction):
            thing["category_id"] = self.ids[thing["category_id"]]
            self.annotations.append({"id": len(self.annotations) + 1, "image_id": image_id, **thing})

    def write(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        categories = [{"id": number, "name": name} for number, name in zip(self.ids, self.names, strict=True)]
        beside = path.with_name(f".{path.name}.part")
        with beside.open("w") as file:
            json.dump({"images": self.images, "annotations": self.annotations, "categories": categories}, file)
        beside.replace(path)


def _things(prediction: Prediction) -> Iterator[dict[str, Any]]:
    assert prediction.boxes is not None
    assert prediction.labels is not None
    assert prediction.scores is not None
    for n, (left, top, right, bottom) in enumerate(prediction.boxes.tolist()):
        box = [round(value, 2) for value in (left, top, right - left, bottom - top)]
        thing: dict[str, Any] = {"category_id": int(prediction.labels[n]), "bbox": box, "area": box[2] * box[3]}
        if prediction.masks is not None:
            thing |= {"segmentation": rle(prediction.masks[n]), "area": int(prediction.masks[n].sum())}
        yield thing | {"iscrowd": 0, "score": round(float(prediction.scores[n]), 4)}


def _names(files: list[Path]) -> list[str]:
    """A name for each file's results; where others have it, on disks that ignore case too, a number is added."""
    names: dict[str, str] = {}
    copies: Counter[str] = Counter()
    for file in files:
        name = file.stem
        while name.casefold() in names:
            copies[file.stem] += 1
            name = f"{file.stem}_{copies[file.stem] + 1}"
        names[name.casefold()] = name
    return list(names.values())
