"""Linear evaluation: a linear classifier on frozen features, its settings chosen on held-out training images."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tokamix.data.rng import generator
from tokamix.data.splits import split_by_class
from tokamix.evaluate.knn import check_features

RATES = (0.01, 0.03, 0.1, 0.3, 1.0)
DECAYS = (0.0, 1e-4, 1e-3, 1e-2)
EPOCHS, BATCH_SIZE, MOMENTUM = 100, 1024, 0.9


@dataclass(frozen=True)
class LinearResult:
    """The result of a linear evaluation.

    Attributes:
        top1: accuracy on the validation images in percent, of the chosen settings trained on all training images.
        held_out: accuracy of the same settings on the held-out training images, by which they were chosen.
        lr: the chosen learning rate.
        weight_decay: the chosen weight decay.
    """

    top1: float
    held_out: float
    lr: float
    weight_decay: float


@torch.no_grad()
def measure_linear(
    train: Tensor,
    train_labels: Tensor,
    val: Tensor,
    val_labels: Tensor,
    *,
    rates: Sequence[float] = RATES,
    decays: Sequence[float] = DECAYS,
    epochs: int = EPOCHS,
    seed: int = 0,
) -> LinearResult:
    """Train linear classifiers on features and evaluate the best one.

    All pairs of rate and decay are trained together on four fifths of the training images; the pair that is best on
    the rest is trained again on all of them and evaluated once. SGD with momentum 0.9 and a cosine schedule, as in
    DINO; features are standardised by the mean and standard deviation of the training images, so that the same rates
    suit every model.

    Args:
        train: features (N, D).
        train_labels: (N,).
        val: features (M, D) on the same device.
        val_labels: (M,).
        rates: learning rates to try, at batch size 1024.
        decays: weight decays to try.
        epochs: of each training.
        seed: of the order of the images.
    """
    classes = check_features(train, train_labels, val, val_labels)
    if not (rates and decays and epochs >= 1):
        raise ValueError(f"linear evaluation needs rates, decays and epochs, got {rates}, {decays} and {epochs}")
    mean, std = train.float().mean(0), train.float().std(0).clamp(min=1e-6)
    train, val = ((features.float() - mean) / std for features in (train, val))
    train_labels, val_labels = train_labels.long(), val_labels.long()
    kept, held_out = split_by_class(train_labels.cpu())
    if not len(held_out):
        raise ValueError(
            f"the {len(train)} training images have one image of each class, so none can be held out to choose the"
            " settings of the linear classifier; use k-NN, or more images"
        )
    pairs = [(rate, decay) for rate in rates for decay in decays]
    weights = _fit(train[kept], train_labels[kept], classes, pairs, epochs, seed)
    accuracies = _accuracies(weights, train[held_out], train_labels[held_out])
    best = max(range(len(pairs)), key=lambda i: accuracies[i])
    final = _fit(train, train_labels, classes, [pairs[best]], epochs, seed)
    return LinearResult(_accuracies(final, val, val_labels)[0], accuracies[best], *pairs[best])


def _fit(
    features: Tensor, labels: Tensor, classes: int, pairs: Sequence[tuple[float, float]], epochs: int, seed: int
) -> Tensor:
    """Train one classifier for each pair of rate and decay, all at once; weights (S, D + 1, classes), bias last."""
    features = _with_ones(features)
    count, width = features.shape
    size = min(BATCH_SIZE, count)
    steps = math.ceil(count / size)
    rate, decay = (torch.tensor(values, device=features.device)[:, None, None] for values in zip(*pairs, strict=True))
    rate = rate * size / BATCH_SIZE
    decay = decay * (torch.arange(width, device=features.device) < width - 1)[:, None]  # none on the bias
    weights = torch.zeros(len(pairs), width, classes, device=features.device)
    momentum = torch.zeros_like(weights)
    for epoch in range(epochs):
        order = torch.randperm(count, generator=generator(seed, epoch, "linear")).to(features.device)
        for step, batch in enumerate(order.split(size)):
            x, target = features[batch], F.one_hot(labels[batch], classes).float()
            error = (x @ weights).softmax(-1) - target  # (S, B, classes): the gradient of the cross-entropy
            gradient = x.T @ error / len(batch) + decay * weights
            momentum.mul_(MOMENTUM).add_(gradient)
            progress = (epoch * steps + step) / (epochs * steps)
            weights.sub_(rate * (1 + math.cos(math.pi * progress)) / 2 * momentum)
    return weights


def _accuracies(weights: Tensor, features: Tensor, labels: Tensor) -> list[float]:
    """Accuracy in percent of each classifier."""
    correct = torch.zeros(len(weights), device=features.device)
    for x, answers in zip(_with_ones(features).split(BATCH_SIZE), labels.split(BATCH_SIZE), strict=True):
        correct += ((x @ weights).argmax(-1) == answers).sum(1)
    return (100 * correct / len(labels)).tolist()


def _with_ones(features: Tensor) -> Tensor:
    return torch.cat([features, features.new_ones(len(features), 1)], 1)
