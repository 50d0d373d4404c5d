"""Measurements of trained candidates: accuracy curves, cost, latency and receptive fields."""

import os
import platform
from collections.abc import Mapping, Sequence
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tokamix.bench.timing import median_ms
from tokamix.checkpoint import load_checkpoint
from tokamix.compare.candidate import Candidate
from tokamix.compare.report import Cost, CostAtSize, Curves, Example, Report, Result, Texts, plural
from tokamix.cost import count_exp, count_macs
from tokamix.data import DatasetSplits
from tokamix.data.images.loader import create_eval_loader
from tokamix.explain.explainer import to_rgb
from tokamix.explain.receptive_field import receptive_field
from tokamix.inference import InferenceConfig
from tokamix.mixers import list_mixers
from tokamix.models import create_model
from tokamix.recipes import Recipe, load_recipe
from tokamix.train import RunResult

FACTORS = (1, 2, 4, 8)  # image sizes of the cost curves, as multiples of the training size
MAX_SIDE = 256  # largest image whose receptive fields are computed: each direction is a backward pass
MIN_TOKENS = 4  # a side of the feature map whose receptive field is shown
EXACT_CHANNELS = 64  # maps with more channels get an estimate from PROBES random directions
PROBES = 16
LATENCY_SECONDS = 0.3  # repetitions of a forward pass that is timed
DOCS = {
    "Training on your own images": "guides/train.md",
    "Recipes": "recipes.md",
    "Swapping the mixer of an existing model": "guides/swap.md",
    "Adding your own mixer": "guides/add-a-mixer.md",
    "Benchmarks": "benchmarks.md",
}


class _Setting(NamedTuple):
    """The conditions shared by all measurements."""

    recipe: Recipe
    config: InferenceConfig
    image: Tensor  # (C, H, W), normalised
    level: int | None  # index of the feature map whose receptive field is shown; None: not shown
    device: str


def measure(
    candidates: Sequence[Candidate],
    runs: Mapping[str, Sequence[RunResult]],
    data: DatasetSplits,
    output: Path,
    texts: Texts,
    seeds: Sequence[int],
    device: str,
    example_class: str | None,
) -> Report:
    """Measure every candidate, and the untrained cost of every registered mixer in the same body."""
    folder = runs[candidates[0].key][0].folder
    recipe, config = load_recipe(folder / "recipe.yaml"), InferenceConfig.load(folder)
    image, label = _load_example(data, config, example_class)
    model = _create_untrained(recipe, config)
    level, stride = _choose_level(model, config.image_size)
    setting = _Setting(recipe, config, image.to(device), level, device)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        results = [_measure(candidate, runs[candidate.key], setting) for candidate in candidates]
        body = str(recipe.model).removesuffix(f"_{candidates[0].mixer}")
        costs = [_untrained_cost(mixer, f"{body}_{mixer}", setting) for mixer in list_mixers()]
    finally:
        torch.set_num_threads(threads)
    example = None
    if level is not None:
        start = config.image_size // stride // 2 * stride
        example = Example(to_rgb(image, config), label, (start, start, stride), _choose_probes(model, level))
    return Report(
        texts=texts,
        results=results,
        costs=costs,
        example=example,
        train_images=len(data.train),
        test_images=len(data.val),
        epochs=len(results[0].curves[0].accuracy),
        seeds=seeds,
        body=_describe(model, config.image_size),
        recipe=f"{recipe.name}: batch {recipe.batch_size}, learning rate {recipe.lr:g}",
        device="CPU" if device == "cpu" else "GPU",
        machine=f"{_describe_machine(device)}, torch {version('torch')}",
        date=f"{date.today():%d %B %Y}".lstrip("0"),
        docs=_find_docs(output),
    )


def _create_untrained(recipe: Recipe, config: InferenceConfig, name: str | None = None) -> Any:
    """The model as at the start of training with the recipe's seed, in evaluation mode."""
    torch.manual_seed(recipe.seed)
    arguments = {"in_chans": config.in_chans, "img_size": config.image_size, **recipe.model_kwargs}
    return create_model(name or str(recipe.model), num_classes=config.num_classes, **arguments).eval()


def _choose_level(model: Any, size: int) -> tuple[int | None, int]:
    """The last feature map with enough tokens for a picture of its receptive field, and its stride."""
    strides = [info["reduction"] for info in model.feature_info]
    levels = [i for i, stride in enumerate(strides) if size // stride >= MIN_TOKENS]
    if size > MAX_SIDE or not levels:
        return None, strides[0]
    return levels[-1], strides[levels[-1]]


def _load_example(data: DatasetSplits, config: InferenceConfig, class_name: str | None) -> tuple[Tensor, str]:
    """The first validation image, or the first of a class among the first 256: normalised, and its class name."""
    loader = create_eval_loader(data.val, config, batch_size=min(256, len(data.val)) if class_name else 1)
    images, labels = next(loader.epoch(0))
    index = labels.tolist().index(data.classes.index(class_name)) if class_name else 0
    return images[index].float().cpu(), data.classes[int(labels[index])]


def _measure(candidate: Candidate, runs: Sequence[RunResult], setting: _Setting) -> Result:
    folder, config = runs[0].folder, setting.config
    model = _create_untrained(load_recipe(folder / "recipe.yaml"), config).to(setting.device)
    before = _receptive_field(model, setting)
    load_checkpoint(model, folder / "last.safetensors")
    model.eval()
    return Result(
        title=candidate.title,
        description=candidate.description,
        link=candidate.link,
        curves=tuple(map(_curves, runs)),
        parameters=_count_parameters(model),
        costs=tuple(_cost_at(model, config.image_size * factor) for factor in FACTORS),
        latency_ms=_latency(model, setting),
        seconds=sum(row["seconds"] for run in runs for row in run.epochs) / len(runs),
        before=before,
        after=_receptive_field(model, setting),
    )


def _curves(run: RunResult) -> Curves:
    """Loss, and accuracy of the weights, averaged if EMA is on, after each epoch."""
    accuracies = (row["ema_top1"] if "ema_top1" in row else row["top1"] for row in run.epochs)
    return Curves(tuple(row["train_loss"] for row in run.epochs), tuple(accuracies))


def _receptive_field(model: nn.Module, setting: _Setting) -> Tensor | None:
    if setting.level is None:
        return None
    probes = _choose_probes(model, setting.level)
    return receptive_field(model, setting.image, level=setting.level, probes=probes).cpu()


def _choose_probes(model: Any, level: int) -> int | None:
    """None for an exact receptive field, or the number of random directions to estimate it from."""
    return None if model.feature_info[level]["num_chs"] <= EXACT_CHANNELS else PROBES


def _untrained_cost(mixer: str, name: str, setting: _Setting) -> Cost:
    model = _create_untrained(setting.recipe, setting.config, name).to(setting.device)
    cost = _cost_at(model, setting.config.image_size)
    return Cost(mixer, _count_parameters(model), cost.macs, cost.exps, _latency(model, setting))


def _count_parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


@torch.inference_mode()
def _latency(model: nn.Module, setting: _Setting) -> float:
    return median_ms(partial(model, setting.image[None]), setting.device, seconds=LATENCY_SECONDS)


def _cost_at(model: nn.Module, size: int) -> CostAtSize:
    info: Any = model.feature_info
    return CostAtSize((size // info[0]["reduction"]) ** 2, count_macs(model, size), count_exp(model, size).total())


def _describe(model: Any, size: int) -> str:
    """Blocks and tokens of a body, such as "2 blocks, 8x8 tokens"."""
    blocks = len(model.blocks) if hasattr(model, "blocks") else sum(len(stage.blocks) for stage in model.stages)
    side = size // model.feature_info[0]["reduction"]
    stages = f" in {len(model.stages)} stages" if hasattr(model, "stages") else ""
    return f"{plural(blocks, 'block')}{stages}, {side}×{side} tokens"  # noqa: RUF001


def _describe_machine(device: str) -> str:
    if device != "cpu":
        return torch.cuda.get_device_name()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.processor() or platform.machine()
    return f"{name}, one core for each training"


def _find_docs(output: Path) -> list[tuple[str, str]]:
    """Titles and relative paths of documentation pages, if the package runs from its repository."""
    folder = Path(__file__).parents[2] / "docs"
    pages = ((title, folder / name) for title, name in DOCS.items())
    return [(title, os.path.relpath(path, output)) for title, path in pages if path.is_file()]
