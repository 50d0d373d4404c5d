"""`tokamix probe`: accuracy of k-NN, of a linear classifier and of fine-tuning on a model's features."""

import os
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.table import Table

from tokamix.cli._shared import console, plain_errors


def probe(
    source: Annotated[
        str, typer.Argument(help="A run's folder, a checkpoint file, a pretrained timm model, or hf-hub:user/name.")
    ],
    data: Annotated[str, typer.Option(help="The data with labels, as for `tokamix train`.")],
    method: Annotated[
        list[str] | None,
        typer.Option(help="knn, linear or finetune; repeatable. Default: knn and linear."),
    ] = None,
    k: Annotated[list[int] | None, typer.Option(help="Neighbours; repeatable. Default: 10, 20, 100, 200.")] = None,
    pool: Annotated[
        Literal["model", "token", "avg", "concat"],
        typer.Option(help="Features: the model's own, class token, mean, or SimA's 4 vectors side by side."),
    ] = "model",
    layer: Annotated[int | None, typer.Option(help="Block or stage for pool token and avg; -1 is the last.")] = None,
    model: Annotated[str | None, typer.Option(help="Name of the architecture, for a checkpoint file.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Image size in pixels. Default: the model's own.")] = None,
    precision: Annotated[
        Literal["fp32", "bf16", "fp16"] | None,
        typer.Option(help="Precision of the forward passes. Default: the run's."),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images of one forward pass.")] = 128,
    recipe: Annotated[
        str, typer.Option(help="Recipe of the fine-tuning; small: with lr 1e-4 and 30 epochs.")
    ] = "small",
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="key=value replaces a value of that recipe; repeatable.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the fine-tuning's run.")] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu. Default: a GPU if there is one.")] = None,
    workers: Annotated[int, typer.Option(min=0, help="Processes that decode images.")] = min(8, os.cpu_count() or 1),
) -> None:
    """Measure the features of a model: k-NN, a linear classifier, fine-tuning.

    On many GPUs: torchrun --nproc-per-node 8 -m tokamix probe ...
    """
    with plain_errors():
        from tokamix.distributed import process_group
        from tokamix.probe import probe as run

        with process_group(device) as rank:
            result = run(
                source,
                data,
                methods=method or ("knn", "linear"),
                model=model,
                k=k,
                pool=pool,
                layer=layer,
                image_size=image_size,
                precision=precision,
                batch_size=batch_size,
                device=device,
                workers=workers,
                recipe=recipe,
                overrides=set_ or (),
                output=output,
                quiet=False,
            )
        if rank != 0:
            return
        train, val = result.num_images
        console.print(
            f"{result.source} on {result.data}: {result.dimensions} features, {train:,} training images, {val:,}"
            " validation images",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        table = Table(box=None, header_style="bold", pad_edge=False)
        table.add_column("method", no_wrap=True)
        table.add_column("top-1", justify="right", no_wrap=True)
        table.add_column("settings")
        for name, accuracy, settings in result.rows():
            table.add_row(name, f"{accuracy:.2f} %", settings)
        console.print(table)
