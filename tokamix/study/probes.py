"""Further measurements of a finished run's weights: robustness, and the entropy of attention."""

from typing import Any

import torch

from tokamix.data import DatasetSplits
from tokamix.data.images.loader import create_eval_loader
from tokamix.evaluate.robustness.run import evaluate_robustness
from tokamix.explain.attention import attention_entropy
from tokamix.explain.capture import capture
from tokamix.inference import load_model
from tokamix.train import RunResult

ROBUSTNESS = ("occlusion", "fgsm")
EPSILONS = (2.0,)  # in 1/255: the one that claims are about
ENTROPY_IMAGES = 500


def measure_probes(run: RunResult, data: DatasetSplits, probes: list[str], device: str) -> dict[str, float]:
    """Metrics by name: accuracy in percent as `occlusion_45` (percent of the area) and `fgsm_2` (epsilon in 1/255).

    `attention_entropy` is the mean over layers, heads, tokens and the first 500 images, in nats.
    """
    metrics: dict[str, float] = {}
    if tests := [probe for probe in probes if probe in ROBUSTNESS]:
        options: Any = {"tests": tests, "epsilons": EPSILONS, "device": device, "batch_size": 500}
        (model,) = evaluate_robustness(run.folder, data, **options).models
        metrics |= {f"{c.test}_{c.level:g}": model.accuracy(c) for c in model.scores if c.test in ROBUSTNESS}
    if "attention_entropy" in probes:
        metrics["attention_entropy"] = _mean_entropy(run, data, device)
    return metrics


def correct_images(run: RunResult, data: DatasetSplits, device: str) -> list[bool]:
    """Whether each validation image is classified correctly by the run's weights, in fp32."""
    loaded: Any = load_model(run.folder)
    model, config = loaded[0].to(device).eval(), loaded[1]
    loader = create_eval_loader(data.val, config, batch_size=500, device=device)
    with torch.inference_mode():
        correct = [model(images).argmax(1) == labels for images, labels in loader.epoch(0)]
    return torch.cat(correct).tolist()


def _mean_entropy(run: RunResult, data: DatasetSplits, device: str) -> float:
    loaded: Any = load_model(run.folder)
    model, config = loaded[0].to(device), loaded[1]
    images, _ = next(create_eval_loader(data.val, config, batch_size=min(ENTROPY_IMAGES, len(data.val))).epoch(0))
    layers = [layer for layer in capture(model, images.float().to(device)) if layer.layer.kind == "softmax"]
    if not layers:
        raise ValueError(f"{run.folder} has no softmax attention whose entropy could be measured; leave the probe out")
    return torch.stack([attention_entropy(layer).mean() for layer in layers]).mean().item()
