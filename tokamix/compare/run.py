"""`compare`: train the same body with several token mixers, measure them, and write a page."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tokamix._hints import suggest
from tokamix.compare.candidate import Candidate
from tokamix.compare.measure import measure
from tokamix.compare.report import Report, Texts, render
from tokamix.data import DatasetSplits, ImageDataset, create_dataset
from tokamix.files import write_text
from tokamix.models.bodies import BODIES
from tokamix.recipes import Recipe, load_overrides, load_recipe
from tokamix.train import RunResult, train
from tokamix.train.setup.choose import fit_batch

DEFAULT_BODY = "pyramid_tiny"
DEFAULT_MIXERS = ("softmax", "sima", "super_token")
Progress = Callable[[str], object]
_log = logging.getLogger("tokamix")


class Comparison(NamedTuple):
    """The result of `compare`: all numbers, the page's path and the runs of each mixer."""

    report: Report
    page: Path
    runs: dict[str, list[RunResult]]


class Job(NamedTuple):
    """One training."""

    candidate: Candidate
    recipe: Recipe
    data: str | DatasetSplits
    output: Path
    options: dict[str, Any]


def compare(
    data: str | DatasetSplits,
    mixers: Sequence[str] = DEFAULT_MIXERS,
    body: str | None = None,
    recipe: str | Path = "small",
    output: str | Path = "runs/compare",
    *,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    seeds: int = 1,
    resume: bool = True,
    device: str | None = None,
    workers: int = 0,
    processes: int | None = None,
    progress: Progress = print,
) -> Comparison:
    """Train one body with each mixer on the same data with the same recipe, and write a page that compares them.

    If the comparison is stopped, the same call resumes it; finished runs are not trained again.

    On a CPU several trainings run side by side in processes of their own, so a script that calls this needs
    `if __name__ == "__main__":`. On a GPU they run one after the other.

    Args:
        data: a classification data set, as for `tokamix.train`.
        mixers: at least two names of `tokamix.mixers.list_mixers()`.
        body: "columnar_tiny", "columnar_small", "pyramid_tiny" or "pyramid_small"; default: that of the recipe's model,
            or "pyramid_tiny".
        recipe: name of a classification recipe, or a YAML file.
        output: folder for the runs and the page, report.html.
        overrides: values that replace the recipe's, such as "epochs=30".
        seeds: trainings of each mixer, with seeds 0, 1, ...
        resume: continue the comparison in `output`; False starts over.
        device: "cuda" or "cpu"; default: a GPU if there is one.
        workers: processes that decode images, for each training.
        processes: trainings that run at the same time on a CPU; default: the number of torch threads.
        progress: called with a line of text for each finished training.
    """
    names = list(mixers)
    candidates = [Candidate.from_registry(name) for name in names]
    if len(set(names)) < max(2, len(names)):
        raise ValueError(f"a comparison needs at least 2 different mixers, got {', '.join(names) or 'none'}")
    if seeds < 1:
        raise ValueError(f"a comparison needs at least 1 seed, got {seeds}")
    overrides = load_overrides(overrides)
    base = load_recipe(recipe, overrides)
    if base.task != "classify":
        raise ValueError(f"compare trains classifiers, and the recipe {base.name} is for task {base.task}")
    if recipe == "small" and "batch_size" not in overrides:  # it is for any number of images
        base = _fit_batch(base, data)
    own_kwargs = any(key.startswith("model_kwargs") for key in overrides)
    body = _choose_body(body, base, own_kwargs)
    if base.model_kwargs.get("mixer_kwargs"):
        raise ValueError(
            f"the recipe {base.name} sets mixer_kwargs {base.model_kwargs['mixer_kwargs']}, but mixers have different"
            " arguments; add --set model_kwargs.mixer_kwargs={}"
        )
    every_epoch = {} if base.iterations else {"eval_every": None}  # the page shows curves over all epochs
    name = data if isinstance(data, str) else data.name
    name = Path(name).name if Path(name).exists() else name  # a folder's full path would fill the heading
    return run_comparison(
        candidates,
        lambda candidate, seed: base.replace(model=f"{body}_{candidate.mixer}", seed=seed, **every_epoch),
        data,
        Path(output),
        Texts.for_data(name, body, base.name),
        seeds=range(seeds),
        resume=resume,
        device=device,
        workers=workers,
        processes=processes,
        progress=progress,
    )


def run_comparison(
    candidates: Sequence[Candidate],
    recipe_for: Callable[[Candidate, int], Recipe],
    data: str | DatasetSplits,
    output: Path,
    texts: Texts,
    *,
    seeds: Sequence[int],
    resume: bool,
    device: str | None,
    workers: int = 0,
    processes: int | None = None,
    progress: Progress = print,
    example_class: str | None = None,
) -> Comparison:
    """Train and measure the candidates, and write the page; `compare` and the demo are built on this.

    Args:
        candidates: the mixers, in the order of the page.
        recipe_for: the recipe of a candidate and a seed.
        data: a classification data set.
        output: folder for the runs and the page.
        texts: the page's sentences about body and data.
        seeds: one training of each candidate per seed, all on the same split of the data.
        resume: continue the runs in `output`.
        device: "cuda" or "cpu"; None: a GPU if there is one.
        workers: processes that decode images, for each training.
        processes: trainings at the same time on a CPU; None: the number of torch threads.
        progress: called with a line for each finished training.
        example_class: class of the image whose receptive fields are shown; None: the first validation image.
    """
    dataset = create_dataset(data) if isinstance(data, str) else data  # wrong data fails here, before any training
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(f"cannot create the folder {output}: {error.strerror}; choose another --output") from None
    if not os.access(output, os.W_OK):
        raise OSError(f"the folder {output} is not writable; choose another --output")
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    options = {"resume": resume, "device": device, "workers": workers}
    jobs = [
        Job(candidate, recipe_for(candidate, seed), data, output / candidate.key / f"seed{seed}", options)
        for candidate in reversed(candidates)  # softmax, usually the fastest, last: no core waits long at the end
        for seed in seeds
    ]
    runs: dict[str, list[RunResult]] = {candidate.key: [] for candidate in candidates}
    for job, result in _train_all(jobs, 1 if device != "cpu" else processes or torch.get_num_threads()):
        runs[job.candidate.key].append(result)
        seconds = sum(row["seconds"] for row in result.epochs)
        seed = f", seed {job.recipe.seed}" if len(seeds) > 1 else ""
        progress(f"{job.candidate.title}{seed}: {result.last['top1']:.1f} % after {seconds:.0f} s")
    for results in runs.values():
        results.sort(key=lambda result: result.folder)
    report = measure(candidates, runs, dataset, output, texts, seeds, device, example_class)
    page = output / "report.html"
    write_text(page, render(report))
    return Comparison(report, page, runs)


def _fit_batch(recipe: Recipe, data: str | DatasetSplits) -> Recipe:
    """The recipe, with a smaller batch where images are few."""
    train_data = (create_dataset(data) if isinstance(data, str) else data).train
    images = len(train_data) if isinstance(train_data, ImageDataset) else recipe.batch_size * 8
    batch = fit_batch(recipe.batch_size, images)
    if batch < recipe.batch_size:
        text = "batch %d instead of %d for %d training images; --set batch_size=... sets it"
        _log.warning(text, batch, recipe.batch_size, images)
    return recipe.replace(batch_size=batch)


def _choose_body(body: str | None, recipe: Recipe, own_kwargs: bool) -> str:
    """The body's name; model_kwargs of a recipe, unlike the user's own, must be made for it."""
    own = next((name for name in BODIES if (recipe.model or "").startswith(f"{name}_")), None)
    body = body or own or DEFAULT_BODY
    if body not in BODIES:
        raise ValueError(f"there is no body {body!r}; {suggest(body, BODIES)}")
    if recipe.model_kwargs and body != own and not own_kwargs:
        raise ValueError(
            f"the recipe {recipe.name} sets model_kwargs for {recipe.model or 'another model'}, which {body} may not"
            f" accept; {f'use --body {own}' if own else 'choose another recipe'}, or --set model_kwargs={{}}"
        )
    return body


def _train_all(jobs: Sequence[Job], processes: int) -> Iterator[tuple[Job, RunResult]]:
    """Train all jobs, `processes` at a time, each on one core: small networks gain little from a second core."""
    processes = min(processes, len(jobs))
    if processes == 1:
        yield from ((job, _train(job)) for job in jobs)
        return
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        waiting, running = list(jobs), dict[Future[RunResult], Job]()
        while waiting or running:
            while waiting and len(running) < processes:  # submitted jobs would still run after Ctrl-C
                job = waiting.pop(0)
                running[pool.submit(_train, job)] = job
            for future in wait(running, return_when=FIRST_COMPLETED).done:
                yield running.pop(future), future.result()


def _train(job: Job) -> RunResult:
    threads = torch.get_num_threads()
    if job.options["device"] == "cpu":
        torch.set_num_threads(1)  # the same numbers, no matter how many jobs run side by side
    try:
        return train(None, job.data, job.recipe, job.output, quiet=True, **job.options)
    finally:
        torch.set_num_threads(threads)
