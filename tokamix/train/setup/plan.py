"""What is trained on what: the model, the data and the task of a run, which is all that differs from task to task."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from timm.data import resolve_model_data_config
from torch import nn

from tokamix.checkpoint import load_checkpoint
from tokamix.data import DatasetSplits, ImageDataset, create_dataset
from tokamix.data.annotated import loader as annotated
from tokamix.data.images import loader as images
from tokamix.evaluate.detection import check_detection
from tokamix.inference import InferenceConfig
from tokamix.recipes import Recipe
from tokamix.train.loop.epochs import Rounds
from tokamix.train.output.run_folder import Row
from tokamix.train.setup.model import build_dense, build_model, inference_config, timm_config
from tokamix.train.setup.parallel import Accelerator
from tokamix.train.setup.teacher import load_teacher
from tokamix.train.tasks import Task
from tokamix.train.tasks.classify import Classify
from tokamix.train.tasks.detect import Detect
from tokamix.train.tasks.distill import Distill
from tokamix.train.tasks.segment import Segment

Data = str | DatasetSplits
Loaders = tuple[Any, Any]


class Plan(NamedTuple):
    """A run before it starts.

    Attributes:
        recipe: with what only model and data could say.
        network: the model.
        config: what config.json will say of it.
        name: of the model.
        data: name of the data.
        equip: makes loaders and task for a process.
    """

    recipe: Recipe
    network: Any
    config: Row
    name: str
    data: str
    equip: Callable[[Accelerator, Row], tuple[Loaders, Task]]


def make_plan(
    model: str | nn.Module | None, data: Data, recipe: Recipe, checkpoint: str | Path | None, pretrained: bool
) -> Plan:
    """The plan for a recipe's task; see `tokamix.train.train` for the arguments."""
    make = _classification if recipe.task == "classify" else _dense
    return make(model, data, recipe, checkpoint, pretrained)


def _classification(
    model: str | nn.Module | None, data: Data, recipe: Recipe, checkpoint: str | Path | None, pretrained: bool
) -> Plan:
    opened = create_dataset(data, seed=recipe.seed) if isinstance(data, str) else data
    if opened.task != "classify":
        raise ValueError(f"the recipe {recipe.name} classifies images, but {opened.name} was opened for another task")
    channels = recipe.model_kwargs.get("in_chans", 3)
    classes = len(opened.classes)
    if isinstance(model, nn.Module):
        if (answers := getattr(model, "num_classes", classes)) != classes:
            raise ValueError(f"the model tells {answers} classes apart, but the data has {classes}")
        if checkpoint is not None:
            load_checkpoint(model, checkpoint)
        network: Any = model
        arguments: Row = {}
    else:
        network, arguments = build_model(model, recipe, classes, channels, checkpoint, pretrained)
    recipe = _with_crop(recipe, network, opened)
    config = inference_config(network, recipe, channels, opened.classes)
    described = timm_config(network, arguments, config)
    normalisation = {"in_chans": channels, "mean": config.mean, "std": config.std}

    def equip(accelerator: Accelerator, reading: Row) -> tuple[Loaders, Task]:
        common = {**reading, **_place(recipe, accelerator)}
        train_loader = images.create_train_loader(opened.train, recipe, **common, **normalisation)
        loaders = in_rounds(train_loader, recipe), images.create_eval_loader(opened.val, config, **common)
        if recipe.distillation == "none":
            return loaders, Classify(recipe, classes)
        student, device = (config.mean, config.std), accelerator.device
        teacher = load_teacher(str(recipe.teacher), classes, student, device, accelerator.autocast, recipe.compile)
        return loaders, Distill(recipe, classes, teacher)

    return Plan(recipe, network, described, described["architecture"], opened.name, equip)


def _dense(
    model: str | nn.Module | None, data: Data, recipe: Recipe, checkpoint: str | Path | None, pretrained: bool
) -> Plan:
    task_name: Any = recipe.task
    opened = create_dataset(data, task_name, seed=recipe.seed) if isinstance(data, str) else data
    if opened.task == "classify":
        raise ValueError(f"task {recipe.task} needs scenes, but {opened.name} holds images with one label each")
    network, config = build_dense(model, recipe, opened, checkpoint, pretrained)
    if recipe.task == "detect":
        check_detection(opened.val, network.has_masks)

    def equip(accelerator: Accelerator, reading: Row) -> tuple[Loaders, Task]:
        common = {**reading, **_place(recipe, accelerator)}
        inference = InferenceConfig.from_dict(config["inference"])
        normalisation: Row = {"mean": inference.mean, "std": inference.std}
        train_loader = annotated.create_train_loader(opened.train, recipe, **common, **normalisation)
        val_loader = annotated.create_eval_loader(opened.val, inference, **common)
        make = Segment if recipe.task == "segment" else Detect
        return (in_rounds(train_loader, recipe), val_loader), make(recipe, opened, config)

    name = f"{config['method']} with {config['backbone']}"
    return Plan(recipe, network, config, name, opened.name, equip)


def in_rounds(loader: Any, recipe: Recipe) -> Rounds:
    """The loader's batches from one evaluation to the next: of an epoch, or so many as the recipe counts."""
    if recipe.iterations is None:
        return Rounds(loader, len(loader))
    return Rounds(loader, (recipe.eval_every or recipe.iterations) * recipe.accumulate)


def _place(recipe: Recipe, accelerator: Accelerator) -> Row:
    world = accelerator.num_processes
    place = {"rank": accelerator.process_index, "world_size": world, "device": accelerator.device}
    return {"batch_size": recipe.micro_batch(world), **place}


def _with_crop(recipe: Recipe, model: nn.Module, opened: DatasetSplits) -> Recipe:
    """The recipe with the crop of evaluation filled in: all of an image that is small already, else the model's own."""
    if recipe.crop_pct is not None:
        return recipe
    small = isinstance(opened.val, ImageDataset) and opened.val.arrays() is not None
    return recipe.replace(crop_pct=1.0 if small else resolve_model_data_config(model)["crop_pct"])
