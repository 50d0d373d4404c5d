"""A training run from start to end."""

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from tokamix.data import DatasetSplits, Loader, create_dataset
from tokamix.data.loading import WorkerLoader
from tokamix.inference import load_model, read_precision
from tokamix.recipes import Recipe, load_overrides, load_recipe
from tokamix.train.loop.engine import Engine, Options
from tokamix.train.loop.state import read_state
from tokamix.train.output.card import Facts
from tokamix.train.output.progress import Display
from tokamix.train.output.run_folder import Row, RunFolder, changed_settings, lock_run_folder
from tokamix.train.output.trackers import Trackers
from tokamix.train.setup.accelerator import (
    Accelerator,
    any_process,
    broadcast_from_main,
    create_accelerator,
    distribute,
    numerics,
    release,
    synchronise_batch_norm,
)
from tokamix.train.setup.choose import choose_recipe
from tokamix.train.setup.threads import (
    batch_macs,
    choose_threads,
    is_set_by_user,
    macs_per_second,
    set_threads,
    usable_cores,
)
from tokamix.train.tasks.task import LoaderOptions, Task, create_task


@dataclass
class RunResult:
    """The result of a run.

    Attributes:
        folder: the run's folder.
        best: the evaluation that the recipe selects, by default the best one: metrics, epoch (counted from 1), and
            whether the weights are averaged.
        epochs: one row per epoch; metrics of the validation data only in epochs with an evaluation.
        metric: the metric that selects the best weights: "top1", "miou", "mask_ap", "box_ap" or "knn".
        last: the last evaluation, of the averaged weights if EMA is on, with the keys of `best`. The best epoch is
            chosen on the validation data, which makes its metrics optimistic; these are not.
        select: which evaluation `best` is: "best" or "last", as the recipe says.
    """

    folder: Path
    best: Row = field(default_factory=dict)
    epochs: list[Row] = field(default_factory=list)
    metric: str = "top1"
    last: Row = field(default_factory=dict)
    select: str = "best"

    @property
    def score(self) -> float:
        """The metric of the selected weights, in percent."""
        return self.best[self.metric]

    @property
    def top1(self) -> float:
        """The accuracy of the selected weights of a classifier, in percent."""
        return self.best["top1"]

    def load(self) -> Any:
        """Load the model with the selected weights."""
        return load_model(self.folder)[0]


def train(
    model: str | nn.Module | None,
    data: str | DatasetSplits,
    recipe: str | Recipe | None = None,
    output: str | Path | None = None,
    *,
    task: Literal["classify", "segment", "detect", "dino", "vqa"]
    | Callable[[Any, str | DatasetSplits], Task]
    | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    checkpoint: str | Path | None = None,
    pretrained: bool | None = None,
    resume: bool | str | Path = True,
    device: str | None = None,
    workers: int = 0,
    corrupt: Literal["raise", "skip"] = "raise",
    save_every: int | None = None,
    log_every: int = 50,
    skip_nan: int = 0,
    fsdp: bool = False,
    deterministic: bool = False,
    wandb: str | None = None,
    quiet: bool = False,
) -> RunResult:
    """Train a model and evaluate it after each epoch. If a run is killed, the same call resumes it.

    Args:
        model: a model name of tokamix or timm, a module, or None for the recipe's or the checkpoint's own; the name of
            the backbone in segmentation and detection.
        data: a source as in `tokamix.create_dataset`, or the result of it.
        recipe: a name of `tokamix.list_recipes()`, a YAML file, or a recipe; default: chosen by the number and size of
            the images and the weights to start from, and printed; for other tasks `small_segment`, `small_detect`,
            `small_dino` or `small_vqa`.
        output: the run's folder; default: the unfinished run with the same settings under runs/, else the next free
            one of runs/train, runs/train-2, ...
        task: default: the recipe's; or your own, a class or function that takes the recipe and the data, see `Task`.
        overrides: values that replace the recipe's, such as "lr=1e-3".
        checkpoint: weights to start from: a file, a run's folder, or `hf-hub:user/name`. Their classes, channels and
            image size may differ.
        pretrained: start from the model's pretrained weights (True) or not (False); default: not, unless neither model,
            recipe nor checkpoint is given and the images are few.
        resume: True resumes an unfinished run in the folder, False starts over; or the folder of the run to resume,
            whose recipe is the default then.
        device: "cuda" or "cpu"; default: a GPU if there is one.
        workers: processes that decode images, for data that does not fit on the device.
        corrupt: for images that cannot be decoded: stop and name the first ("raise"), or skip them ("skip").
        save_every: steps between saved states; default: by the clock, see `Options`.
        log_every: steps between readings of the metrics.
        skip_nan: number of steps with a non-finite loss that are skipped before the run stops.
        fsdp: shard weights and optimizer over the processes (FSDP2) instead of replicating them (DDP).
        deterministic: slower GPU kernels with a fixed order of summation, so that the same seed gives the same bits.
        wandb: a project of Weights & Biases to log to as well.
        quiet: print nothing.
    """
    _check_counts(save_every=save_every, log_every=log_every, workers=workers, skip_nan=skip_nan)
    if not isinstance(resume, bool):
        output, recipe = _resumed_run(Path(resume), output, recipe)
    if checkpoint is not None and not str(checkpoint).startswith("hf-hub:") and not Path(checkpoint).exists():
        raise FileNotFoundError(f"there is no checkpoint {checkpoint}: no run folder and no file")
    chosen = None
    if recipe is None and task in (None, "classify"):
        name, given = model if isinstance(model, str) else None, load_overrides(overrides)
        seed = given.get("seed", 0)
        data = create_dataset(data, seed=seed if isinstance(seed, int) else 0) if isinstance(data, str) else data
        data.check_training_images()
        own = isinstance(model, nn.Module)  # with the weights that it has
        chosen = choose_recipe(data, name, checkpoint, False if own else pretrained, given)
        recipe, overrides = chosen.recipe, {**chosen.settings, **given}
        if chosen.model is not None:
            model, pretrained = chosen.model, True
    recipe = _resolve_recipe(model, recipe, task if isinstance(task, str) else None, overrides)
    has_weights = checkpoint or pretrained or isinstance(model, nn.Module) or not isinstance(resume, bool)
    own_weights = callable(task) or recipe.task == "vqa"  # the task loads them itself
    if recipe.finetune and not (has_weights or own_weights):
        raise ValueError(
            f"the recipe {recipe.name} starts from trained weights; give them with --checkpoint, or use --pretrained"
        )
    if fsdp and recipe.task != "classify":
        raise ValueError(f"--fsdp supports classifiers only, not task {recipe.task}; leave it out")
    precision = load_overrides(overrides).get("precision")
    if precision is None and not isinstance(resume, bool):
        precision = _cpu_precision(resume)
    accelerator = create_accelerator(recipe, device, precision=precision)
    main = accelerator.is_main_process
    job = task(recipe, data) if callable(task) else create_task(recipe, data)
    network = _create_model(job, model, checkpoint, bool(pretrained))
    config = job.config() | {"precision": accelerator.mixed_precision.replace("no", "fp32")}
    settings = {**recipe.to_dict(), "model": job.title(), "data": job.splits.name}
    if isinstance(model, nn.Module):
        settings |= {key: config[key] for key in ("model_args", "construction") if key in config}
    with ExitStack() as stack:
        folder = RunFolder(_lock(stack, lock_run_folder(output, settings, new=not resume), main))
        state = _load_state(folder, settings, accelerator) if resume else None
        stack.enter_context(numerics(accelerator.device, deterministic, fixed_size=recipe.task in ("classify", "dino")))
        rank, world_size = accelerator.process_index, accelerator.num_processes
        micro_batch = recipe.micro_batch(world_size)
        loaders = job.create_loaders(LoaderOptions(micro_batch, rank, world_size, accelerator.device, workers, corrupt))
        threads, macs = None, float("inf")
        if accelerator.device.type == "cpu" and not is_set_by_user():
            size = getattr(recipe, "image_size", None)
            macs = batch_macs(network, size, micro_batch) if size else macs  # dense tasks have large images
            threads = _choose_threads(macs, loaders[0], state)
        stack.enter_context(set_threads(threads))
        body: Any = getattr(getattr(network, "backbone", None), "body", network)
        facts = Facts(
            model=job.title(),
            data=job.splits.title,
            parameters=sum(parameter.numel() for parameter in network.parameters() if parameter.requires_grad),
            images=(loaders[0].dataset_size, loaders[1].dataset_size),
            metrics=job.metric_names,
            paper=getattr(body, "pretrained_cfg", None) or {},
            start=_name_of_weights(model if isinstance(model, str) else recipe.model, checkpoint, pretrained),
        )
        job.prepare(network, accelerator)
        batch_norm = synchronise_batch_norm(network, recipe)
        wrapped, core, optimizer = distribute(accelerator, network, recipe, fsdp)
        stack.callback(release, core)
        if recipe.compile:
            graphs = accelerator.device.type == "cuda" and world_size == 1 and recipe.accumulate == 1
            job.compile(core, graphs)
        options = Options(save_every, log_every, skip_nan)
        engine = Engine(job, wrapped, core, optimizer, loaders, recipe, folder, accelerator, options, settings)
        if accelerator.mixed_precision == "no":  # in fp32, as it is measured
            engine.duration.expect(macs * recipe.accumulate, macs_per_second)
        if state is not None:
            engine.restore(*state)
        trained = not engine.finished
        if main:
            if state is None:
                folder.clear(start_over=not resume)
            if not engine.finished:
                folder.begin(recipe.to_yaml(), config, settings, accelerator, engine.steps)
            folder.truncate(engine.epoch, engine.update)
        trackers = None
        if main and not engine.finished:
            trackers = stack.enter_context(closing(Trackers(folder.path, engine.update, settings, wandb)))
        title = f"{job.title()} on {job.splits.title}"
        names, epochs = job.metric_names, recipe.num_epochs
        display = Display(title, folder.path, epochs, engine.steps, engine.update, names, quiet or not main)
        unused = _describe_unused_images(loaders[0].dataset_size, len(loaders[0]), recipe, world_size)
        cpu = f"CPU threads: {threads} of {usable_cores()} cores; OMP_NUM_THREADS changes it" if threads else None
        why = None
        if chosen is not None:
            values = ", ".join(f"{key} {getattr(recipe, key)}" for key in ("image_size", "batch_size", "epochs"))
            start = f" from the weights {chosen.model}" if chosen.model else ""
            why = (
                f"recipe {chosen.recipe} ({values}){start}, because there are {chosen.reason}; --recipe chooses another"
            )
            why += ", --no-pretrained starts from scratch" if chosen.model else ""
        for line in filter(None, (why, batch_norm, unused, cpu)):
            display.say(line)
        engine.fit(
            display,
            trackers,
            lambda best: folder.publish(job.config(), recipe, best, facts),
        )
        engine.write_report()
    accelerator.wait_for_everyone()
    folder.epochs = broadcast_from_main(folder.epochs)  # rank 0 alone has them; the result is the same in all processes
    if trained:  # last, without Accelerate's autocast around the model
        engine.check_saved()
    best = engine.best or {}
    last = folder.last_evaluation(best) if best else {}
    return RunResult(folder.path, best, folder.epochs, job.metric, last, recipe.select)


def _resumed_run(run: Path, output: str | Path | None, recipe: str | Recipe | None) -> tuple[Path, str | Recipe]:
    """Folder and recipe of the run to resume."""
    if not RunFolder(run).state.is_file():
        raise ValueError(f"{run} has no saved state to resume; name the folder of a run that was stopped")
    if output is not None and Path(output) != run:
        raise ValueError(f"--output {output} and --resume {run} name two folders; leave --output out")
    return run, recipe or str(run / "recipe.yaml")


def _cpu_precision(run: str | Path) -> str | None:
    """The precision of a run on a CPU if it was asked for: by itself a CPU trains in fp32, whatever the recipe says."""
    environment = json.loads((Path(run) / "environment.json").read_text())
    return "bf16" if environment["device"] == "cpu" and read_precision(run) == "bf16" else None


def _name_of_weights(model: str | None, checkpoint: str | Path | None, pretrained: bool | None) -> str | None:
    """The name of the weights that training starts from, without folders of the machine; None for none."""
    if checkpoint is None:
        return model if pretrained else None
    return str(checkpoint) if str(checkpoint).startswith("hf-hub:") else Path(checkpoint).name


def _check_counts(**values: int | None) -> None:
    """Refuse numbers of steps or workers that are too small."""
    for name, value in values.items():
        least = 1 if name.endswith("every") else 0
        if value is not None and value < least:
            option = name.replace("_", "-")
            raise ValueError(f"{name} is {value}, but must be at least {least}; change --{option}, or leave it out")


def _create_model(job: Task, model: str | nn.Module | None, checkpoint: str | Path | None, pretrained: bool) -> Any:
    """Create the model; timm's error about missing weights becomes a sentence."""
    try:
        return job.create_model(model, checkpoint, pretrained)
    except RuntimeError as error:
        if "No pretrained weights exist" not in str(error):
            raise
        name = str(error).split(" for ", 1)[-1].split()[0].rstrip(".")
        raise ValueError(
            f"there are no pretrained weights for {name}; leave out --pretrained, or give weights with --checkpoint"
        ) from error


def _describe_unused_images(size: int, batches: int, recipe: Recipe, world_size: int) -> str | None:
    """A line about the images of each epoch that do not fill a batch, if these are over 1 % of the data."""
    parts = 1 if recipe.iterations else recipe.accumulate  # an evaluation interval of iterations cuts no batches off
    unused = size - batches // parts * parts * recipe.micro_batch(world_size) * world_size
    if unused <= size / 100:
        return None
    multiple = world_size * recipe.accumulate
    near = range(-(-recipe.batch_size // 2 // multiple) * multiple, recipe.batch_size + 1, multiple)
    better = min((batch for batch in near if batch), key=lambda batch: (size % batch, -batch))
    cure = f"; --batch-size {better} leaves out {size % better or 'none'}" if size % better < unused else ""
    return (
        f"each epoch leaves out {unused} of {size:,} images, different ones each time, which do not fill a batch of"
        f" {recipe.batch_size}{cure}"
    )


def _choose_threads(macs: float, loader: Loader, state: Any) -> int:
    """The CPU threads of the run; a resumed one keeps its number, because the last bits of its weights depend on it."""
    if state is not None and "threads" in state[1]:
        return min(state[1]["threads"], usable_cores())
    return choose_threads(macs, usable_cores(), loader.loader.num_workers if isinstance(loader, WorkerLoader) else 0)


def _lock(stack: ExitStack, lock: AbstractContextManager[Path], main: bool) -> Path:
    """Enter the lock in rank 0; the path of the folder, or the error, in every process."""
    path, problem = None, None
    if main:
        try:
            path = stack.enter_context(lock)
        except (ValueError, OSError) as error:
            problem = error
    path, problem = broadcast_from_main((path, problem))
    if path is None:
        raise problem or AssertionError
    return path


def _resolve_recipe(
    model: str | nn.Module | None,
    recipe: str | Recipe | None,
    task: str | None,
    overrides: Sequence[str] | Mapping[str, Any],
) -> Recipe:
    """Load the recipe by its name, or check the given one."""
    if isinstance(recipe, Recipe):
        if overrides:
            raise ValueError("overrides need the name of a recipe; for a recipe itself use recipe.replace(...)")
        if task is not None and task != recipe.task:
            raise ValueError(f"the recipe {recipe.name} is for task {recipe.task}, not {task}; name another recipe")
    else:
        name = recipe or ("small" if task in (None, "classify") else f"small_{task}")
        recipe = load_recipe(name, overrides, model=model if isinstance(model, str) else None, task=task)
    # so that the run's recipe.yaml names the model and can be used as a recipe
    return recipe.replace(model=model) if isinstance(model, str) else recipe


def _load_state(folder: RunFolder, settings: Row, accelerator: Accelerator) -> Any:
    """The saved state of the folder's run, if there is one; its settings must be the same."""
    exists = folder.state.is_file()
    seen, missing = (any_process(flag, accelerator.device) for flag in (exists, not exists))
    if seen and missing:
        raise ValueError(f"not every machine sees the state in {folder.path}; put it on a shared disk")
    if not exists:
        return None
    groups, rest = read_state(folder.state)
    if changed := changed_settings(rest["settings"], settings):
        raise ValueError(
            f"{folder.path} holds a run with different settings: {changed}; use the same ones, another --output, or"
            " start over with --no-resume"
        )
    return groups, rest
