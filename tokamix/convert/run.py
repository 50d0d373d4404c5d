"""`convert`: turn a trained classifier into one with another mixer, and report what was lost and gained."""

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tokamix._construction import record_argument
from tokamix.checkpoint import load_checkpoint
from tokamix.convert.measure import measure_speeds
from tokamix.convert.report import Conversion
from tokamix.data import DatasetSplits, create_dataset
from tokamix.data.images.loader import create_eval_loader, create_train_loader
from tokamix.distributed import init_process_group, rank_and_world_size
from tokamix.evaluate.accuracy import measure_accuracy
from tokamix.evaluate.classes import match_classes
from tokamix.inference import InferenceConfig, autocast, choose_device, load_model
from tokamix.mixers.registry import get_mixer
from tokamix.recipes import Recipe, load_overrides, load_recipe
from tokamix.swap import swap_mixer
from tokamix.swap.calibrate import calibrate_mixers
from tokamix.swap.inspect import nominal_size
from tokamix.swap.mixer import SHAPELESS
from tokamix.train import train
from tokamix.train.setup.teacher import load_teacher
from tokamix.train.tasks.convert import FineTune, Transfer

SIZES = (224, 512, 1024, 2048)
CALIBRATION_IMAGES = 256
SHARE = 0.25  # epochs of a conversion, as a fraction of those of the run that trained the original
TRANSFER = 0.2  # of them, those of attention transfer
TRANSFER_LR, FINE_TUNE_LR = 0.4, 0.4  # factors on the learning rate of the recipe
PROGRESSIVE = 0.5  # fraction of the fine-tuning in which blocks are converted one after another


def convert(
    model: str | Path | nn.Module,
    data: str | DatasetSplits,
    to: str = "sima",
    output: str | Path = "runs/convert",
    *,
    recipe: str | Recipe | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    epochs: int | None = None,
    transfer_epochs: int | None = None,
    keep: int | Sequence[str] = 0,
    progressive: bool = False,
    teacher: str = "self",
    mixer_kwargs: Mapping[str, Any] | None = None,
    calibration_images: int = CALIBRATION_IMAGES,
    sizes: Sequence[int] = SIZES,
    resume: bool = True,
    device: str | None = None,
    workers: int = 0,
    quiet: bool = False,
) -> Conversion:
    """Replace the attention of a trained classifier by another mixer, and restore its accuracy in three phases.

    1. Calibration: the new mixers are fitted to the attention in closed form, on a few images.
    2. Attention transfer: each new mixer learns its attention's output, all blocks at once.
    3. Fine-tuning with distillation from the original.

    If it is stopped, the same call resumes it. It runs in every process of torchrun.

    Args:
        model: the original: a run's folder, a pretrained timm name, `hf-hub:user/name`, or a classifier as a module.
        data: the data it was trained on, as for `tokamix.train`.
        to: a registered mixer.
        output: folder of the converted network, of the report (conversion.md, conversion.json) and of the transfer.
        recipe: how both trainings are done; default: the original run's own recipe, or `convert` for other models.
        overrides: values that replace the recipe's, such as "lr=1e-4"; "image_size=384" also fits the model to it.
        epochs: of both trainings together; default: a quarter of those of the original run, or those of `convert`.
        transfer_epochs: of them, those of attention transfer; 0 leaves it out. Default: a fifth.
        keep: number of blocks that keep softmax attention, those whose calibration has the largest error; or names.
        progressive: convert the blocks one after another during the first half of the fine-tuning.
        teacher: "self", the original; another teacher for the fine-tuning, as in recipes; or "none", labels only.
        mixer_kwargs: options of the mixer.
        calibration_images: training images for the calibration; 0 leaves it out.
        sizes: image sizes at which speed and memory are measured before and after.
        resume: continue the conversion in `output`; False starts over.
        device: "cuda" or "cpu"; default: a GPU if there is one.
        workers: processes that decode images.
        quiet: print nothing.
    """
    get_mixer(to)  # an unknown name fails before anything is loaded
    _check_sizes(sizes)
    original, config = _load_original(model)
    splits = create_dataset(data) if isinstance(data, str) else data
    splits.check_training_images()
    _check_classes(config, splits)
    recipe = _choose_recipe(model, recipe, overrides, config)
    plan = _plan_epochs(recipe, epochs, transfer_epochs, model)
    if len(splits.train) < recipe.batch_size:
        raise ValueError(
            f"{len(splits.train)} training images do not fill one batch of {recipe.batch_size}; use a smaller one, such"
            f" as --batch-size {max(1, len(splits.train) // 4)}"
        )
    if teacher not in ("self", "none"):  # it is needed after the transfer only, but may not exist
        load_teacher(teacher, len(splits.classes), (config.mean, config.std), torch.device("cpu"), nullcontext)
    _set_image_size(original, config, recipe.image_size)
    where = choose_device(device)
    init_process_group("nccl" if where.type == "cuda" else "gloo")
    where = torch.device("cuda", torch.cuda.current_device()) if where.type == "cuda" else where
    bench = _Bench(splits, recipe, config, where, workers)
    original.to(where)
    result = Conversion(Path(output), _describe(model), to, splits.name, _device_name(where), epochs=plan)
    options: dict[str, Any] = {"mixer_kwargs": dict(mixer_kwargs)} if mixer_kwargs else {}
    if to not in SHAPELESS:
        options["image_size"] = recipe.image_size  # their parameters fit the grid of tokens

    result.accuracy["original"] = bench.accuracy(original)
    images = list(bench.calibration_batches(calibration_images))
    student, hosts = _swap(original, to, options)
    if keep:
        errors = calibrate_mixers(student, hosts, original, images) if images else {}
        result.kept = _choose_kept(list(hosts), keep, errors)
        options["where"] = [name for name in hosts if name not in result.kept]
        student, hosts = _swap(original, to, options)
    result.accuracy["swapped"] = bench.accuracy(student)
    if images:
        result.errors = calibrate_mixers(student, hosts, original, images)
        result.accuracy["calibrated"] = bench.accuracy(student)

    common: dict[str, Any] = {"resume": resume, "device": device, "workers": workers, "quiet": quiet}
    if plan["transfer"]:
        phase = _transfer_recipe(recipe, plan["transfer"])
        frozen = copy.deepcopy(hosts)
        folder = train(
            student,
            splits,
            phase,
            result.folder / "transfer",
            task=lambda recipe, data: Transfer(recipe, data, frozen),
            **common,
        ).folder
        student, hosts = _swap(original, to, options)
        load_checkpoint(student, folder / "last.safetensors")
        student.to(where)
        result.accuracy["transferred"] = bench.accuracy(student)
    phase = _fine_tune_recipe(recipe, plan["fine-tuning"], teacher)
    reference = copy.deepcopy(original)
    fraction = PROGRESSIVE if progressive else 0.0
    run = train(
        student,
        splits,
        phase,
        result.folder,
        task=lambda recipe, data: FineTune(recipe, data, reference, hosts, fraction),
        **common,
    )
    result.accuracy["converted"] = run.top1  # of the weights that are kept
    if rank_and_world_size()[0] == 0:
        student, _ = _swap(original, to, options)  # not compiled, without hooks
        load_checkpoint(student, run.folder / "model.safetensors")
        result.before, result.after = (
            measure_speeds(network, sizes, config.in_chans, where) for network in (original, student)
        )
        result.write()
    return result


def _load_original(model: str | Path | nn.Module) -> tuple[nn.Module, InferenceConfig]:
    """The original, with its own copy of the weights, and its inference config."""
    if isinstance(model, nn.Module):
        # pretrained_cfg does not know the img_size that a model was created with
        return copy.deepcopy(model).eval(), InferenceConfig.from_model(model).replace(image_size=nominal_size(model)[0])
    network, config = load_model(model)
    if config.task != "classify":
        raise ValueError(f"convert changes classifiers, but {model} is for task {config.task}")
    return network, config


def _check_sizes(sizes: Sequence[int]) -> None:
    """Refuse image sizes that could not be measured after all the training."""
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ValueError(f"sizes is {sizes!r}, but must be image sizes in pixels, such as (224, 512)")


@torch.no_grad()
def _set_image_size(original: Any, config: InferenceConfig, size: int) -> None:
    """Fit the original to the image size of the recipe; a size that it does not take is refused."""
    if nominal_size(original) != (size, size) and hasattr(original, "set_input_size"):
        original.set_input_size(img_size=size)
        record_argument(original, "img_size", size)
    try:
        original.eval()(torch.zeros(1, config.in_chans, size, size))
    except Exception as error:
        raise ValueError(
            f"the model does not take images of {size}x{size}; give the image_size that it was trained with,"
            f" such as --image-size {config.image_size} ({error})"
        ) from error


def _check_classes(config: InferenceConfig, splits: DatasetSplits) -> None:
    """Refuse data whose classes are not exactly the model's: the classifier stays as it is."""
    if splits.task != "classify":
        raise ValueError(f"convert changes classifiers, but {splits.name} was opened for task {splits.task}")
    index, note = match_classes(config, splits.classes, splits.name)
    if index is not None:
        raise ValueError(
            f"{splits.name} does not have the classes of the model in the same order ({note}); convert with the data"
            " that the model was trained on"
        )


def _choose_recipe(
    model: Any, recipe: str | Recipe | None, overrides: Sequence[str] | Mapping[str, Any], config: InferenceConfig
) -> Recipe:
    """The given recipe, the run's own, or `convert` with the model's image size."""
    if isinstance(recipe, Recipe):
        chosen = recipe
    elif recipe is not None:
        chosen = load_recipe(recipe, overrides)
    elif not isinstance(model, nn.Module) and (path := Path(model) / "recipe.yaml").is_file():
        chosen = load_recipe(path, overrides)
    else:
        chosen = load_recipe("convert", {"image_size": config.image_size, **load_overrides(overrides)})
    if chosen.task != "classify":
        raise ValueError(f"convert trains classifiers, and the recipe {chosen.name} is for task {chosen.task}")
    if chosen.iterations:
        raise ValueError(f"convert counts epochs, but the recipe {chosen.name} has iterations; set iterations=none")
    return chosen


def _plan_epochs(recipe: Recipe, epochs: int | None, transfer: int | None, model: Any) -> dict[str, int]:
    """Epochs of transfer and fine-tuning."""
    from_run = recipe.name != "convert"
    total = epochs if epochs is not None else max(2, round(recipe.epochs * SHARE)) if from_run else recipe.epochs
    if total < 1:
        raise ValueError(f"epochs is {total}, but must be at least 1")
    first = min(total - 1, max(1, round(total * TRANSFER))) if transfer is None else transfer
    if not 0 <= first < total:
        raise ValueError(f"transfer_epochs is {first}, but must be from 0 to {total - 1}: the rest is fine-tuning")
    return {"transfer": first, "fine-tuning": total - first}


def _transfer_recipe(recipe: Recipe, epochs: int) -> Recipe:
    """Recipe of attention transfer: unmixed images, no regularisation, evaluated at the end."""
    off: dict[str, Any] = {
        "mixup": 0.0,
        "cutmix": 0.0,
        "ema": None,
        "ema_half_life": None,
        "drop_path_later": {},
        "weight_decay": 0.0,
    }
    schedule = {"epochs": epochs, "warmup_epochs": round(0.1 * epochs, 4), "warmup_iterations": None}
    lr = {"lr": recipe.lr * TRANSFER_LR, "min_lr": min(recipe.min_lr, recipe.peak_lr * TRANSFER_LR)}
    teacher = {"teacher": None, "distillation": "none", "finetune": False}
    run = {"eval_mode": True, "eval_every": epochs, "select": "last", "compile": False, "milestones": ()}
    kind = {"schedule": "cosine" if recipe.schedule == "step" else recipe.schedule}
    return recipe.replace(name=f"{recipe.name}_transfer", **off, **schedule, **lr, **teacher, **run, **kind)


def _fine_tune_recipe(recipe: Recipe, epochs: int, teacher: str) -> Recipe:
    """Recipe of the fine-tuning: the original's own, shorter, with a lower learning rate and a teacher."""
    schedule = {"epochs": epochs, "warmup_epochs": round(0.1 * epochs, 4), "warmup_iterations": None}
    lr = {"lr": recipe.lr * FINE_TUNE_LR, "min_lr": min(recipe.min_lr, recipe.peak_lr * FINE_TUNE_LR)}
    taught = {"teacher": teacher, "distillation": "none" if teacher == "none" else "soft", "finetune": False}
    run = {"eval_every": max(1, epochs // 5), "milestones": (), "drop_path_later": {}}
    kind: dict[str, Any] = {"schedule": "cosine" if recipe.schedule == "step" else recipe.schedule}
    if recipe.ema_half_life:
        kind["ema_half_life"] = recipe.ema_half_life * epochs / recipe.epochs
    return recipe.replace(name=f"{recipe.name}_converted", **schedule, **lr, **taught, **run, **kind)


def _swap(original: nn.Module, to: str, options: Mapping[str, Any]) -> tuple[nn.Module, dict[str, nn.Module]]:
    """A swapped copy of the original, and the replaced attentions, which are modules of the original."""
    student = copy.deepcopy(original)
    torch.manual_seed(0)  # of the parameters that a mixer adds
    report = swap_mixer(student, to, **options)
    return student, {name: original.get_submodule(name) for name in report.replaced}


def _choose_kept(names: Sequence[str], keep: int | Sequence[str], errors: Mapping[str, float]) -> list[str]:
    """Names of the attentions to keep: the given ones, or those that calibration fits worst."""
    keep = [keep] if isinstance(keep, str) else keep
    if isinstance(keep, int):
        if not 0 <= keep < len(names):
            raise ValueError(
                f"keep is {keep}, but must be from 0 to {len(names) - 1}: there are {len(names)} attentions"
            )
        if not errors:
            raise ValueError("keep chooses by calibration: set calibration_images above 0, or give names")
        chosen = sorted(names, key=lambda name: errors[name], reverse=True)[:keep]
        return [name for name in names if name in chosen]
    if unknown := [name for name in keep if name not in names]:
        raise ValueError(f"keep names {unknown[0]!r}, but the attentions are {', '.join(names)}")
    if len(set(keep)) == len(names):
        raise ValueError("keep names all attentions, so nothing would be converted; name fewer")
    return list(keep)


class _Bench:
    """Images for the calibration, and the accuracy of a network on the validation images."""

    def __init__(
        self, splits: DatasetSplits, recipe: Recipe, config: InferenceConfig, device: torch.device, workers: int
    ) -> None:
        self.splits, self.recipe, self.device, self.workers = splits, recipe, device, workers
        changes = {"image_size": recipe.image_size, "interpolation": recipe.interpolation}
        crop = {} if recipe.crop_pct is None else {"crop_pct": recipe.crop_pct}
        self.config = config.replace(**changes, **crop, class_names=tuple(splits.classes))

    def calibration_batches(self, count: int) -> Iterator[Tensor]:
        """Training images without augmentation, in the recipe's random order; the same in all processes."""
        config, size = self.config, min(count, 64, len(self.splits.train))
        if not count:
            return
        plain = {"augment": None, "color_jitter": None, "hflip": 0.0, "crop_scale": None, "crop_padding": 0}
        recipe = self.recipe.replace(**plain, random_erasing=0.0, repeated_augmentation=1)
        loader = create_train_loader(
            self.splits.train,
            recipe,
            batch_size=size,
            device=self.device,
            workers=self.workers,
            in_chans=config.in_chans,
            mean=config.mean,
            std=config.std,
            crop_pct=config.crop_pct,
            crop_mode=config.crop_mode,
        )
        with closing(loader.epoch(0)) as batches:  # type: ignore[type-var]
            for _ in range(min(len(loader), -(-count // size))):
                yield next(batches)[0]

    def accuracy(self, model: nn.Module) -> float:
        """Top-1 in percent over all processes, in float32."""
        rank, world_size = rank_and_world_size()
        places: Any = {"rank": rank, "world_size": world_size, "device": self.device, "workers": self.workers}
        loader = create_eval_loader(self.splits.val, self.config, batch_size=128, **places)
        with autocast(self.device, "fp32"):
            return measure_accuracy(model, loader)["top1"]


def _describe(model: str | Path | nn.Module) -> str:
    return type(model).__name__ if isinstance(model, nn.Module) else Path(model).name


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {os.cpu_count()} cores"
