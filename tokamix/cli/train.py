"""`tokamix train`: train a model from a recipe."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from tokamix.cli._shared import METRICS, console, plain_errors


def train(
    data: Annotated[
        str,
        typer.Option(
            help="A folder, .npz files, digits, shapes, CIFAR100, hf:user/name or wds:...tar; for segment and detect:"
            " shapes, or a folder with masks or COCO annotations."
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="A model of `tokamix models` or timm. Default: the recipe's.")
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="A name of `tokamix recipes`, or a YAML file. Default: chosen by the data and the weights."),
    ] = None,
    task: Annotated[
        Literal["classify", "segment", "detect", "dino", "vqa"] | None, typer.Option(help="Default: the recipe's.")
    ] = None,
    epochs: Annotated[int | None, typer.Option(help="Epochs; the schedule scales with them.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate after warm-up.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Images per optimizer step, over all processes.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of a classifier's images in pixels.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of everything random.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value replaces a value of the recipe; repeatable.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The run's folder. Default: the next of runs/train, runs/train-2, ..."),
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="The folder of an unfinished run to resume.")] = None,
    no_resume: Annotated[bool, typer.Option("--no-resume", help="Start over instead of resuming a run.")] = False,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            help="Weights to start from, also of different classes, channels or image size: a file, a run or"
            " hf-hub:user/name."
        ),
    ] = None,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Start from the model's pretrained weights, of timm or this package.")
    ] = False,
    no_pretrained: Annotated[
        bool, typer.Option("--no-pretrained", help="Start from scratch, also where images are few.")
    ] = False,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")] = None,
    workers: Annotated[
        int | None,
        typer.Option(help="Processes that decode images. Default: one per core, up to 8; a quarter of them on a CPU."),
    ] = None,
    corrupt: Annotated[
        Literal["raise", "skip"],
        typer.Option(help="What to do with images that cannot be decoded: stop, or skip them."),
    ] = "raise",
    save_every: Annotated[int | None, typer.Option(help="Steps between saved states. Default: by the clock.")] = None,
    log_every: Annotated[int, typer.Option(help="Steps between lines of metrics.jsonl.")] = 50,
    skip_nan: Annotated[int, typer.Option(help="Skip up to this many steps whose loss is not finite.")] = 0,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="Shard the model over the processes (FSDP2).")] = False,
    deterministic: Annotated[
        bool, typer.Option("--deterministic", help="Bitwise reproducible on a GPU too; slower.")
    ] = False,
    wandb: Annotated[str | None, typer.Option(help="A project of Weights & Biases to log to.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Print nothing but warnings and errors.")] = False,
) -> None:
    """Train a model. If the run is stopped, the same command resumes it.

    On many GPUs: torchrun --nproc-per-node 8 -m tokamix train ...
    """
    with plain_errors():
        import torch.distributed as dist

        from tokamix.train import train as run
        from tokamix.train.setup.threads import default_workers

        shortcuts = {"epochs": epochs, "lr": lr, "batch_size": batch_size, "image_size": image_size, "seed": seed}
        if resume is not None and no_resume:
            raise ValueError("--resume and --no-resume contradict each other; use one of them")
        if pretrained and no_pretrained:
            raise ValueError("--pretrained and --no-pretrained contradict each other; use one of them")
        result = run(
            model,
            data,
            recipe,
            output,
            task=task,
            overrides=[*(set_ or ()), *(f"{key}={value}" for key, value in shortcuts.items() if value is not None)],
            checkpoint=checkpoint,
            pretrained=pretrained or (False if no_pretrained else None),
            resume=resume or not no_resume,
            device=device,
            workers=default_workers(device) if workers is None else workers,
            corrupt=corrupt,
            save_every=save_every,
            log_every=log_every,
            skip_nan=skip_nan,
            fsdp=fsdp,
            deterministic=deterministic,
            wandb=wandb,
            quiet=quiet,
        )
        if dist.is_initialized():
            dist.destroy_process_group()
        if not quiet and os.environ.get("RANK", "0") == "0":
            averaged = " (averaged weights)" if result.last["averaged"] else ""
            text = f"{result.select} {METRICS[result.metric]} {result.score:.2f} % in epoch {result.best['epoch']}"
            text += f", last {result.last[result.metric]:.2f} %" if result.select == "best" else ""
            console.print(f"{text}{averaged}; the run is in {result.folder}", highlight=False, soft_wrap=True)
