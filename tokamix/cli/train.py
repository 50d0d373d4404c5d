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
            help="a folder, .npz files, digits, shapes, CIFAR100, hf:user/name, wds:...tar; to segment or detect:"
            " shapes, or a folder with masks or COCO's annotations"
        ),
    ],
    model: Annotated[
        str | None, typer.Option(help="a model of `tokamix models` or timm; default: the recipe's")
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="a name of `tokamix recipes`, or a YAML file; default: small for the task")
    ] = None,
    task: Annotated[
        Literal["classify", "segment", "detect"] | None, typer.Option(help="what is learned; default: the recipe's")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="key=value replaces a value of the recipe")] = None,
    output: Annotated[Path, typer.Option(help="the run's folder")] = Path("runs/last"),
    checkpoint: Annotated[
        str | None,
        typer.Option(help="weights to start from, of any classes, channels and size: a file, a run, hf-hub:user/name"),
    ] = None,
    pretrained: Annotated[bool, typer.Option("--pretrained", help="start from timm's pretrained weights")] = False,
    resume: Annotated[bool, typer.Option(help="go on with the run in the folder, or start over")] = True,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one")] = None,
    workers: Annotated[int, typer.Option(help="processes that decode images")] = min(8, os.cpu_count() or 1),
    corrupt: Annotated[Literal["raise", "skip"], typer.Option(help="what to do with undecodable pictures")] = "raise",
    save_every: Annotated[int | None, typer.Option(help="steps between saved states; default: by the clock")] = None,
    log_every: Annotated[int, typer.Option(help="steps between lines of metrics.jsonl")] = 50,
    skip_nan: Annotated[int, typer.Option(help="leave out so many steps whose loss is not finite")] = 0,
    fsdp: Annotated[bool, typer.Option("--fsdp", help="shard the model over the processes (FSDP2)")] = False,
    deterministic: Annotated[bool, typer.Option("--deterministic", help="the same bits on a GPU too; slower")] = False,
    wandb: Annotated[str | None, typer.Option(help="a project of Weights & Biases to report to")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="print nothing but errors")] = False,
) -> None:
    """Train a model; the same command goes on after a stop.

    On many GPUs: torchrun --nproc-per-node 8 -m tokamix train ...
    """
    with plain_errors():
        import torch.distributed as dist

        from tokamix.train import train as run

        result = run(
            model,
            data,
            recipe,
            output,
            task=task,
            overrides=set_ or (),
            checkpoint=checkpoint,
            pretrained=pretrained,
            resume=resume,
            device=device,
            workers=workers,
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
            words = f"best {METRICS[result.metric]} {result.score:.2f} % in epoch {result.best['epoch'] + 1}"
            console.print(f"{words}; everything is in {output}")
