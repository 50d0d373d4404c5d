"""How a trained model is fed and read: one `InferenceConfig`, saved with every model.

Evaluation, prediction, export and the web page read it, so that all of them see images the way training did.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Self

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from tokamix.tasks import Task


@dataclass(frozen=True, kw_only=True)
class InferenceConfig:
    """Preprocessing, class names and test-time options of a trained model.

    Attributes:
        task: "classify", "segment" or "detect".
        class_names: in the order of the model's outputs.
        mean: of each input channel, for pixels from 0 to 1.
        std: likewise.
        interpolation: how images are resized.
        image_size: side of a classifier's images in pixels.
        crop_pct: share of the resized image that the centre crop of a classifier keeps.
        scale: (long, short): a segmenter's or detector's images are resized to fit into it; None: their own size.
        window: side of a segmenter's sliding window; None: the whole image at once.
        window_stride: from one window to the next; None: two thirds of `window`.
        test_scales: factors on `scale` over which a segmenter's predictions are averaged.
        test_flip: average with the predictions for flipped images as well.
        score_threshold: detections below it are not shown.
        category_ids: COCO's ids of a detector's classes.
    """

    task: Task
    class_names: tuple[str, ...]
    mean: tuple[float, ...] = IMAGENET_DEFAULT_MEAN
    std: tuple[float, ...] = IMAGENET_DEFAULT_STD
    interpolation: str = "bicubic"
    image_size: int = 224
    crop_pct: float = 0.875
    scale: tuple[int, int] | None = None
    window: int | None = None
    window_stride: int | None = None
    test_scales: tuple[float, ...] = (1.0,)
    test_flip: bool = False
    score_threshold: float = 0.3
    category_ids: tuple[int, ...] = ()

    @property
    def in_chans(self) -> int:
        """Number of input channels."""
        return len(self.mean)

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    def replace(self, **changes: Any) -> Self:
        """A copy with other values; an unknown key gets an error that lists the possible ones."""
        known = [f.name for f in fields(self)]
        if unknown := [key for key in changes if key not in known]:
            raise ValueError(f"{unknown[0]!r} is not an inference option; choose from {', '.join(known)}")
        return replace(self, **{key: tuple(v) if isinstance(v, list) else v for key, v in changes.items()})

    def to_dict(self) -> dict[str, Any]:
        """All values as plain lists and numbers, for config.json."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """Rebuild a config from `to_dict`."""
        arguments: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**arguments)
