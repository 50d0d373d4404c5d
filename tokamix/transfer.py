"""`transfer`: fine-tune one pretrained classifier on several data sets, and compare the accuracies in one table."""

import csv
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from timm.models import split_model_name_tag

from tokamix.data import create_dataset
from tokamix.distributed import rank_and_world_size
from tokamix.files import write_text
from tokamix.inference import choose_device, load_model, read_config, read_construction
from tokamix.recipes import load_overrides, load_recipe
from tokamix.train import RunResult, train
from tokamix.train.setup.choose import fit_batch

# AMixer's transfer settings (supplement, section A); other data sets use those of CIFAR-10
RECIPES = {
    "cifar10": "amixer_cifar10",
    "cifar100": "amixer_cifar100",
    "stanfordcars": "amixer_cars",
    "flowers102": "amixer_flowers",
}
SHORT = {"cars": "StanfordCars", "flowers": "Flowers102"}
CPU_IMAGES = 32  # of a forward pass on a CPU; larger batches are accumulated, so that they fit into memory
# regularisation stays that of pre-training (supplement, section A); the recipes have AMixer-T's value
DROP_PATH = {"amixer_small": 0.35, "amixer_base": 0.5, "amixer_deit_small": 0.1}
_log = logging.getLogger("tokamix")


@dataclass(frozen=True)
class TransferRow:
    """Result on one data set.

    Attributes:
        data: name of the data set.
        classes: number of classes.
        train_images: images that the model was fine-tuned on.
        val_images: images that it was evaluated on.
        recipe: name of the recipe.
        epochs: of the fine-tuning.
        last: accuracy of the last weights in percent.
        best: accuracy of the best epoch in percent. The epoch is chosen on the validation images: it is optimistic.
        folder: of the run.
    """

    data: str
    classes: int
    train_images: int
    val_images: int
    recipe: str
    epochs: int
    last: float
    best: float
    folder: Path


def transfer(
    source: str | Path,
    to: str | Sequence[str],
    output: str | Path = "runs/transfer",
    *,
    model: str | None = None,
    recipe: str | None = None,
    overrides: Sequence[str] | Mapping[str, Any] = (),
    resume: bool = True,
    device: str | None = None,
    workers: int = 0,
    quiet: bool = True,
    progress: Callable[[str], None] | None = None,
) -> list[TransferRow]:
    """Fine-tune a pretrained classifier on each data set of a list. If it is stopped, the same call resumes it.

    Args:
        source: a run's folder, a checkpoint file, `hf-hub:user/name`, or a timm name with pretrained weights.
        to: data sets for `tokamix.create_dataset`; also "cars", "flowers", and "folder:PATH". One string may hold
            several, separated by commas, unless it ends in .npz.
        output: folder for results.csv and a run of each data set.
        model: name of the architecture, for a checkpoint file.
        recipe: for all data sets; default: AMixer's transfer recipe of the data set, or its CIFAR-10 one.
        overrides: values that replace the recipe's, such as "epochs=20".
        resume: continue the runs in `output`; False starts over.
        device: "cuda" or "cpu"; default: a GPU if there is one.
        workers: processes that decode images.
        quiet: do not print the progress of each run.
        progress: called with a line for each finished run.
    """
    sources = _split(to)
    start, name = _find_start(source, model)
    overrides = load_overrides(overrides)
    if name in DROP_PATH and recipe is None:
        overrides = {"drop_path": DROP_PATH[name], **overrides}
    opened = []
    for one in sources:  # all of them first: an error after hours of training would come late
        splits = create_dataset(one)
        opened.append((splits.name, splits.title, (splits.num_classes, len(splits.train), len(splits.val))))
    titles = _titles([(path, title) for path, title, _ in opened])
    rows: list[TransferRow] = []
    for one, title, (*_, counts) in zip(sources, titles, opened, strict=True):
        own = RECIPES.get(one.partition(":")[0].lower())
        name = recipe or own or RECIPES["cifar10"]
        fitting = {} if recipe else _fit_batch(name, title, None if own else counts[1], overrides, device)
        result = train(
            recipe=name,
            data=one,
            output=Path(output) / title.replace("/", "_"),
            overrides={**fitting, **overrides},
            resume=resume,
            device=device,
            workers=workers,
            quiet=quiet,
            **start,
        )
        rows.append(_create_row(title, counts, name, result))
        if rank_and_world_size()[0] == 0:
            write_text(Path(output) / "results.csv", _csv(rows))
        if progress is not None:
            progress(f"{title}: {rows[-1].last:.2f} % after {rows[-1].epochs} epochs")
    return rows


def _split(to: str | Sequence[str]) -> list[str]:
    """Names of data sets as `create_dataset` knows them."""
    words = []
    for entry in [to] if isinstance(to, str) else to:
        words += [entry] if entry.endswith(".npz") else entry.split(",")
    names = [word.strip().removeprefix("folder:") for word in words if word.strip()]
    if not names:
        raise ValueError("transfer needs at least one data set, such as cifar10,flowers102")
    kinds = [name.partition(":") for name in names]  # cars, or cars:/my/folder
    names = [SHORT.get(kind.lower(), kind) + colon + rest for kind, colon, rest in kinds]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"the data set {twice[0]} is given twice")
    return names


def _titles(named: Sequence[tuple[str, str]]) -> list[str]:
    """A title for each data set, the folder of its run; folders of the same name have that of their parent before it.

    Args:
        named: name, which is a whole path for folders, and title of each data set.
    """
    if twice := [name for name, _ in named if [other for other, _ in named].count(name) > 1]:
        raise ValueError(f"the data set {twice[0]} is given twice")
    short = [title for _, title in named]
    titles = [f"{Path(name).parent.name}/{title}" if short.count(title) > 1 else title for name, title in named]
    if twice := [title for title in titles if titles.count(title) > 1]:
        raise ValueError(f"two data sets are called {twice[0]}; rename a folder, or transfer to them one after another")
    return titles


def _find_start(source: str | Path, model: str | None) -> tuple[dict[str, Any], str | None]:
    """Arguments of `train` that give the pretrained weights, and the name of the architecture if it is known."""
    if Path(source).is_file() and model is not None:
        return {"model": model, "checkpoint": source}, model
    _, config = load_model(source, model=model)  # has the sentences for everything that may be wrong with it
    if config.task != "classify":
        raise ValueError(f"transfer is for classifiers, but the task of {source} is {config.task}")
    if Path(source).exists() or str(source).startswith("hf-hub:"):
        name = read_construction(read_config(source))["name"] if Path(source).exists() else None
        return {"model": model, "checkpoint": source}, name
    return {"model": str(source), "pretrained": True}, split_model_name_tag(str(source))[0]


def _fit_batch(
    recipe: str, title: str, images: int | None, given: Mapping[str, Any], device: str | None
) -> dict[str, int]:
    """Changes of the recipe's batch that the user has not decided: smaller for few images, accumulated on a CPU.

    `images` is None for the paper's data sets, which keep the paper's batch.
    """
    if "batch_size" in given or "accumulate" in given:
        return {}
    batch = whole = load_recipe(recipe).batch_size
    changes = {}
    if images is not None and (batch := fit_batch(whole, images)) < whole:
        _log.warning("%s: batch %d instead of %d for %d images; --batch-size sets it", title, batch, whole, images)
        changes["batch_size"] = batch
    if choose_device(device).type == "cpu" and batch > (least := CPU_IMAGES * rank_and_world_size()[1]):
        changes["accumulate"] = batch // least
        _log.warning(
            "%s: on the CPU a batch of %d is accumulated from %d parts (--set accumulate=%d)",
            *(title, batch, changes["accumulate"], changes["accumulate"]),
        )
    return changes


def _create_row(title: str, counts: Sequence[int], recipe: str, result: RunResult) -> TransferRow:
    classes, train_images, val_images = counts
    tops = [row[key] for row in result.epochs for key in ("top1", "ema_top1") if key in row]
    scores = {"last": result.last["top1"], "best": max(tops)}
    return TransferRow(
        title, classes, train_images, val_images, recipe, len(result.epochs), **scores, folder=result.folder
    )


def _csv(rows: Sequence[TransferRow]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, [f.name for f in fields(TransferRow)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue()
