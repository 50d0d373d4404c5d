"""A training run from start to end."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import timm
import torch
from timm.data import resolve_model_data_config
from torch import nn

from tokamix.checkpoint import load_checkpoint
from tokamix.data import Dataset, ImageData, make_loader, open_data
from tokamix.evaluate.accuracy import statistics
from tokamix.recipes import Recipe, load_recipe
from tokamix.train.build import build_model, data_config, timm_config
from tokamix.train.engine import Engine, Options
from tokamix.train.parallel import Accelerator, any_process, distribute, make_accelerator, release
from tokamix.train.progress import Display
from tokamix.train.run_folder import Row, RunFolder
from tokamix.train.state import read_state
from tokamix.train.tasks import Task
from tokamix.train.tasks.classify import Classify
from tokamix.train.tasks.distill import Distill
from tokamix.train.teacher import load_teacher
from tokamix.train.trackers import Trackers


@dataclass
class RunResult:
    """What a run came to.

    Attributes:
        folder: where everything lies.
        best: the best evaluation: metrics, epoch, and whether it was the average of the weights.
        epochs: a row of numbers for each epoch.
    """

    folder: Path
    best: Row = field(default_factory=dict)
    epochs: list[Row] = field(default_factory=list)

    @property
    def top1(self) -> float:
        """The best accuracy in percent."""
        return self.best["top1"]

    def load(self) -> Any:
        """The model with its best weights."""
        return timm.create_model(f"local-dir:{self.folder}", pretrained=True)


def train(
    model: str | nn.Module | None,
    data: str | ImageData,
    recipe: str | Recipe = "small",
    output: str | Path = "runs/last",
    *,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    checkpoint: str | Path | None = None,
    pretrained: bool = False,
    resume: bool = True,
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
    """Train a model, evaluating each epoch; the same call goes on where an earlier one was stopped.

    Args:
        model: a name of tokamix or timm, a module, or None for the recipe's or the checkpoint's own.
        data: a source as `tokamix.data.open_data` takes it, or an opened one.
        recipe: a name of `tokamix.recipes.list_recipes()`, a YAML file, or a recipe.
        output: the run's folder.
        overrides: values that replace the recipe's, such as "lr=1e-3".
        checkpoint: weights to start from: a file, a run's folder, or `hf-hub:user/name`. They may have been made for
            other classes, channels and image sizes.
        pretrained: start from timm's pretrained weights.
        resume: go on with the run in `output`; otherwise it is started over.
        device: "cuda" or "cpu"; default: a GPU where there is one.
        workers: processes that decode images, for sets that do not fit on the device.
        corrupt: what to do with pictures that cannot be decoded: stop and name the first, or skip them.
        save_every: steps between saved states; default: by the clock, see `Options`.
        log_every: steps between readings of the numbers.
        skip_nan: how many steps with a loss that is not finite are left out before the run stops.
        fsdp: shard weights and optimizer over the processes (FSDP2) instead of copying them to each (DDP).
        deterministic: use slower GPU kernels that add in a fixed order, so that the same seed gives the same bits.
        wandb: a project of Weights & Biases to report to as well.
        quiet: print nothing.
    """
    if not isinstance(recipe, Recipe):
        recipe = load_recipe(recipe, overrides)
    elif overrides:
        raise ValueError("overrides go with the name of a recipe; for a recipe itself use dataclasses.replace")
    accelerator = make_accelerator(recipe.precision, device)
    main = accelerator.is_main_process
    opened = open_data(data, seed=recipe.seed) if isinstance(data, str) else data
    channels = recipe.model_kwargs.get("in_chans", 3)
    network, arguments = _model(model, recipe, len(opened.classes), channels, checkpoint, pretrained)
    recipe = _with_crop(recipe, network, opened)
    config = data_config(network, recipe, channels)
    described = timm_config(network, arguments, config, opened.classes)
    folder = RunFolder(output)
    settings = {**recipe.to_dict(), "model": described["architecture"], "data": opened.name}
    state = _saved_state(folder, settings, resume, accelerator)

    with _numerics(accelerator.device, deterministic):
        loaders = _loaders(opened, recipe, config, accelerator, {"workers": workers, "corrupt": corrupt})
        task = _task(recipe, opened, config, accelerator)
        task.prepare(network)
        wrapped, core, optimizer = distribute(accelerator, network, recipe, fsdp)
        options = Options(save_every, log_every, skip_nan)
        engine = Engine(task, wrapped, core, optimizer, loaders, recipe, folder, accelerator, options, settings)
        if state is not None:
            engine.restore(*state)
        if main:
            if state is None:
                folder.forget()
            if not engine.finished:
                folder.begin(recipe.to_yaml(), described, accelerator.num_processes, accelerator.device)
            folder.rewind(engine.epoch, engine.update)
        title = f"{described['architecture']} on {opened.name}"
        with ExitStack() as stack:
            stack.callback(release, core)
            trackers = None
            if main and not engine.finished:
                trackers = stack.enter_context(closing(Trackers(folder.path, engine.update, settings, wandb)))
            engine.fit(
                Display(title, recipe.epochs, engine.steps, engine.update, silent=quiet or not main),
                trackers,
                lambda best: folder.present(described, recipe.to_dict(), opened.name, best),
            )
    accelerator.wait_for_everyone()
    return RunResult(folder.path, engine.best or {}, folder.epochs)


@contextmanager
def _numerics(device: torch.device, deterministic: bool) -> Iterator[None]:
    """PyTorch's settings for a run, and those of before afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    benchmark = torch.backends.cudnn.benchmark
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what PyTorch asks for
        torch.use_deterministic_algorithms(True)
    elif device.type == "cuda":
        torch.set_float32_matmul_precision("high")
        torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.backends.cudnn.benchmark = benchmark


def _model(
    model: str | nn.Module | None,
    recipe: Recipe,
    num_classes: int,
    channels: int,
    checkpoint: str | Path | None,
    pretrained: bool,
) -> tuple[Any, Row]:
    """The network, and the arguments that timm makes it from."""
    if not isinstance(model, nn.Module):
        return build_model(model, recipe, num_classes, channels, checkpoint, pretrained)
    if (answers := getattr(model, "num_classes", num_classes)) != num_classes:
        raise ValueError(f"the model tells {answers} classes apart, but the data has {num_classes}")
    if checkpoint is not None:
        load_checkpoint(model, checkpoint)
    return model, {}


def _saved_state(folder: RunFolder, settings: Row, resume: bool, accelerator: Accelerator) -> Any:
    """The state to go on from, if there is one and it is of the same run."""
    exists = resume and folder.state.is_file()
    found, missed = (any_process(flag, accelerator.device) for flag in (exists, not exists))
    if found and missed:
        raise ValueError(f"not every machine sees the state in {folder.path}; put it on a disk that they share")
    if not exists:
        return None
    groups, rest = read_state(folder.state)
    then = rest["settings"]
    changed = [key for key in {**then, **settings} if then.get(key) != _as_json(settings.get(key))]
    if changed:
        words = ", ".join(f"{key} was {then.get(key)!r} and is {settings.get(key)!r}" for key in changed)
        raise ValueError(
            f"{folder.path} holds a run with other settings: {words}; go on with the same ones, use another --output,"
            " or start over with --no-resume"
        )
    return groups, rest


def _as_json(value: Any) -> Any:
    """What a value looks like after a trip through JSON: keys are strings, tuples are lists."""
    if isinstance(value, Mapping):
        return {str(key): _as_json(item) for key, item in value.items()}
    return [_as_json(item) for item in value] if isinstance(value, (list, tuple)) else value


def _with_crop(recipe: Recipe, model: nn.Module, opened: ImageData) -> Recipe:
    """The recipe with the crop of evaluation filled in: all of an image that is small already, else the model's own."""
    if recipe.crop_pct is not None:
        return recipe
    small = isinstance(opened.val, Dataset) and opened.val.arrays() is not None
    return replace(recipe, crop_pct=1.0 if small else resolve_model_data_config(model)["crop_pct"])


def _loaders(opened: ImageData, recipe: Recipe, config: Row, accelerator: Accelerator, reading: Row) -> Any:
    batch = recipe.micro_batch(accelerator.num_processes)
    place = {"rank": accelerator.process_index, "world": accelerator.num_processes, "device": accelerator.device}
    common = {"batch_size": batch, **reading, **place, **statistics(config)}
    train_loader = make_loader(opened.train, recipe, train=True, **common)
    return train_loader, make_loader(opened.val, recipe, train=False, **common)


def _task(recipe: Recipe, opened: ImageData, config: Row, accelerator: Accelerator) -> Task:
    classes = len(opened.classes)
    if recipe.distillation == "none":
        return Classify(recipe, classes)
    student = (config["mean"], config["std"])
    teacher = load_teacher(
        str(recipe.teacher), classes, student, accelerator.device, accelerator.autocast, recipe.compile
    )
    return Distill(recipe, classes, teacher)
