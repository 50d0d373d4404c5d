"""`tokamix eval`: the accuracy of a run, a checkpoint or a pretrained model."""

import os
from typing import Annotated, Literal

import typer
from rich.table import Table

from tokamix.cli._shared import METRICS, console, plain_errors


def eval_(
    source: Annotated[str, typer.Argument(help="a run's folder, a checkpoint file, or a pretrained model's name")],
    data: Annotated[str, typer.Option(help="the data, as for `tokamix train`; its validation part is used")],
    model: Annotated[str | None, typer.Option(help="the model's name, for a checkpoint file")] = None,
    image_size: Annotated[int | None, typer.Option(help="side in pixels; default: the model's own")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="for segmenters: test_scales=[0.75,1], test_flip=true, window=512")
    ] = None,
    batch_size: Annotated[int | None, typer.Option(help="images of one forward pass; default: 128, or 1")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; default: cuda where there is one")] = None,
    workers: Annotated[int, typer.Option(help="processes that decode images")] = min(8, os.cpu_count() or 1),
    corrupt: Annotated[Literal["raise", "skip"], typer.Option(help="what to do with undecodable pictures")] = "raise",
) -> None:
    """Measure the accuracy of a run, a checkpoint or a pretrained model.

    On many GPUs: torchrun --nproc-per-node 8 -m tokamix eval ...
    """
    from tokamix.distributed import process_group

    with plain_errors(), process_group(device) as rank:
        from tokamix.evaluate import evaluate

        metrics = evaluate(
            source,
            data,
            model=model,
            image_size=image_size,
            overrides=set_ or (),
            batch_size=batch_size,
            device=device,
            workers=workers,
            corrupt=corrupt,
        )
        if rank == 0:
            console.print(_table(metrics))


def _table(metrics: dict[str, float]) -> Table | str:
    if "top1" in metrics:
        return f"top-1 {metrics['top1']:.2f} %  top-5 {metrics['top5']:.2f} %  loss {metrics['loss']:.4f}"
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(justify="right")
    for key, value in metrics.items():
        kind, _, name = key.partition("/")
        table.add_row(f"IoU of {name}" if kind == "iou" else METRICS.get(key, key.replace("_", " ")), f"{value:.2f} %")
    return table
