"""A training run from start to end."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from tokamix.inference import load_model
from tokamix.recipes import Recipe, load_recipe
from tokamix.train.loop.engine import Engine, Options
from tokamix.train.loop.state import read_state
from tokamix.train.output.progress import Display
from tokamix.train.output.run_folder import Row, RunFolder
from tokamix.train.output.trackers import Trackers
from tokamix.train.setup.parallel import Accelerator, any_process, create_accelerator, distribute, release
from tokamix.train.setup.plan import Data, make_plan


@dataclass
class RunResult:
    """What a run came to.

    Attributes:
        folder: where everything lies.
        best: the best evaluation: metrics, epoch, and whether it was the average of the weights.
        epochs: a row of numbers for each epoch.
        metric: what decides which is best: "top1", "miou", "mask_ap" or "box_ap".
    """

    folder: Path
    best: Row = field(default_factory=dict)
    epochs: list[Row] = field(default_factory=list)
    metric: str = "top1"

    @property
    def score(self) -> float:
        """The best value of the metric, in percent."""
        return self.best[self.metric]

    @property
    def top1(self) -> float:
        """The best accuracy in percent, of a classifier."""
        return self.best["top1"]

    def load(self) -> Any:
        """The model with its best weights."""
        return load_model(self.folder)[0]


def train(
    model: str | nn.Module | None,
    data: Data,
    recipe: str | Recipe | None = None,
    output: str | Path = "runs/last",
    *,
    task: Literal["classify", "segment", "detect"] | None = None,
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
        model: a name of tokamix or timm, a module, or None for the recipe's or the checkpoint's own; in dense tasks it
            is the backbone's name.
        data: a source as `tokamix.create_dataset` takes it, or `tokamix.create_dataset` in dense tasks; or an
            opened one.
        recipe: a name of `tokamix.recipes.list_recipes()`, a YAML file, or a recipe; default: `small`, `small_segment`
            or `small_detect`, by the task.
        output: the run's folder.
        task: what is learned; default: what the recipe says.
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
        chosen = recipe or ("small" if task in (None, "classify") else f"small_{task}")
        recipe = load_recipe(chosen, overrides, model=model if isinstance(model, str) else None)
    elif overrides:
        raise ValueError("overrides go with the name of a recipe; for a recipe itself use recipe.replace")
    if task is not None and task != recipe.task:
        raise ValueError(f"the recipe {recipe.name} is for the task {recipe.task}, not {task}; name another recipe")
    if fsdp and recipe.task != "classify":
        raise ValueError(f"--fsdp cannot shard the parts of a model for {recipe.task}; leave it out")
    accelerator = create_accelerator(recipe.precision, device)
    main = accelerator.is_main_process
    plan = make_plan(model, data, recipe, checkpoint, pretrained)
    recipe = plan.recipe
    folder = RunFolder(output)
    settings = {**recipe.to_dict(), "model": plan.name, "data": plan.data}
    state = _saved_state(folder, settings, resume, accelerator)

    with _numerics(accelerator.device, deterministic, one_size=recipe.task == "classify"):
        loaders, learned = plan.equip(accelerator, {"workers": workers, "corrupt": corrupt})
        learned.prepare(plan.network)
        whole = recipe.compile and recipe.task == "classify"  # of other models, the task compiles what it can
        wrapped, core, optimizer = distribute(accelerator, plan.network, recipe.replace(compile=whole), fsdp)
        options = Options(save_every, log_every, skip_nan)
        engine = Engine(learned, wrapped, core, optimizer, loaders, recipe, folder, accelerator, options, settings)
        if state is not None:
            engine.restore(*state)
        if main:
            if state is None:
                folder.forget()
            if not engine.finished:
                folder.begin(recipe.to_yaml(), plan.config, accelerator.num_processes, accelerator.device)
            folder.rewind(engine.epoch, engine.update)
        title = f"{plan.name} on {plan.data}"
        silent = quiet or not main
        with ExitStack() as stack:
            stack.callback(release, core)
            trackers = None
            if main and not engine.finished:
                trackers = stack.enter_context(closing(Trackers(folder.path, engine.update, settings, wandb)))
            engine.fit(
                Display(title, recipe.evaluations, engine.steps, engine.update, learned.shown, silent),
                trackers,
                lambda best: folder.present(plan.config, recipe.to_dict(), plan.data, best, learned.shown),
            )
    accelerator.wait_for_everyone()
    return RunResult(folder.path, engine.best or {}, folder.epochs, learned.metric)


@contextmanager
def _numerics(device: torch.device, deterministic: bool, one_size: bool) -> Iterator[None]:
    """PyTorch's settings for a run, and those of before afterwards."""
    before = torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision()
    benchmark, cudnn_attention = torch.backends.cudnn.benchmark, torch.backends.cuda.cudnn_sdp_enabled()
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what PyTorch asks for
        torch.use_deterministic_algorithms(True)
    # a kernel of cuDNN for attention is known for NaN gradients (pytorch/pytorch issue 196678); one came with 64 tokens
    torch.backends.cuda.enable_cudnn_sdp(False)
    if device.type == "cuda" and not deterministic:
        torch.set_float32_matmul_precision("high")
        # it tries out algorithms for each new size: a detector has another number of regions at every step, and a
        # segmenter is evaluated on pictures of all sizes
        torch.backends.cudnn.benchmark = one_size
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.set_float32_matmul_precision(before[1])
        torch.backends.cudnn.benchmark = benchmark
        torch.backends.cuda.enable_cudnn_sdp(cudnn_attention)


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
