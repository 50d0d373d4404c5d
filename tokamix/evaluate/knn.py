"""Weighted k-nearest-neighbour classification of features, in chunks."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tokamix.embed.search import nearest

TEMPERATURE = 0.07
QUERIES = 1024  # validation features at a time


@torch.no_grad()
def measure_knn(
    train: Tensor,
    train_labels: Tensor,
    val: Tensor,
    val_labels: Tensor,
    k: Sequence[int] = (10, 20, 100, 200),
    temperature: float = TEMPERATURE,
    num_classes: int | None = None,
) -> dict[int, float]:
    """Accuracy in percent of the vote of the k nearest training images, for each k.

    Neighbours are found by cosine similarity and vote with the weight exp(similarity / temperature), as in DINO and in
    Wu et al., arXiv 1805.01978. Memory is bounded by the chunks, not by the number of images.

    Args:
        train: features (N, D).
        train_labels: (N,).
        val: features (M, D) on the same device.
        val_labels: (M,).
        k: numbers of neighbours.
        temperature: of the votes.
        num_classes: default: those of the training labels.
    """
    classes = check_features(train, train_labels, val, val_labels, num_classes)
    if not k or min(k) < 1:
        raise ValueError(f"k is {list(k)}, but must be one or more numbers of neighbours from 1 on")
    if max(k) > len(train):
        raise ValueError(f"{max(k)} neighbours cannot be found among {len(train)} training images; use a smaller k")
    train, val = F.normalize(train.float(), dim=1), F.normalize(val.float(), dim=1)
    correct = dict.fromkeys(k, 0)
    for queries, answers in zip(val.split(QUERIES), val_labels.split(QUERIES), strict=True):
        similarity, index = nearest(queries, train, max(k))
        weights, votes = (similarity / temperature).exp(), train_labels[index]
        for count in k:
            scores = weights.new_zeros(len(queries), classes)
            scores.scatter_add_(1, votes[:, :count], weights[:, :count])
            correct[count] += int((scores.argmax(1) == answers).sum())
    return {count: 100 * right / len(val) for count, right in correct.items()}


def check_features(
    train: Tensor, train_labels: Tensor, val: Tensor, val_labels: Tensor, num_classes: int | None = None
) -> int:
    """Refuse features and labels that do not match; returns the number of classes."""
    for features, labels, split in ((train, train_labels, "training"), (val, val_labels, "validation")):
        if len(features) != len(labels):
            raise ValueError(f"there are {len(features)} {split} features, but {len(labels)} labels; each needs one")
        if not len(features):
            raise ValueError(f"there are no {split} features")
        if not features.isfinite().all():
            raise ValueError(
                f"some {split} features are not finite; compute them in precision fp32, or repair the model"
            )
        if int(labels.min()) < 0:
            raise ValueError(f"a {split} image has label {int(labels.min())}, but labels count from 0")
    if train.shape[1] != val.shape[1]:
        raise ValueError(
            f"the training features have {train.shape[1]} dimensions, but those for validation {val.shape[1]}; compute"
            " both with one model"
        )
    classes = num_classes or int(train_labels.max()) + 1
    if int(val_labels.max()) >= classes:
        raise ValueError(
            f"a validation image has label {int(val_labels.max())}, but those of the training images end at"
            f" {classes - 1}; both must be of one data set"
        )
    return classes
