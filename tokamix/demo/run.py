"""The demo: softmax attention and five other ways to mix tokens, trained in one small body, side by side."""

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from tokamix.bench.timing import median_ms
from tokamix.checkpoint import load_checkpoint
from tokamix.cost import count_exp, count_macs
from tokamix.data import DatasetSplits, create_dataset
from tokamix.data.images.loader import create_eval_loader
from tokamix.demo.report import Cost, Course, Growth, Report, Result, render
from tokamix.explain.receptive_field import receptive_field
from tokamix.files import write_text
from tokamix.inference import InferenceConfig
from tokamix.mixers import list_mixers
from tokamix.recipes import Recipe, load_recipe
from tokamix.train import RunResult, train
from tokamix.train.setup.model import build_model

BODY = "columnar_tiny"
SHOWN = "2"  # the digit whose picture is looked into
DOCS = {
    "Training on your own images": "guides/train.md",
    "Recipes": "recipes.md",
    "Swapping a mixer into a model you have": "guides/swap.md",
    "Adding a mixer of your own": "guides/add-a-mixer.md",
    "Benchmarks": "benchmarks.md",
}


@dataclass(frozen=True)
class Entrant:
    """A mixer as the demo presents it."""

    key: str
    title: str
    how: str
    link: str
    mixer: str
    context_broadcast: str | None = None

    def recipe(self, seed: int, quick: bool) -> Recipe:
        """How its network is trained: all the same but for the mixer."""
        values = {"model": f"{BODY}_{self.mixer}", "model_kwargs.context_broadcast": self.context_broadcast}
        shorter = {"epochs": 1, "warmup_epochs": 0, "batch_size": 256, "model_kwargs.dim": 16} if quick else {}
        return load_recipe("digits", {**values, **shorter, "seed": seed})


ENTRANTS = (
    Entrant(
        "softmax",
        "Softmax attention",
        "every token weighs every other by softmax of their dot product",
        "https://arxiv.org/abs/1706.03762",
        "softmax",
    ),
    Entrant(
        "softmax_cb",
        "Context broadcasting",
        "softmax attention, and every token moves half way to the average token",
        "https://arxiv.org/abs/2210.08457",
        "softmax",
        "cb",
    ),
    Entrant(
        "sima",
        "SimA",
        "attention with l1-normalised queries and keys, no softmax",
        "https://arxiv.org/abs/2206.08898",
        "sima",
    ),
    Entrant(
        "active_token",
        "Active tokens",
        "every channel fetches a token it chose along its row and its column",
        "https://arxiv.org/abs/2203.06108",
        "active_token",
    ),
    Entrant(
        "super_token",
        "Super tokens",
        "tokens gather in a few super tokens that attend to each other",
        "https://arxiv.org/abs/2211.11167",
        "super_token",
    ),
    Entrant(
        "weight_mixing",
        "Weight mixing",
        "weights composed from a learned bank, no query-key product",
        "https://doi.org/10.1007/978-3-031-19803-8_4",
        "weight_mixing",
    ),
)


def run(
    output: Path,
    seeds: Sequence[int] = (0,),
    quick: bool = False,
    resume: bool = True,
    say: Callable[[str], object] = print,
) -> tuple[Report, Path]:
    """Train every mixer with every seed, each on a core of its own, measure it, and write the page.

    Args:
        output: folder for the runs and the page.
        seeds: one training each, all on the same split of the data.
        quick: a smaller network for one epoch, to see that everything works.
        resume: go on with what is in `output`, where finished runs are not trained again; otherwise start over.
        say: told what is done.

    Returns:
        What was measured, and the page's path.
    """
    jobs = [
        Job(entrant, entrant.recipe(seed, quick), output / entrant.key / f"seed{seed}", resume)
        for entrant in reversed(ENTRANTS)  # the slower ones first, so that no core is left waiting at the end
        for seed in seeds
    ]
    runs: dict[str, list[RunResult]] = {entrant.key: [] for entrant in ENTRANTS}
    for job, done in _all(jobs):
        runs[job.entrant.key].append(done)
        seconds = sum(row["seconds"] for row in done.epochs)
        say(f"{job.entrant.title}: {done.epochs[-1]['top1']:.1f} % after {seconds:.0f} s")
    data = create_dataset("digits")
    recipe = ENTRANTS[0].recipe(seeds[0], quick)
    example = _example(data, recipe)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    results = [_measure(entrant, runs[entrant.key], data, example.image) for entrant in ENTRANTS]
    costs = [_untrained(mixer, recipe, data, example.image) for mixer in list_mixers()]
    torch.set_num_threads(threads)
    body = recipe.model_kwargs
    side, patch = recipe.image_size // body["patch_size"], body["patch_size"]
    report = Report(
        results=results,
        costs=costs,
        image=example.picture,
        label=example.label,
        patch=(side // 2 * patch, side // 2 * patch, patch),
        train_images=len(data.train),
        test_images=len(data.val),
        epochs=recipe.epochs,
        seeds=seeds,
        body=f"{body['depth']} blocks, {side}×{side} tokens",  # noqa: RUF001
        recipe=f"{recipe.name}: batch {recipe.batch_size}, learning rate {recipe.lr:g}",
        machine=f"{_processor()}, one core each, torch {version('torch')}",
        date=f"{date.today():%d %B %Y}".lstrip("0"),
        docs=_docs(output),
    )
    page = output / "report.html"
    write_text(page, render(report))
    return report, page


class Job(NamedTuple):
    """A training to do."""

    entrant: Entrant
    recipe: Recipe
    output: Path
    resume: bool


def _all(jobs: Sequence[Job]) -> Iterator[tuple[Job, RunResult]]:
    """Do the jobs, as many at a time as there are cores: so small a network gains nothing from a second one."""
    workers = min(torch.get_num_threads(), len(jobs))
    if workers == 1:
        yield from ((job, _train(job)) for job in jobs)
        return
    with ProcessPoolExecutor(workers, get_context("spawn")) as pool:
        waiting, running = list(jobs), dict[Future[RunResult], Job]()
        while waiting or running:
            while waiting and len(running) < workers:  # not more: what is handed over would still run after Ctrl-C
                job = waiting.pop(0)
                running[pool.submit(_train, job)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def _train(job: Job) -> RunResult:
    torch.set_num_threads(1)
    data = create_dataset("digits")
    return train(None, data, job.recipe, job.output, resume=job.resume, device="cpu", quiet=True)


@dataclass(frozen=True)
class Example:
    """A test image: normalised (3, H, W), as a picture (H, W) in 0..1, and what it shows."""

    image: Tensor
    picture: Tensor
    label: str


def _example(data: DatasetSplits, recipe: Recipe) -> Example:
    labels = list(data.val.labels)
    config = InferenceConfig(
        task="classify",
        class_names=data.classes,
        image_size=recipe.image_size,
        crop_pct=recipe.crop_pct or 1.0,
        interpolation=recipe.interpolation,
    )
    loader = create_eval_loader(data.val, config, batch_size=len(labels))
    images, _ = next(loader.epoch(0))
    image = images[labels.index(data.classes.index(SHOWN))]
    picture = image[0] - image[0].min()
    return Example(image, picture / picture.max(), SHOWN)


def _measure(entrant: Entrant, runs: list[RunResult], data: DatasetSplits, image: Tensor) -> Result:
    runs = sorted(runs, key=lambda run: run.folder)
    recipe = load_recipe(runs[0].folder / "recipe.yaml")
    model, _ = build_model(None, recipe, len(data.classes))
    before = receptive_field(model, image)
    load_checkpoint(model.eval(), runs[0].folder / "last.safetensors")
    return Result(
        key=entrant.key,
        title=entrant.title,
        how=entrant.how,
        link=entrant.link,
        courses=tuple(
            Course(tuple(row["train_loss"] for row in run.epochs), tuple(row["top1"] for row in run.epochs))
            for run in runs
        ),
        parameters=sum(p.numel() for p in model.parameters()),
        growth=tuple(_cost(model, recipe, recipe.image_size * factor) for factor in (1, 2, 4, 8)),
        latency_ms=_latency(model, image),
        seconds=sum(row["seconds"] for run in runs for row in run.epochs) / len(runs),
        before=before,
        after=receptive_field(model, image),
    )


def _untrained(mixer: str, recipe: Recipe, data: DatasetSplits, image: Tensor) -> Cost:
    model, _ = build_model(f"{BODY}_{mixer}", recipe, len(data.classes))
    growth = _cost(model.eval(), recipe, recipe.image_size)
    parameters = sum(p.numel() for p in model.parameters())
    return Cost(mixer, parameters, growth.macs, growth.exps, _latency(model, image))


@torch.inference_mode()
def _latency(model: nn.Module, image: Tensor) -> float:
    return median_ms(partial(model, image[None]), "cpu", seconds=0.3)


def _cost(model: nn.Module, recipe: Recipe, size: int) -> Growth:
    tokens = (size // recipe.model_kwargs["patch_size"]) ** 2
    return Growth(tokens, count_macs(model, size), count_exp(model, size).total())


def _processor() -> str:
    """The CPU's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _docs(output: Path) -> list[tuple[str, str]]:
    """The documentation's pages as seen from the report, where the package runs from its repository."""
    folder = Path(__file__).parents[2] / "docs"
    found = ((title, folder / name) for title, name in DOCS.items())
    return [(title, os.path.relpath(path, output)) for title, path in found if path.is_file()]
