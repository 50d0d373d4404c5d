"""The demo: softmax attention and five other ways to mix tokens, trained in one small body, side by side."""

import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import date
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from torch import Tensor

from tokamix.bench.timing import median_ms
from tokamix.checkpoint import load_checkpoint
from tokamix.count import count_exp, count_macs
from tokamix.data import ImageData, make_loader, open_data
from tokamix.demo.report import Course, Report, Result, render
from tokamix.explain.receptive_field import receptive_field
from tokamix.recipes import Recipe, load_recipe
from tokamix.train import train
from tokamix.train.build import build_model
from tokamix.train.files import write_text

BODY = "columnar_tiny"
SHOWN = "3"  # the digit whose picture is looked into
DOCS = {
    "Training on your own images": "training.md",
    "Recipes": "recipes.md",
    "Swapping a mixer into a model you have": "swap.md",
    "Adding a mixer of your own": "add-a-mixer.md",
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
        shorter = {"epochs": 2, "warmup_epochs": 1, "batch_size": 512} if quick else {}
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
        "Softmax + context broadcasting",
        "attention, and every token moves half way to the average token",
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
    output: Path, seeds: Sequence[int] = (0,), quick: bool = False, say: Callable[[str], object] = print
) -> tuple[Report, Path]:
    """Train every mixer with every seed, measure it, and write the page.

    What is finished in `output` already is not trained again, so that a stopped demo goes on where it stopped.

    Args:
        output: folder for the runs and the page.
        seeds: one training each, all on the same split of the data.
        quick: two epochs, to see that everything works.
        say: told what is being done.

    Returns:
        What was measured, and the page's path.
    """
    data = open_data("digits")
    example = _example(data, ENTRANTS[0].recipe(0, quick))
    results = []
    for number, entrant in enumerate(ENTRANTS, 1):
        say(f"{number} of {len(ENTRANTS)}: {entrant.title}")
        results.append(_measure(entrant, data, example.image, output / entrant.key, seeds, quick))
    recipe = ENTRANTS[0].recipe(0, quick)
    sizes = recipe.model_kwargs
    grid = recipe.image_size // sizes["patch_size"]
    report = Report(
        results=results,
        image=example.picture,
        label=example.label,
        patch=(grid // 2 * sizes["patch_size"], grid // 2 * sizes["patch_size"], sizes["patch_size"]),
        train_images=len(data.train),
        test_images=len(data.val),
        epochs=recipe.epochs,
        seeds=seeds,
        body=f"{BODY} with {sizes['depth']} blocks of {sizes['dim']} channels on {grid}x{grid} tokens",
        recipe=f"{recipe.name}, batch {recipe.batch_size}, seed {', '.join(map(str, seeds))}",
        machine=f"{_processor()}, {torch.get_num_threads()} threads, torch {version('torch')}",
        date=f"{date.today():%d %B %Y}".lstrip("0"),
        docs=_docs(output),
    )
    page = output / "report.html"
    write_text(page, render(report))
    return report, page


@dataclass(frozen=True)
class Example:
    """A test image: normalised (3, H, W), as a picture (H, W) in 0..1, and what it shows."""

    image: Tensor
    picture: Tensor
    label: str


def _example(data: ImageData, recipe: Recipe) -> Example:
    labels = list(data.val.labels)  # type: ignore[union-attr]
    loader = make_loader(data.val, recipe, train=False, batch_size=len(labels))
    images, _ = next(loader.epoch(0))
    image = images[labels.index(data.classes.index(SHOWN))]
    picture = image[0] - image[0].min()
    return Example(image, picture / picture.max(), SHOWN)


def _measure(
    entrant: Entrant, data: ImageData, image: Tensor, output: Path, seeds: Sequence[int], quick: bool
) -> Result:
    runs = [
        train(None, data, entrant.recipe(seed, quick), output / f"seed{seed}", device="cpu", quiet=True)
        for seed in seeds
    ]
    model, _ = build_model(None, entrant.recipe(seeds[0], quick), len(data.classes))
    before = receptive_field(model, image)
    load_checkpoint(model.eval(), runs[0].folder / "last.safetensors")
    size = (image.shape[1], image.shape[2])
    with torch.inference_mode():
        latency = median_ms(partial(model, image[None]), "cpu", seconds=0.5)
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
        macs=count_macs(model, size),
        exps=count_exp(model, size).total(),
        latency_ms=latency,
        seconds=sum(row["seconds"] for run in runs for row in run.epochs) / len(runs),
        before=before,
        after=receptive_field(model, image),
    )


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
