"""Match the class names of a model with those of a data set."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tokamix.inference import InferenceConfig, imagenet_classes

LISTED = 12  # class names that an error shows of each list


def match_classes(config: InferenceConfig, classes: Sequence[str], data: str) -> tuple[list[int] | None, str]:
    """Find the model's class of each class of a data set by name.

    Args:
        config: has the class names of the model.
        classes: class names of the data set.
        data: name of the data set, for messages.

    Returns:
        the model's index of each class, or None if both have the same classes in the same order; and a sentence about
        the difference, or "".
    """
    names, classes = config.class_names, tuple(classes)
    if not names:
        raise ValueError(
            "the model has no classes, it returns features: measure them with `tokamix probe`, or train a classifier"
            " from it with `tokamix train --checkpoint`"
        )
    if not config.has_class_names:
        if len(names) != len(classes):
            raise ValueError(f"the model has {len(names)} classes, but {data} has {len(classes)}")
        same = names == classes
        return (
            None,
            "" if same else "the class names of the model are unknown: its outputs are taken in the data's order",
        )
    translation = dict(imagenet_classes(len(names)))  # folders of ImageNet are named by WordNet ids
    if set(classes) <= set(translation) and names == tuple(translation.values()):
        classes = tuple(translation[name] for name in classes)
    if names == classes:
        return None, ""
    index = {name: i for i, name in enumerate(names)}
    if not set(classes) <= set(index):
        raise ValueError(
            f"the classes of {data} are not those of the model. The model has {_listing(names)}; {data} has"
            f" {_listing(classes)}; rename or remove classes of the data"
        )
    if len(classes) == len(names):
        note = "the model has the same classes in a different order: its outputs were permuted to the data's order"
    else:
        note = f"the data has {len(classes)} of the model's {len(names)} classes: predictions are restricted to them"
    return [index[name] for name in classes], note


class SelectClasses(nn.Module):
    """Restrict a model to some of its classes, in a given order.

    Args:
        model: a classifier, segmenter or detector.
        index: the model's class for each class of the result.
    """

    def __init__(self, model: nn.Module, index: Sequence[int]) -> None:
        super().__init__()
        self.model = model
        self.index: Tensor
        self.register_buffer("index", torch.tensor(index), persistent=False)
        self.has_masks = getattr(model, "has_masks", False)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and select classes of its logits (B, K, ...) or detections."""
        output = self.model(*args, **kwargs)
        return output[:, self.index] if isinstance(output, Tensor) else [self._select(entry) for entry in output]

    def _select(self, detections: dict[str, Tensor]) -> dict[str, Tensor]:
        matches = detections["labels"][:, None] == self.index  # (n, classes)
        kept = matches.any(1)
        selected = {key: value[kept] for key, value in detections.items()}
        return selected | {"labels": matches[kept].int().argmax(1)}


def _listing(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:LISTED]))
    rest = f", ... ({len(names) - LISTED} more)" if len(names) > LISTED else ""
    return f"{len(names)} classes ({shown}{rest})"
