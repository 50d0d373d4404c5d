"""The recipe of a run that names none: by the number and size of the images, and by the weights it starts from.

With few images it names weights to start from, too.
"""

import contextlib
import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from timm.models import get_pretrained_cfg

from tokamix.data import DatasetSplits
from tokamix.data.decode import DataError
from tokamix.data.images.datasets import ImageDataset
from tokamix.inference import read_config

LOOKED_AT = 16  # images whose size is read
SMALL_SIDE = 48  # px, up to which images are used as they are, in patches of 2 px
MANY_IMAGES = 20_000
PHOTO_SIDE = 128  # px, to which larger photos are resized for training from scratch
STEPS = 4500  # that `imagenette_nano` takes to 90 % on 9,469 photos
FEW_IMAGES = 2_000  # up to which a run that names no model starts from weights
WEIGHTS = "pyramid_nano_softmax.cifar100"  # these, which come with the package; see docs/guides/data-size.md


class Choice(NamedTuple):
    """A recipe's name, the values of it that depend on the data, and the reason in words.

    `model` is the name of a model whose weights the run starts from although none were asked for; None for none.
    """

    recipe: str
    settings: dict[str, Any]
    reason: str
    model: str | None = None


def choose_recipe(
    data: DatasetSplits,
    model: str | None,
    checkpoint: str | Path | None,
    pretrained: bool | None,
    given: Mapping[str, Any],
) -> Choice:
    """Choose the recipe of a classifier.

    Args:
        data: the opened data set.
        model: the model's name, if there is one.
        checkpoint: weights to start from.
        pretrained: whether to start from the model's weights; None: choose that as well.
        given: the user's overrides, which win over the choice.
    """
    count, side = _count(data.train), _median_side(data.train)
    seen = (
        f"{'a stream' if count is None else f'{count:,} images'} of about {side} px" if side else "a stream of images"
    )
    settings: dict[str, Any] = {}
    own_network = model is not None or any(key.partition(".")[0] in ("model", "model_kwargs") for key in given)
    few = pretrained is None and not own_network and count is not None and count <= FEW_IMAGES
    if checkpoint is not None or pretrained or few:
        shipped = few and checkpoint is None
        size = min(SMALL_SIDE, _fit(side)) if shipped else _weights_size(model, checkpoint)
        settings["image_size"] = size
        if count is not None and (batch := fit_batch(64, count)) < 64:
            settings["batch_size"] = batch
        why = (
            f"{seen}, too few to learn from alone"
            if shipped
            else f"weights to start from, made for {size} px, and {seen}"
        )
        return _without(Choice("finetune", settings, why, WEIGHTS if shipped else None), given)
    size = _fit(side)
    if size <= SMALL_SIDE and model is None and count is not None and count >= MANY_IMAGES:
        return _without(
            Choice("cifar100_pyramid", {"image_size": size}, f"{seen}, without weights to start from"), given
        )
    settings["image_size"] = size
    if size <= SMALL_SIDE:
        settings |= {"crop_scale": None, "crop_padding": size // 8}
        if model is None or model.startswith("pyramid_nano"):
            settings["model_kwargs"] = {"patch_size": 2}
    if count is not None:
        batch = given.get("batch_size", 2 ** int(math.log2(max(8, min(256, count / 12)))))
        epochs = min(200, max(60, 10 * round(STEPS * batch / count / 10))) if isinstance(batch, int) else 100
        settings |= {"batch_size": batch, "epochs": epochs, "eval_every": max(1, epochs // 20)}
        settings["warmup_epochs"] = round(epochs / 30, 1)
    return _without(Choice("small", settings, f"{seen}, without weights to start from"), given)


def fit_batch(batch_size: int, images: int) -> int:
    """A batch size, or a smaller one with about eight steps an epoch where images are few."""
    return batch_size if images >= 8 * batch_size else min(batch_size, max(4, 2 ** int(math.log2(max(1, images / 8)))))


def _without(choice: Choice, given: Mapping[str, Any]) -> Choice:
    """The choice without what the user has set; a length of the user's own has the recipe's schedule, scaled."""
    keys = {key.partition(".")[0] for key in given}
    if keys & {"epochs", "iterations"}:
        keys |= {"epochs", "eval_every", "warmup_epochs"}
    if keys & {"crop_scale", "crop_padding"}:
        keys |= {"crop_scale", "crop_padding"}
    return choice._replace(settings={key: value for key, value in choice.settings.items() if key not in keys})


def _count(train: Any) -> int | None:
    return len(train) if isinstance(train, ImageDataset) else None


def _fit(side: int | None) -> int:
    """The image size for images of this side."""
    return PHOTO_SIDE if side is None else min(PHOTO_SIDE, max(32, 8 * round(side / 8)))


def _median_side(train: Any) -> int | None:
    """Median of the shorter sides of a few images; None for a stream, which has no random access."""
    if not isinstance(train, ImageDataset) or not len(train):
        return None
    sides = []
    for i in range(0, len(train), max(1, len(train) // LOOKED_AT)):
        with contextlib.suppress(DataError):  # a damaged image: the loader deals with it
            image: Any = train.image(i)
            sides.append(min(image.shape[-2:] if hasattr(image, "shape") else image.size))
    return int(statistics.median(sides)) if sides else None


def _weights_size(model: str | None, checkpoint: str | Path | None) -> int:
    """The image size that the weights were made for; 224 if they do not say."""
    cfg = read_config(checkpoint).get("pretrained_cfg", {}) if checkpoint is not None else {}
    if not cfg and model is not None and (known := get_pretrained_cfg(model, allow_unregistered=True)):
        cfg = known.to_dict()
    return int((cfg.get("input_size") or (3, 224, 224))[-1])
