"""`tokamix eval`: metrics of a trained model on a data set."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from tokamix.cli._shared import METRICS, console, plain_errors


def eval_(
    source: Annotated[
        str, typer.Argument(help="a run's folder, a checkpoint file, a pretrained timm model, or hf-hub:user/name")
    ],
    data: Annotated[str, typer.Option(help="the data, as for `tokamix train`")],
    split: Annotated[Literal["val", "train", "all"], typer.Option(help="part of the data to evaluate on")] = "val",
    model: Annotated[str | None, typer.Option(help="name of the architecture, for a checkpoint file")] = None,
    image_size: Annotated[int | None, typer.Option(help="image size in pixels; default: the model's own")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="change an inference option: test_scales=[0.75,1], test_flip=true, window=512"),
    ] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None, typer.Option(help="of the forward passes; default: the run's")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="images of one forward pass; default: 128, or 1")] = None,
    report: Annotated[
        Path | None, typer.Option(help="folder for a classifier's confusion matrix, class accuracies and mistakes")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: a GPU if there is one")] = None,
    workers: Annotated[int, typer.Option(min=0, help="processes that decode images")] = min(8, os.cpu_count() or 1),
    corrupt: Annotated[Literal["raise", "skip"], typer.Option(help="for images that cannot be decoded")] = "raise",
) -> None:
    """Evaluate a trained model on a data set.

    On many GPUs: torchrun --nproc-per-node 8 -m tokamix eval ...
    """
    with plain_errors():
        from tokamix.distributed import process_group
        from tokamix.evaluate import evaluate

        with process_group(device) as rank:
            result = evaluate(
                source,
                data,
                model=model,
                split=split,
                image_size=image_size,
                overrides=set_ or (),
                precision=precision,
                batch_size=batch_size,
                device=device,
                workers=workers,
                corrupt=corrupt,
                report=report,
            )
        if rank != 0:
            return
        part = "all images" if split == "all" else f"split {split}"
        images = f"{result.num_images:,} of {result.total_images:,} images ({part})"
        console.print(
            f"{result.source} on {result.data}: {images}, {result.precision} on {result.device}",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        for note in result.notes:
            console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
        console.print(_table(result.metrics, result.num_classes))
        if report is not None:
            console.print(f"the report is in {report}", highlight=False, markup=False, soft_wrap=True)


def _table(metrics: dict[str, float], num_classes: int) -> Table | str:
    if "top1" in metrics:
        top5 = f"  top-5 {metrics['top5']:.2f} %" if num_classes > 5 else ""  # otherwise it is always 100 %
        return f"top-1 {metrics['top1']:.2f} %{top5}  loss {metrics['loss']:.4f}"
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for key, value in metrics.items():
        kind, _, name = key.partition("/")
        table.add_row(f"IoU of {name}" if kind == "iou" else METRICS.get(key, key.replace("_", " ")), f"{value:.2f} %")
    return table
